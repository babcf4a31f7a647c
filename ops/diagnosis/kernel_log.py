"""Kernel logs (dmesg, /dev/kmsg, the journal, syslog) and the fabric manager's: lines to verdicts.

Verdicts merge what belongs together: one for each kind and entity; Xid 45 and ambiguous ones are cascades of
a worse one within a minute; an Xid 154 says what to do about the fault before it and counts once a node;
Xid 74 beside an SXid is the NVSwitch's. What one line means is in kernel_events.py. Does not follow files
(ops/monitors/kernel_log.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ops.diagnosis.kernel_events import KernelEvent, KernelLogReader
from ops.diagnosis.kernel_record import KernelRecord
from ops.diagnosis.verdict import Role, Verdict
from ops.diagnosis.xids import NVLINK5, RECOVERY_ACTION_CHANGED, XidTable, shipped_table
from ops.incident import FailureClass
from ops.signal import Entity, EntityKind, Signal

NVLINK_ERROR = 74
PREEMPTIVE_CLEANUP = 45
FOLLOWS_CODE = frozenset({13, 31, 32, 69, 109})
"""Xids of which code and chip are both suspected."""
FLAP_WINDOW_S = 300.0
NEAR_S = 60.0
"""Messages so close together are of one event."""


def kernel_signals(lines: Iterable[str], now: float, node: str = "", year: int | None = None) -> list[Signal]:
    """Every line of interest as a signal, in order. `now` (unix seconds) dates lines without a wall clock."""
    reader = KernelLogReader(node, year=year)
    return [signal for line in lines if (signal := reader.signal(line, now)) is not None]


def classify_kernel_line(line: str, node: str = "", table: XidTable | None = None) -> Verdict | None:
    """The verdict on one line taken alone; None for a line of no interest."""
    event = KernelLogReader(node, table).read(line)
    return None if event is None else _verdict([event])


def diagnose_kernel_log(
    lines: Iterable[str],
    node: str = "",
    table: XidTable | None = None,
    ranks_by_pid: Mapping[int, int] | None = None,
    year: int | None = None,
) -> list[Verdict]:
    """The verdicts on one node's kernel log, the most telling first; empty where nothing bears on a job.

    Args:
        lines: in the order of the log; more than one source (kernel, fabric manager) may be joined.
        node: see KernelLogReader, as for the others.
        table: rulings on codes.
        ranks_by_pid: the job's ranks on this node.
        year: for syslog lines.
    """
    reader = KernelLogReader(node, table, ranks_by_pid, year)
    events = [event for line in lines if (event := reader.read(line)) is not None]
    in_groups = {e.pid for e in events if e.kind == "oom_kill_cgroup"} - {None}
    events = [
        replace(e, kind="oom_kill_cgroup") if e.pid in in_groups and e.kind == "oom_kill" else e
        for e in events
    ]
    company = _Company(events)
    events = [_in_company(event, company.near(event)) for event in events]
    groups: dict[tuple[str, Entity], list[KernelEvent]] = {}
    gpus: dict[int, set[Entity]] = {}
    for event in events:
        is_of_node = event.rule == f"xid_{RECOVERY_ACTION_CHANGED}"
        entity = Entity(EntityKind.NODE, event.entity.node) if is_of_node else event.entity
        groups.setdefault((event.rule, entity), []).append(event)
        gpus.setdefault(event.code, set()).add(event.entity)
    repeats = {code: rule.repeats for code, rule in (table or shipped_table()).xids.items()}
    verdicts = [
        _of_the_code(_verdict(group, repeats.get(group[0].code, 0)), group[0], len(gpus[group[0].code]))
        for group in groups.values()
    ]
    return sorted(verdicts, key=_order)


class _Company:
    """What else happened within a minute, without looking at every pair of lines of a flood."""

    def __init__(self, events: Sequence[KernelEvent]) -> None:
        self._minutes: dict[tuple[str, int], dict[tuple[str, Entity], list[KernelEvent]]] = {}
        for event in events:
            kinds = self._minutes.setdefault(self._minute(event.record), {})
            of_kind = kinds.setdefault((event.rule, event.entity), [])
            of_kind[1:] = [event]  # The first and the last of a minute stand for all between.

    def near(self, event: KernelEvent) -> list[KernelEvent]:
        """Events within a minute of `event`, in the order of their first; repetitions left out."""
        clock, minute = self._minute(event.record)
        found = [
            other
            for (other_clock, other_minute), kinds in self._minutes.items()
            if other_clock != clock or not clock or abs(other_minute - minute) <= 1
            for of_kind in kinds.values()
            for other in of_kind
        ]
        return [other for other in found if other is not event and _is_near(other.record, event.record)]

    @staticmethod
    def _minute(record: KernelRecord) -> tuple[str, int]:
        return (record.clock, int(record.clock_s // NEAR_S)) if record.clock_s is not None else ("", 0)


def _in_company(event: KernelEvent, near: Sequence[KernelEvent]) -> KernelEvent:
    """The event as the others within a minute make it look."""
    if event.kind != "xid" or event.code == RECOVERY_ACTION_CHANGED:
        return event
    ruling = event.ruling
    others = [e for e in near if e.kind in ("xid", "sxid") and (e.kind, e.code) != (event.kind, event.code)]
    roots = [e for e in others if _is_hardware(e)]
    if event.code == PREEMPTIVE_CLEANUP and not any(e.kind == "xid" for e in others):
        advice = "Alone: restart the fabric manager and the program."
        return _ruled(event, role=Role.AMBIGUOUS, action="RESTART", confidence=0.3, advice=advice)
    if event.code == NVLINK_ERROR and (switch := next((e for e in roots if e.kind == "sxid"), None)):
        return _ruled(event, role=Role.CASCADE, advice=f"See SXid {switch.code} of the NVSwitch.")
    same_gpu = [e for e in roots if e.entity == event.entity]
    if ruling.role is Role.AMBIGUOUS and same_gpu and event.code not in NVLINK5:
        return _ruled(event, role=Role.CASCADE, advice=f"See Xid {same_gpu[0].code}.")
    said = [e.ruling for e in others if e.code == RECOVERY_ACTION_CHANGED and e.entity == event.entity]
    if not said or not (_is_hardware(event) or (event.code in NVLINK5 and ruling.role is Role.AMBIGUOUS)):
        return event
    is_over = said[-1].role is Role.BENIGN
    advice = f"{said[-1].advice} {ruling.advice}".strip()
    return _ruled(event, action=ruling.action if is_over else said[-1].action, advice=advice)


def _ruled(
    event: KernelEvent,
    *,
    advice: str,
    role: Role | None = None,
    action: str | None = None,
    confidence: float | None = None,
) -> KernelEvent:
    old = event.ruling
    new = replace(
        old,
        advice=advice,
        role=old.role if role is None else role,
        action=old.action if action is None else action,
        confidence=old.confidence if confidence is None else confidence,
    )
    return replace(event, ruling=new)


def _of_the_code(verdict: Verdict, event: KernelEvent, n_gpus: int) -> Verdict:
    """An ambiguous Xid on several GPUs follows the program, not a chip."""
    if (
        event.kind != "xid"
        or event.code not in FOLLOWS_CODE
        or n_gpus < 2
        or verdict.role is not Role.AMBIGUOUS
    ):
        return verdict
    return replace(
        verdict,
        failure_class=FailureClass.USER_CODE,
        action="RESTART_RANKS",
        confidence=0.7,
        runbook=str(FailureClass.USER_CODE),
        advice=f"On {n_gpus} GPUs: it follows the program, not a chip.",
    )


def _is_hardware(event: KernelEvent) -> bool:
    return event.ruling.failure_class is FailureClass.GPU_HARDWARE and event.ruling.role in (
        Role.ROOT,
        Role.CONFIRMATION,
    )


def _is_near(one: KernelRecord, other: KernelRecord) -> bool:
    """Within a minute; lines that cannot be compared count as near."""
    if one.clock != other.clock or one.clock_s is None or other.clock_s is None:
        return True
    return abs(one.clock_s - other.clock_s) <= NEAR_S


def _verdict(group: Sequence[KernelEvent], repeats: int = 0) -> Verdict:
    """The verdict on events of one kind and entity, in order."""
    worst = max(group, key=lambda e: (e.ruling.role is not Role.BENIGN, e.ruling.confidence))
    ruling, count = worst.ruling, _count_apart(group)
    if repeats and count >= repeats and ruling.role is not Role.CASCADE:
        ruling = replace(
            ruling,
            failure_class=FailureClass.GPU_HARDWARE,
            role=Role.ROOT,
            action="RESTART_WITHOUT_NODE",
            confidence=max(0.6, ruling.confidence - 0.2),
            advice=f"{count} times on this GPU: diagnose it. {ruling.advice}".strip(),
        )
    if worst.kind == "link_down" and _is_flapping(group):
        again = f"Down {len(group)} times, twice within five minutes. {ruling.advice}".strip()
        ruling = replace(ruling, action="RESTART_WITHOUT_NODE", confidence=0.85, advice=again)
    victims = sorted({f"{e.process or 'process'}[{e.pid}]" for e in group if e.pid is not None})
    told = f" ({len(group)} lines)" if len(group) > 1 else ""
    whom = f" processes: {', '.join(victims[:8])}" if len(victims) > 1 else ""
    is_of_node = worst.code == RECOVERY_ACTION_CHANGED and worst.kind == "xid"
    node = worst.entity.node
    return Verdict(
        failure_class=ruling.failure_class,
        role=ruling.role,
        culprit=Entity(EntityKind.NODE, node, node) if is_of_node and node else worst.entity,
        action=ruling.action,
        confidence=ruling.confidence,
        evidence=f"{worst.record.line}{told}{whom}",
        runbook=str(ruling.failure_class),
        advice=ruling.advice,
        pattern=worst.rule,
    )


def _is_flapping(group: Sequence[KernelEvent]) -> bool:
    """Two of the events on one clock are at most five minutes apart, and not the same moment told twice."""
    pairs = [(a.record, b.record) for a, b in pairwise(group)]
    return any(
        one.clock == two.clock
        and one.clock_s is not None
        and two.clock_s is not None
        and 1.0 <= abs(two.clock_s - one.clock_s) <= FLAP_WINDOW_S
        for one, two in pairs
    )


def _count_apart(group: Sequence[KernelEvent]) -> int:
    """How many of the events are at least a minute after the one counted before."""
    count, last = 0, None
    for event in group:
        if last is None or not _is_near(event.record, last):
            count, last = count + 1, event.record
    return count


_RANKING = {Role.ROOT: 0, Role.CONFIRMATION: 0, Role.AMBIGUOUS: 1, Role.CASCADE: 2, Role.BENIGN: 3}


def _order(verdict: Verdict) -> tuple[int, float, bool]:
    """Roots first, the surest first; what merely confirms an equally sure root comes after it."""
    return _RANKING[verdict.role], -verdict.confidence, verdict.role is Role.CONFIRMATION
