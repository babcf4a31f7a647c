"""Exits joined with what the nodes saw: the kernel's word where there is one, else as the exits have it."""

import pytest

from ops.diagnosis.rank_deaths import EVIDENCE_BEFORE_S, join_signals
from ops.diagnosis.rank_exits import RankExit, diagnose
from ops.incident import FailureClass, Incident, Nature
from ops.signal import Entity, EntityKind, Signal

AT = 1_000_000.0
NODE = "10.0.0.3"
OTHER = "10.0.0.4"
XID_79 = "NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID_31 = "NVRM: Xid (PCI:0000:17:00): 31, pid=12, name=python, Ch 00000008, intr 00000000. MMU Fault"
XID_94 = "NVRM: Xid (PCI:0000:17:00): 94, pid=12, name=python, Contained: SM"


def kernel(text: str, at: float = AT - 1.0, node: str = NODE) -> Signal:
    return Signal(at, "kernel_log", "xid", Entity(EntityKind.GPU, "0000:17:00", node), 79.0, text)


def oom(at: float = AT - 1.0, node: str = NODE, kind: str = "oom_kill") -> Signal:
    return Signal(at, "cgroup_memory", kind, Entity(EntityKind.NODE, node), 1.0, "oom_kill rose by 1 to 1")


def killed(code: int = -9, node: str = NODE) -> list[RankExit]:
    return [RankExit(1, node, AT, code)]


def broken(error: str = "Connection closed by peer") -> list[RankExit]:
    return [RankExit(0, OTHER, AT, 1, "builtins.RuntimeError", error, error)]


def joined(exits: list[RankExit], *seen: Signal) -> Incident:
    return join_signals(diagnose(exits, 5, AT), exits, seen)


def test_without_signals_the_exits_have_the_word() -> None:
    incident = diagnose(killed(), 5, AT)
    assert join_signals(incident, killed(), []) is incident


def test_a_sigkill_beside_a_counted_kill_is_the_memory_killers() -> None:
    incident = joined(killed(), oom())
    assert incident.failure_class is FailureClass.HOST_OUT_OF_MEMORY
    assert incident.culprit == f"rank 1 (node {NODE})"
    assert (incident.symptom, incident.detector) == ("oom_kill", "cgroup_memory")
    assert "rose by 1" in incident.evidence
    assert incident.otherwise == diagnose(killed(), 5, AT)


@pytest.mark.parametrize(
    ("exits", "signal"),
    [
        (killed(-11), oom()),  # a crash of its own
        (killed(), oom(node=OTHER)),  # somebody else's kill
        (killed(), oom(at=AT - 30.0)),  # long ago
        (killed(), oom(kind="memory_high")),  # nobody was killed
        (killed(), oom(kind="host_oom_kill")),  # of the whole machine, perhaps another container's
        (broken(), oom(node=OTHER)),
    ],
)
def test_a_memory_kill_that_does_not_explain_the_exit_changes_nothing(
    exits: list[RankExit], signal: Signal
) -> None:
    assert joined(exits, signal) == diagnose(exits, 5, AT)


@pytest.mark.parametrize(
    "exits", [killed(-9), killed(-6), broken(), broken("NCCL error: unhandled cuda error")]
)
def test_a_gpu_off_the_bus_is_the_cause_and_its_node_is_named(exits: list[RankExit]) -> None:
    incident = joined(exits, kernel(XID_79), oom())
    assert incident.failure_class is FailureClass.GPU_HARDWARE
    assert incident.entity == Entity(EntityKind.GPU, "0000:17:00", NODE)
    assert NODE in incident.culprit
    assert (incident.symptom, incident.nature, incident.detector) == ("xid 79", Nature.CLEAR, "kernel_log")
    assert incident.evidence.startswith(XID_79)


def test_natures_of_xids() -> None:
    assert joined(killed(-6), kernel(XID_31)).nature is Nature.AMBIGUOUS
    contained = joined(killed(-6), kernel(XID_94))
    assert (contained.failure_class, contained.nature) == (FailureClass.GPU_HARDWARE, Nature.CONTAINED)


def test_another_nodes_gpu_does_not_explain_a_killed_rank() -> None:
    assert joined(killed(), kernel(XID_79, node=OTHER)).failure_class is FailureClass.WORKER_KILLED


def test_what_was_long_before_does_not_explain_anything() -> None:
    signal = kernel(XID_79, at=AT - EVIDENCE_BEFORE_S - 1.0)
    assert joined(killed(), signal).failure_class is FailureClass.WORKER_KILLED


def test_an_error_that_a_rank_names_stays_its_cause_unless_it_comes_from_the_gpu() -> None:
    def raised(error: str, failure_class: str = "") -> list[RankExit]:
        return [
            RankExit(1, NODE, AT, 1, "builtins.KeyError", error, error, failure_class=failure_class),
        ]

    assert joined(raised("'tokens'"), kernel(XID_79)).failure_class is FailureClass.USER_CODE
    assert joined(raised("x", "numerics"), kernel(XID_79)).failure_class is FailureClass.NUMERICS
    cuda = "CUDA error: uncorrectable ECC error encountered"
    assert joined(raised(cuda), kernel(XID_79)).failure_class is FailureClass.GPU_HARDWARE


def test_an_interface_that_went_down_names_the_node_of_a_broken_collective() -> None:
    down = Signal(AT - 3, "nics", "nic_down", Entity(EntityKind.LINK, "eth1", NODE), None, "eth1 is down")
    incident = joined(broken(), down)
    assert (incident.failure_class, incident.entity) == (FailureClass.NETWORK, Entity(EntityKind.NODE, NODE))
    assert "eth1" in incident.culprit
    assert joined(killed(), down).failure_class is FailureClass.WORKER_KILLED


def test_a_lost_gpu_that_only_nvml_noticed() -> None:
    lost = Signal(
        AT - 3, "gpu_health", "gpu_lost", Entity(EntityKind.GPU, "GPU-1", NODE), None, "GPU is lost"
    )
    incident = joined(killed(-6), lost)
    assert (incident.failure_class, incident.detector) == (FailureClass.GPU_HARDWARE, "gpu_health")


def test_a_shell_that_died_has_no_exits_and_takes_the_nodes_word() -> None:
    incident = Incident(FailureClass.WORKER_KILLED, f"shell of rank 1 (node {NODE})", "died", 5, AT, AT)
    assert join_signals(incident, [], [kernel(XID_79)]).failure_class is FailureClass.GPU_HARDWARE
