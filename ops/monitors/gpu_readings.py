"""A GPU at one moment, by whichever way it was read, and what changed since the last reading.

Unsupported fields are absent and never a fault. Says what is seen; whether a GPU is to be replaced is decided
elsewhere. Reads no GPU itself: see gpu_health, nvidia_smi_xml and dcgm.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ops.monitors.changes import Counters, States
from ops.signal import Entity, EntityKind, Signal

COUNTERS = (
    "ecc_corrected_volatile",
    "ecc_corrected_aggregate",
    "ecc_uncorrected_volatile",
    "ecc_uncorrected_aggregate",
    "remapped_rows_corrected",
    "remapped_rows_uncorrected",
    "retired_pages_corrected",
    "retired_pages_uncorrected",
    "pcie_replays",
    "pcie_nonfatal_errors",
    "pcie_fatal_errors",
    "nvlink_crc_errors",
    "nvlink_replays",
    "nvlink_recoveries",
    "nvlink_receive_errors",
    "nvlink_integrity_errors",
    "nvlink_failed_recoveries",
)
"""Told by how much they rose. A key may name a link behind a slash: "nvlink_replays/3"."""
FLAGS = (
    "row_remap_pending",
    "row_remap_failure",
    "retired_pages_pending",
    "sram_threshold_exceeded",
    "unrepairable_memory",
    "reset_required",
    "recovery_action",
    "throttled_hw",
    "throttled_hw_thermal",
    "throttled_power_brake",
    "throttled_sw_thermal",
)
"""Told when they turn non-zero (at the first reading too) and when they are zero again; recovery_action for
each action. A cap of power is not among them: a GPU at work sits at it."""
MAX_BUSY_PSTATE = 2
"""Links slow down in the power-saving states beyond it."""
MAX_REMAPPED_ROWS = 10
"""Above it 83 % of GPUs fail again (SuperBench, USENIX ATC 2024)."""
MAX_SRAM_UNCORRECTED = 4
"""NVIDIA's limit for an exchange (A100 and H100, aggregate SRAM errors)."""
COOLER_BY_C = 3.0
"""So much below the limit a hot GPU is taken as cooled down."""
THROTTLE_BITS = {
    0x08: "throttled_hw",
    0x20: "throttled_sw_thermal",
    0x40: "throttled_hw_thermal",
    0x80: "throttled_power_brake",
}
"""Bits of NVML's (and DCGM's) clocks event reasons."""
RECOVERY_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer traffic",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
"""nvmlDeviceGpuRecoveryAction_t."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that has memory on a GPU."""

    pid: int
    name: str = ""
    used_bytes: int | None = None


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment.

    `values` holds COUNTERS and FLAGS, and levels: temperature_c, temperature_limit_c, memory_temperature_c,
    memory_temperature_limit_c, power_w, power_limit_w, power_limit_default_w, sm_clock_mhz, sm_clock_max_mhz,
    pstate, utilization_frac, pcie_gen, pcie_gen_max, pcie_width, pcie_width_max, sram_uncorrected_aggregate,
    nvlink_active/N (1 or 0), nvlinks_down (1: not one is up), nvlink_gbyte_per_s/N,
    memory_used_bytes, memory_size_bytes.
    """

    uuid: str
    pci_bus_id: str = ""
    """As it was read; see pci_address for comparing it."""
    product: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] = ()


def pci_address(text: str) -> str:
    """One form for PCI:0000:18:00 (kernel), 0000:18:00.0 and 00000000:18:00.0 (NVML): 0000:18:00."""
    domain, _, rest = text.strip().lower().removeprefix("pci:").partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest.partition('.')[0]}"


def uuid_at(readings: Sequence[GpuReading], address: str) -> str | None:
    """UUID of the GPU that the kernel's log names by its PCI address."""
    wanted = pci_address(address)
    return next((r.uuid for r in readings if r.pci_bus_id and pci_address(r.pci_bus_id) == wanted), None)


def throttle_flags(mask: int) -> dict[str, float]:
    """The FLAGS of a mask of clocks event reasons."""
    return {name: float(bool(mask & bit)) for bit, name in THROTTLE_BITS.items()}


