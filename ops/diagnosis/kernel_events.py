"""One line of a kernel log, or of the fabric manager's, understood: an Xid, an SXid or a known message.

Anchored on `NVRM: Xid`, never on "Xid" alone. What a code means is in xids.py, what other messages mean in
kernel_patterns.yaml. Lines are not weighed against one another here (kernel_log.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ops.diagnosis.kernel_patterns import KernelPattern, match_pattern
from ops.diagnosis.kernel_record import KernelRecord, parse_record
from ops.diagnosis.verdict import UNKNOWN_ENTITY
from ops.diagnosis.xids import Ruling, XidTable, nvlink_of, rule_sxid, rule_xid, shipped_table
from ops.signal import Entity, EntityKind, Signal

_XID = re.compile(r"NVRM: Xid \((?P<where>[^)]*)\): (?P<code>\d+)\b[,:]? ?(?P<rest>.*)")
_PID = re.compile(r"^pid=(?:'?<unknown>'?|'?(?P<pid>\d+)'?)(?:, |$)")
_NAME = re.compile(r"^name=(?:'?(?P<name>.*?)'?)(?:, |$)")
_ADDRESS = re.compile(r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?")
_UUID = re.compile(r"NVRM: GPU at (?:PCI:)?(?P<where>[0-9a-fA-F:.]+): (?P<uuid>GPU-[0-9a-fA-F-]+)")
_OFF_BUS = re.compile(
    r"NVRM: .*?GPU (?:at )?(?:PCI:)?(?P<where>[0-9a-fA-F]+:[0-9a-fA-F:.]+?):? .*fallen off the bus"
)
_SXID = re.compile(
    r"(?P<switch>nvidia-nvswitch\d+)?:? ?SXid \((?P<where>[^)]*)\): (?P<code>\d+), ?(?P<rest>.*)"
)
_SXID_DETAIL = re.compile(r"(?:Severity \d+ Engine instance|Data \{)")
_FABRIC_MANAGER = re.compile(
    r"detected NVSwitch (?P<severity>non-fatal|fatal) error (?P<code>\d+)"
    r".*?pci bus id (?P<where>[0-9a-fA-F:.]+)"
)


@dataclass(frozen=True)
class KernelEvent:
    """One line that bears on a training job."""

    kind: str
    """xid, sxid, or the id of a row of kernel_patterns.yaml."""
    code: int
    """Xid or SXid; 0 for others."""
    entity: Entity
    ruling: Ruling
    record: KernelRecord
    pid: int | None = None
    process: str = ""

    @property
    def rule(self) -> str:
        """Which rule it matched: xid_79, oom_kill, ..."""
        return f"{self.kind}_{self.code}" if self.code else self.kind


class KernelLogReader:
    """Reads one node's lines in order; remembers which PCI address is which GPU."""

    def __init__(
        self,
        node: str = "",
        table: XidTable | None = None,
        ranks_by_pid: Mapping[int, int] | None = None,
        year: int | None = None,
    ) -> None:
        """Read lines of one node.

        Args:
            node: its address; empty takes the host that the lines name, if they do.
            table: rulings on codes; None takes the shipped ones.
            ranks_by_pid: the job's ranks on this node (and their children), so that victims have a name.
            year: for syslog lines, which leave it out.
        """
        self._node = node
        self._table = table or shipped_table()
        self._ranks_by_pid = ranks_by_pid
        self._year = year
        self._uuids: dict[str, str] = {}

    def read(self, line: str) -> KernelEvent | None:
        """What the line says; None for nothing of interest."""
        record = parse_record(line, self._year)
        text = record.text
        if "NVRM: " in text:
            if match := _UUID.search(text):
                self._uuids[_address(match["where"])] = match["uuid"]
                return None
            if match := _XID.search(text):
                return self._xid(match, record)
            if match := _OFF_BUS.search(text):
                return self._coded("xid", 79, self._gpu(match["where"], record), "", record)
        if (match := _SXID.search(text)) and not _SXID_DETAIL.match(match["rest"]):
            name = " ".join(part for part in (match["switch"], _address(match["where"])) if part)
            return self._coded("sxid", int(match["code"]), self._link(name, record), match["rest"], record)
        if match := _FABRIC_MANAGER.search(text):
            link = self._link(_address(match["where"]), record)
            return self._coded("sxid", int(match["code"]), link, match["severity"], record)
        found = match_pattern(text)
        return None if found is None else self._other(*found, record)

    def signal(self, line: str, now: float) -> Signal | None:
        """The line as a signal; its time is the line's own where that is wall-clock time, else `now`."""
        event = self.read(line)
        return None if event is None else _signal(event, now)

    def _xid(self, match: re.Match[str], record: KernelRecord) -> KernelEvent:
        rest, pid, process = match["rest"].strip(), None, ""
        if found := _PID.match(rest):
            pid = int(found["pid"]) if found["pid"] else None
            rest = rest[found.end() :]
        if found := _NAME.match(rest):
            process = "" if found["name"] in (None, "<unknown>") else found["name"]
            rest = rest[found.end() :]
        event = self._coded("xid", int(match["code"]), self._gpu(match["where"], record), rest, record)
        return replace(event, pid=pid, process=process)

    def _coded(self, kind: str, code: int, entity: Entity, detail: str, record: KernelRecord) -> KernelEvent:
        ruling = (rule_xid if kind == "xid" else rule_sxid)(self._table, code, detail)
        if ruling.blames_peer:
            name = f"{entity.name} link {nvlink_of(detail) or '?'}"
            entity = Entity(EntityKind.LINK, name, entity.node)
        return KernelEvent(kind, code, entity, ruling, record)

    def _other(self, pattern: KernelPattern, match: re.Match[str], record: KernelRecord) -> KernelEvent:
        groups = match.groupdict()
        pid = int(groups["pid"]) if groups.get("pid") else None
        name = groups.get("name") or groups.get("name2") or groups.get("name3") or groups.get("name4") or ""
        node = self._node or record.host
        confidence = pattern.confidence
        if pattern.blames is EntityKind.RANK:
            rank = (self._ranks_by_pid or {}).get(pid) if pid is not None else None
            entity = self._of_node(record) if rank is None else Entity(EntityKind.RANK, str(rank), node)
            if rank is None and pid is not None and self._ranks_by_pid is not None:
                confidence = min(confidence, 0.4)  # a process of somebody else
        elif pattern.blames is EntityKind.NODE or not name:
            entity = self._of_node(record)
        elif pattern.blames is EntityKind.GPU:
            entity = self._gpu(name, record)
        else:
            entity = Entity(pattern.blames, name, node)
        ruling = Ruling(pattern.failure_class, pattern.role, pattern.action, confidence, pattern.advice)
        return KernelEvent(pattern.id, 0, entity, ruling, record, pid, groups.get("task") or "")

    def _gpu(self, where: str, record: KernelRecord) -> Entity:
        address = _address(where)
        return Entity(EntityKind.GPU, self._uuids.get(address, address), self._node or record.host)

    def _link(self, name: str, record: KernelRecord) -> Entity:
        return Entity(EntityKind.LINK, name, self._node or record.host)

    def _of_node(self, record: KernelRecord) -> Entity:
        node = self._node or record.host
        return Entity(EntityKind.NODE, node, node) if node else UNKNOWN_ENTITY


def _signal(event: KernelEvent, now: float) -> Signal:
    value = event.code or event.pid
    at = event.record.at if event.record.at is not None else now
    return Signal(
        at, "kernel_log", event.kind, event.entity, None if value is None else float(value), event.record.line
    )


def _address(where: str) -> str:
    """A PCI address without prefix and function, its domain in four digits."""
    match = _ADDRESS.search(where)
    if match is None:
        return where.strip()
    *domain, bus, device = match[0].lower().split(".")[0].split(":")
    return ":".join([*(part[-4:] for part in domain), bus, device])
