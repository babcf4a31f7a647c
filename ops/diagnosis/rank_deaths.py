"""Why ranks died: what their exits say, joined with what their nodes have seen just before.

An exit knows its signal and its error, and the kernel knows why: a SIGKILL is the memory killer's where a
control group counted one, and a broken collective is the network's, or a GPU's that fell off the bus a moment
ago. What nothing on the nodes explains stays as the exits alone have it (rank_exits.py). Pure; reads neither
files nor the scheduler's own words about a death.
"""

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ops.diagnosis.kernel_log import diagnose_kernel_log
from ops.diagnosis.rank_exits import RankExit
from ops.diagnosis.verdict import Role, Verdict
from ops.incident import FailureClass, Incident, Nature
from ops.signal import Entity, EntityKind, Signal

EVIDENCE_BEFORE_S = 60.0
"""What was seen so long before the first sign of a failure may have caused it."""
KILL_WINDOW_S = 15.0
"""The same for the memory killer: it kills at once, and its counters are read every few seconds."""
KERNEL_LOG = "kernel_log"
AMBIGUOUS_XIDS = frozenset({"xid_13", "xid_31", "xid_32", "xid_43", "xid_69", "xid_109"})
CONTAINED_XIDS = frozenset({"xid_63", "xid_92", "xid_94"})
LOST_GPU_KINDS = frozenset({"gpu_lost", "gpu_unreachable"})
DOWN_KINDS = frozenset({"nic_down", "nic_missing", "nic_carrier_lost", "nic_flapping"}) | frozenset(
    {"ib_port_down", "ib_port_missing", "ib_link_downed", "ib_flapping"}
)
_UNEXPLAINED = frozenset({FailureClass.WORKER_KILLED, FailureClass.NETWORK, FailureClass.UNKNOWN})
_FROM_GPU = re.compile(r"CUDA|cuda|NCCL|nccl|cuBLAS|CUBLAS")


def join_signals(incident: Incident, exits: Sequence[RankExit], seen: Iterable[Signal]) -> Incident:
    """The incident with the cause that the signals of its nodes give it; as it was where they give none.

    What it was is kept as its `otherwise`.

    Args:
        incident: what the exits alone amount to.
        exits: of the generation until it was judged; empty where shells or nodes died.
        seen: signals of the nodes that the ranks ran on.
    """
    near = [one for one in seen if one.at >= incident.failed_at - EVIDENCE_BEFORE_S]
    if not near or not _is_unexplained(incident):
        return incident
    failed = [exit_ for exit_ in exits if exit_.is_failure]
    killed = {exit_.node for exit_ in failed if exit_.exit_code == -signal.SIGKILL}
    found = _gpu(incident, near, {exit_.node for exit_ in failed})
    if found is None and incident.failure_class is FailureClass.WORKER_KILLED:
        found = _memory_kill(incident, near, killed)
    if found is None and incident.failure_class is FailureClass.NETWORK:
        found = _link_down(incident, near)
    return replace(found, otherwise=incident) if found is not None else incident


def _is_unexplained(incident: Incident) -> bool:
    """An error that a rank has named itself is its cause, unless it came out of a GPU's library."""
    if incident.failure_class in _UNEXPLAINED:
        return True
    is_error = incident.failure_class is FailureClass.USER_CODE
    return is_error and bool(_FROM_GPU.search(incident.evidence))


def _gpu(incident: Incident, near: Sequence[Signal], nodes: set[str]) -> Incident | None:
    """A GPU that broke: on a node whose rank died, or anywhere where the ranks only lost their peers."""
    is_anywhere = incident.failure_class is FailureClass.NETWORK or not nodes
    lost = next((one for one in near if one.kind in LOST_GPU_KINDS), None)
    lines_of: dict[str, list[str]] = {}
    for one in near:
        if one.source == KERNEL_LOG:
            lines_of.setdefault(_node_of(one), []).append(one.text)
    for node, lines in lines_of.items():
        if not is_anywhere and node not in nodes:
            continue
        for verdict in diagnose_kernel_log(lines, node):
            is_of_gpu = verdict.failure_class is FailureClass.GPU_HARDWARE
            if verdict.role is not Role.BENIGN and (is_of_gpu or verdict.pattern in AMBIGUOUS_XIDS):
                return _of_verdict(incident, verdict)
    if lost is not None and (is_anywhere or lost.entity.node in nodes):
        return replace(
            incident,
            failure_class=FailureClass.GPU_HARDWARE,
            culprit=str(lost.entity),
            entity=lost.entity,
            symptom=lost.kind,
            detector=lost.source,
            evidence=f"{lost.text}\n{incident.evidence}",
        )
    return None


def _of_verdict(incident: Incident, verdict: Verdict) -> Incident:
    pattern = verdict.pattern
    nature = Nature.CLEAR
    if pattern in AMBIGUOUS_XIDS:
        nature = Nature.AMBIGUOUS
    elif pattern in CONTAINED_XIDS:
        nature = Nature.CONTAINED
    return replace(
        incident,
        failure_class=verdict.failure_class,
        culprit=str(verdict.culprit),
        entity=verdict.culprit,
        nature=nature,
        symptom=pattern.replace("_", " "),
        detector=KERNEL_LOG,
        evidence=f"{verdict.evidence}\n{incident.evidence}",
    )


def _memory_kill(incident: Incident, near: Sequence[Signal], killed: set[str]) -> Incident | None:
    """The kernel's killer struck on the node of a rank that SIGKILL ended."""
    for one in near:
        is_kill = one.kind in ("oom_kill", "oom_kill_cgroup")
        is_soon = one.at >= incident.failed_at - KILL_WINDOW_S
        if is_kill and is_soon and _node_of(one) in killed:
            return replace(
                incident,
                failure_class=FailureClass.HOST_OUT_OF_MEMORY,
                symptom=one.kind,
                detector=one.source,
                evidence=f"{one.text}\n{incident.evidence}",
            )
    return None


def _link_down(incident: Incident, near: Sequence[Signal]) -> Incident | None:
    """An interface went down: its node is blamed, not the rank that noticed first."""
    down = next((one for one in near if one.kind in DOWN_KINDS), None)
    if down is None:
        return None
    node = Entity(EntityKind.NODE, down.entity.node)
    return replace(
        incident,
        culprit=f"{node}: {down.entity.name}",
        entity=node,
        symptom=down.kind,
        detector=down.source,
        evidence=f"{down.text}\n{incident.evidence}",
    )


def _node_of(one: Signal) -> str:
    return one.entity.name if one.entity.kind is EntityKind.NODE else one.entity.node