@dataclass
class GpuChanges:
    """What the GPUs of one node were like, and so what is new."""

    source: str
    node: str
    counters: Counters = field(default_factory=Counters)
    states: States = field(default_factory=States)
    known: set[str] = field(default_factory=set)
    foreign: dict[str, set[int]] = field(default_factory=dict)

    def check(
        self,
        readings: Sequence[GpuReading],
        unreadable: Mapping[str, tuple[str, str]],
        own_pids: Collection[int] | None,
        now: float,
    ) -> list[Signal]:
        """Signals of what changed.

        Args:
            readings: of every GPU that could be read.
            unreadable: UUID -> (kind, text) of those that are there and failed: gpu_lost, gpu_unreachable.
            own_pids: processes that may be on the GPUs; None: whose they are is not asked.
            now: wall clock, unix seconds.
        """
        present = {reading.uuid for reading in readings} | set(unreadable)
        # A GPU that never answered has no UUID: once it has one, nobody is to miss the stand-in.
        self.known |= {reading.uuid for reading in readings}
        found = []
        for uuid in sorted(self.known | set(unreadable)):
            text = f"{len(present)} of {len(self.known | present)} GPUs are left"
            is_missing = uuid not in present
            found += self._turn(uuid, "gpu_missing", is_missing, len(present), text, now)
            for kind in ("gpu_lost", "gpu_unreachable"):
                told_kind, text = unreadable.get(uuid, ("", "it answers again"))
                found += self._turn(uuid, kind, told_kind == kind, None, text, now)
        for reading in readings:
            found += self._check_counters(reading, now)
            found += self._check_flags(reading, now)
            found += self._check_levels(reading, now)
            if own_pids is not None:
                found += self._check_processes(reading, own_pids, now)
        return found

    def _check_counters(self, reading: GpuReading, now: float) -> list[Signal]:
        found = []
        for key, value in reading.values.items():
            kind, _, link = key.partition("/")
            if kind not in COUNTERS:
                continue
            rise = self.counters.rise((reading.uuid, key), value)
            if rise:
                where = f", link {link}" if link else ""
                text = f"{kind}{where} rose by {rise:.0f} to {value:.0f}"
                found.append(self._signal(reading.uuid, kind, rise, text, now))
        return found

    def _check_flags(self, reading: GpuReading, now: float) -> list[Signal]:
        found = []
        for key, value in reading.values.items():
            kind, _, link = key.partition("/")
            if kind == "recovery_action":
                for code, action in RECOVERY_ACTIONS.items():
                    text = f"the driver asks to {action}"
                    found += self._turn(reading.uuid, kind, value == code, code, text, now, part=action)
            elif kind in FLAGS:
                found += self._turn(reading.uuid, kind, value != 0, value, f"{kind} is {value:.0f}", now)
            elif kind == "nvlinks_down":  # A card without a bridge has never had one up.
                text = "no NVLink is up" if value else "NVLinks are up"
                found += self._turn(reading.uuid, kind, value != 0, value, text, now, first=False)
            elif kind == "nvlink_active":
                # A link that was never up may lead nowhere.
                text = f"NVLink {link} is {'up' if value else 'down'}"
                found += self._turn(
                    reading.uuid, "nvlink_down", not value, float(link), text, now, part=link, first=False
                )
        return found

    def _check_levels(self, reading: GpuReading, now: float) -> list[Signal]:
        values = reading.values
        found = []

        def turn(kind: str, is_bad: bool, value: float, text: str) -> None:
            found.extend(self._turn(reading.uuid, kind, is_bad, value, text, now))

        for sensor in ("temperature", "memory_temperature"):
            temperature_c, limit_c = values.get(f"{sensor}_c"), values.get(f"{sensor}_limit_c")
            # Drivers that give a distance instead of a limit show it as 0 or less.
            if temperature_c is None or limit_c is None or limit_c <= 0:
                continue
            was_hot = self.states.is_bad((reading.uuid, f"{sensor}_high", ""))
            is_hot = temperature_c >= limit_c - (COOLER_BY_C if was_hot else 0.0)
            turn(f"{sensor}_high", is_hot, temperature_c, f"{temperature_c:g} C, the limit is {limit_c:g} C")
        is_busy = values.get("pstate", MAX_BUSY_PSTATE + 1) <= MAX_BUSY_PSTATE
        for kind, unit, now_counts in (("pcie_gen", "generation", is_busy), ("pcie_width", "lanes", True)):
            value, best = values.get(kind), values.get(f"{kind}_max")
            if value and best and now_counts:
                turn(f"{kind}_low", value < best, value, f"PCIe {unit}: {value:g} of {best:g}")
        speeds = {key: value for key, value in values.items() if key.startswith("nvlink_gbyte_per_s/")}
        for key, value in speeds.items():
            link, best = key.partition("/")[2], max(speeds.values())
            text = f"NVLink {link}: {value:g} GB/s, others {best:g} GB/s"
            found += self._turn(reading.uuid, "nvlink_slow", value < best, value, text, now, part=link)
        limit_w, default_w = values.get("power_limit_w"), values.get("power_limit_default_w")
        if limit_w and default_w:
            text = f"held at {limit_w:g} W, its default is {default_w:g} W"
            turn("power_limit_low", limit_w < 0.99 * default_w, limit_w, text)
        rows = [values.get(f"remapped_rows_{kind}") for kind in ("corrected", "uncorrected")]
        n_rows = sum(row for row in rows if row is not None)
        text = f"{n_rows:.0f} rows are remapped"
        turn("remapped_rows_many", n_rows > MAX_REMAPPED_ROWS, n_rows, text)
        n_sram = values.get("sram_uncorrected_aggregate", 0.0)
        text = f"{n_sram:.0f} uncorrected SRAM errors in its life"
        turn("sram_uncorrected_many", n_sram > MAX_SRAM_UNCORRECTED, n_sram, text)
        return found

    def _check_processes(self, reading: GpuReading, own_pids: Collection[int], now: float) -> list[Signal]:
        foreign = {process.pid: process for process in reading.processes if process.pid not in own_pids}
        told = self.foreign.get(reading.uuid, set())
        self.foreign[reading.uuid] = set(foreign)
        found = []
        for pid in sorted(set(foreign) - told):
            process = foreign[pid]
            size = "" if process.used_bytes is None else f", holds {process.used_bytes} bytes"
            text = f"process {pid} {process.name}".strip() + size
            found.append(self._signal(reading.uuid, "foreign_process", pid, text, now))
        for pid in sorted(told - set(foreign)):
            text = f"process {pid} is gone"
            found.append(self._signal(reading.uuid, "foreign_process_cleared", pid, text, now))
        return found

    def _turn(
        self,
        uuid: str,
        kind: str,
        is_bad: bool,
        value: float | None,
        text: str,
        now: float,
        *,
        part: str = "",
        first: bool = True,
    ) -> list[Signal]:
        turned = self.states.turned((uuid, kind, part), is_bad, first_counts=first)
        if turned is None:
            return []
        return [self._signal(uuid, kind if turned else f"{kind}_cleared", value, text, now)]

    def _signal(self, uuid: str, kind: str, value: float | None, text: str, now: float) -> Signal:
        return Signal(now, self.source, kind, Entity(EntityKind.GPU, uuid, self.node), value, text)
