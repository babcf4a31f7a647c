"""What health checks of others write as JSON, a line each: SuperBench's monitor and diagnosis, gcm's checks.

A line in another form says nothing. Runs no check itself.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from ops.monitors.changes import States
from ops.monitors.follow import FileFollower
from ops.monitors.gpu_readings import GpuChanges, GpuReading
from ops.signal import Entity, EntityKind, Signal

NAMES = {
    "gpu_usage": ("utilization_frac", 0.01),
    "gpu_temperature": ("temperature_c", 1.0),
    "gpu_power_limit": ("power_limit_w", 1.0),
    "gpu_corrected_ecc": ("ecc_corrected_volatile", 1.0),
    "gpu_uncorrected_ecc": ("ecc_uncorrected_volatile", 1.0),
    "gpu_remap_correctable_error": ("remapped_rows_corrected", 1.0),
    "gpu_remap_uncorrectable_error": ("remapped_rows_uncorrected", 1.0),
}
"""Field of SuperBench's monitor -> value of a reading, and by what to multiply it."""
OK, WARNING, CRITICAL = 0, 1, 2
"""Results of gcm's checks, as Nagios has them; 3 is "could not be asked" and says nothing."""


class HealthLinesReader:
    """Lines to signals; remembers what was, so that a change is told and not what stands."""

    def __init__(self, source: str, node: str) -> None:
        """Remember where the lines come from.

        Args:
            source: for the signals.
            node: address of the node that wrote lines which name none.
        """
        self._source = source
        self._node = node
        self._changes = GpuChanges(source, node)
        self._states = States()
        self._best_power_limit_w = 0.0

    def signals(self, line: str, now: float) -> list[Signal]:
        """What a line tells that is new."""
        try:
            record = json.loads(line)
        except ValueError:
            return []
        if not isinstance(record, dict):
            return []
        if "Defective Details" in record:
            return self._from_diagnosis(record, now)
        if "health_check" in record and isinstance(record.get("result"), int):
            return self._from_check(record, now)
        readings = self._readings(record)
        return self._changes.check(readings, {}, None, now) if readings else []

    def _from_diagnosis(self, record: Mapping[str, object], now: float) -> list[Signal]:
        """SuperBench compared a node with the baseline; one without defects has no category."""
        category, details = record.get("Category") or "", record.get("Defective Details") or ""
        node = str(record.get("index") or record.get("Index") or self._node)
        if not category or not details:
            return []
        return [
            self._signal("node_defective", Entity(EntityKind.NODE, node), None, f"{category}: {details}", now)
        ]

    def _from_check(self, record: Mapping[str, object], now: float) -> list[Signal]:
        node, check = str(record.get("node") or self._node), str(record["health_check"])
        told = str(record.get("_msg") or record.get("msg") or "")
        found = []
        if record["result"] not in (OK, WARNING, CRITICAL):
            return []
        for kind, result in (("health_check_warning", WARNING), ("health_check_failed", CRITICAL)):
            turned = self._states.turned((node, check, kind), record["result"] == result)
            if turned is not None:
                text = f"{check}: {told}" if told else check
                name = kind if turned else f"{kind}_cleared"
                found.append(self._signal(name, Entity(EntityKind.NODE, node), float(result), text, now))
        return found

    def _readings(self, record: Mapping[str, object]) -> list[GpuReading]:
        """Of a line of SuperBench's monitor: "gpu_temperature:3" is GPU 3's."""
        values: dict[int, dict[str, float]] = {}
        for key, value in record.items():
            name, _, index = key.partition(":")
            if name in NAMES and index.isdigit() and isinstance(value, int | float):
                known, scale = NAMES[name]
                values.setdefault(int(index), {})[known] = value * scale
        limits = [own["power_limit_w"] for own in values.values() if "power_limit_w" in own]
        self._best_power_limit_w = max([self._best_power_limit_w, *limits])
        for own in values.values():
            own["power_limit_default_w"] = self._best_power_limit_w
        return [GpuReading(f"index {index}", values=own) for index, own in sorted(values.items())]

    def _signal(self, kind: str, entity: Entity, value: float | None, text: str, now: float) -> Signal:
        return Signal(now, self._source, kind, entity, value, text)


class HealthLinesMonitor:
    """Follows a file of such lines."""

    name = "health_lines"

    def __init__(self, path: Path, node: str) -> None:
        """Remember the file; it is opened by is_supported, which also fixes where "new" begins.

        Args:
            path: of the file.
            node: address of this node.
        """
        self._path = path
        self._reader = HealthLinesReader(self.name, node)
        self._follower: FileFollower | None = None

    def is_supported(self) -> bool:
        """The file is there."""
        try:
            self._follower = FileFollower(self._path)
        except OSError:
            return False
        return True

    def check(self, now: float) -> list[Signal]:
        """New node_defective; health_check_failed, health_check_warning (or _cleared); see gpu_readings."""
        if self._follower is None and not self.is_supported():
            return []
        assert self._follower is not None
        return [signal for line in self._follower.new_lines() for signal in self._reader.signals(line, now)]

    def close(self) -> None:
        """Let go of the open file."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None
