"""GPUs through `nvidia-smi -q -x`, where NVML cannot be used: its schemas 10 to 13.

What the report calls N/A, deprecated or unknown is absent from the reading. Reads no other vendor's reports.
"""

import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from ops.monitors.changes import States
from ops.monitors.gpu_readings import GpuChanges, GpuProcess, GpuReading, pci_address
from ops.monitors.nvlink_status import parse_nvlink_status
from ops.signal import Entity, EntityKind, Signal

COMMAND = ("nvidia-smi", "-q", "-x")
LINKS_COMMAND = ("nvidia-smi", "nvlink", "-s")
TIMEOUT_S = 30.0
QUANTITY = re.compile(r"(-?\d+(?:\.\d+)?)\s*(%|x|C|W|MHz|MiB|us)?")
NO_HANDLE = re.compile(
    r"Unable to determine the device handle for GPU\s*([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f]+\.\d): ?(.*)"
)
SCALES = {"%": 0.01, "MiB": float(1 << 20)}
WORDS = {"Yes": 1.0, "No": 0.0, "Active": 1.0, "Not Active": 0.0}
ACTIONS = {
    "None": 0.0,
    "Reset": 1.0,
    "GPU Reset": 1.0,
    "Reboot": 2.0,
    "Node Reboot": 2.0,
    "Drain P2P": 3.0,
    "Drain and Reset": 4.0,
}
FIRST_OF: Mapping[str, tuple[str, ...]] = {
    "remapped_rows_corrected": ("remapped_rows/remapped_row_corr",),
    "remapped_rows_uncorrected": ("remapped_rows/remapped_row_unc",),
    "row_remap_pending": ("remapped_rows/remapped_row_pending",),
    "row_remap_failure": ("remapped_rows/remapped_row_failure",),
    "retired_pages_corrected": ("retired_pages/multiple_single_bit_retirement/retired_count",),
    "retired_pages_uncorrected": ("retired_pages/double_bit_retirement/retired_count",),
    "retired_pages_pending": ("retired_pages/pending_retirement", "retired_pages/pending_blacklist"),
    "sram_threshold_exceeded": ("ecc_errors/aggregate/sram_threshold_exceeded",),
    "unrepairable_memory": ("ecc_errors/unrepairable_memory",),
    "reset_required": ("gpu_reset_status/reset_required",),
    "temperature_c": ("temperature/gpu_temp",),
    "temperature_limit_c": ("temperature/gpu_temp_slow_threshold",),
    "memory_temperature_c": ("temperature/memory_temp",),
    "memory_temperature_limit_c": ("temperature/gpu_temp_max_mem_threshold",),
    "power_w": (
        "gpu_power_readings/power_draw",
        "gpu_power_readings/instant_power_draw",
        "gpu_power_readings/average_power_draw",
        "power_readings/power_draw",
    ),
    "power_limit_w": (
        "gpu_power_readings/current_power_limit",
        "power_readings/enforced_power_limit",
        "power_readings/power_limit",
    ),
    "power_limit_default_w": ("gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
    "sm_clock_mhz": ("clocks/sm_clock",),
    "sm_clock_max_mhz": ("max_clocks/sm_clock",),
    "utilization_frac": ("utilization/gpu_util",),
    "pcie_gen": ("pci/pci_gpu_link_info/pcie_gen/current_link_gen",),
    "pcie_gen_max": ("pci/pci_gpu_link_info/pcie_gen/max_link_gen",),
    "pcie_width": ("pci/pci_gpu_link_info/link_widths/current_link_width",),
    "pcie_width_max": ("pci/pci_gpu_link_info/link_widths/max_link_width",),
    "pcie_replays": ("pci/replay_counter",),
    "memory_used_bytes": ("fb_memory_usage/used",),
    "memory_size_bytes": ("fb_memory_usage/total",),
}
"""Value -> elements below <gpu>, the first that has a number counts: their names changed between schemas."""
SUM_OF: Mapping[str, tuple[str, ...]] = {
    f"ecc_{name}_{span}": tuple(f"ecc_errors/{span}/{element}" for element in elements)
    for span in ("volatile", "aggregate")
    for name, elements in (
        ("corrected", ("single_bit/total", "sram_correctable", "dram_correctable")),
        (
            "uncorrected",
            (
                "double_bit/total",
                "sram_uncorrectable",
                "sram_uncorrectable_parity",
                "sram_uncorrectable_secded",
                "dram_uncorrectable",
            ),
        ),
    )
} | {
    "sram_uncorrected_aggregate": tuple(
        f"ecc_errors/aggregate/sram_uncorrectable{ending}" for ending in ("", "_parity", "_secded")
    )
}
REASONS = {
    "throttled_hw": "hw_slowdown",
    "throttled_hw_thermal": "hw_thermal_slowdown",
    "throttled_power_brake": "hw_power_brake_slowdown",
    "throttled_sw_thermal": "sw_thermal_slowdown",
}


@dataclass(frozen=True)
class SmiReport:
    """What one report says."""

    readings: tuple[GpuReading, ...]
    lost: Mapping[str, str]
    """PCI address, as pci_address writes it, -> what the tool said of a GPU that it cannot reach."""


def parse_report(text: str) -> SmiReport:
    """Read a report; complaints of the tool in front of it or instead of it are taken up.

    Raises:
        ValueError: neither a report nor a complaint about a GPU.
    """
    lost = {pci_address(address): told.strip() for address, told in NO_HANDLE.findall(text)}
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < 0:
        if lost:
            return SmiReport((), lost)
        raise ValueError(f"no report of nvidia-smi: {text.strip()[:200]!r}")
    try:
        root = ElementTree.fromstring(text[start : end + len("</nvidia_smi_log>")])
    except ElementTree.ParseError as error:
        raise ValueError(f"a broken report of nvidia-smi: {error}") from error
    readings = []
    for gpu in root.iterfind("gpu"):
        address = pci_address(gpu.get("id", ""))
        if any((element.text or "").strip() == "GPU is lost" for element in gpu.iter()):
            lost[address] = "GPU is lost"
        else:
            readings.append(_reading(gpu, address))
    return SmiReport(tuple(readings), lost)


class NvidiaSmiMonitor:
    """Watches the GPUs of a node through the tool."""

    name = "nvidia_smi"

    def __init__(
        self,
        node: str,
        run: Callable[[], str] | None = None,
        own_pids: Callable[[], Collection[int]] | None = None,
        run_links: Callable[[], str] | None = None,
    ) -> None:
        """Remember whom to watch.

        Args:
            node: address of this node.
            run: gives the tool's output, both streams; raises OSError where there is no tool. None: run it.
            own_pids: processes that may be on the GPUs; None: whose they are is not asked.
            run_links: gives the output of `nvidia-smi nvlink`; None: run it too where `run` is None.
        """
        self._entity = Entity(EntityKind.NODE, node)
        self._run = run or run_nvidia_smi
        self._run_links = run_links
        if run is None and run_links is None:
            self._run_links = lambda: run_nvidia_smi(LINKS_COMMAND)
        self._own_pids = own_pids
        self._changes = GpuChanges(self.name, node)
        self._states = States()
        self._uuid_of_address: dict[str, str] = {}
        self.readings: tuple[GpuReading, ...] = ()
        """Of the last check."""

    def is_supported(self) -> bool:
        """The tool is there and knows a GPU."""
        try:
            report = parse_report(self._run())
        except (OSError, ValueError):
            return False
        return bool(report.readings or report.lost)

    def check(self, now: float) -> list[Signal]:
        """What changed: see gpu_readings; and nvidia_smi_unusable."""
        try:
            report = parse_report(self._run())
        except (OSError, ValueError) as error:
            self.readings = ()
            return self._turn(True, str(error), now)
        links = self._links()
        self.readings = tuple(
            replace(gpu, values={**gpu.values, **links.get(gpu.uuid, {})}) for gpu in report.readings
        )
        self._uuid_of_address |= {pci_address(r.pci_bus_id): r.uuid for r in report.readings}
        lost = {self._uuid_of_address.get(a, a): ("gpu_lost", text) for a, text in report.lost.items()}
        own_pids = None if self._own_pids is None else self._own_pids()
        return self._turn(False, "it answers again", now) + self._changes.check(
            self.readings, lost, own_pids, now
        )

    def _links(self) -> dict[str, Mapping[str, float]]:
        if self._run_links is None:
            return {}
        try:
            return {gpu.uuid: gpu.values for gpu in parse_nvlink_status(self._run_links())}
        except OSError:
            return {}

    def _turn(self, is_bad: bool, text: str, now: float) -> list[Signal]:
        turned = self._states.turned("unusable", is_bad)
        if turned is None:
            return []
        kind = "nvidia_smi_unusable" if turned else "nvidia_smi_unusable_cleared"
        return [Signal(now, self.name, kind, self._entity, None, text)]


def run_nvidia_smi(command: Sequence[str] = COMMAND) -> str:
    """Both streams of the tool.

    Raises:
        OSError: it is not there, or does not end in time.
    """
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"nvidia-smi did not answer within {TIMEOUT_S:.0f} s") from error
    return ended.stderr + ended.stdout


def _reading(gpu: ElementTree.Element, address: str) -> GpuReading:
    values = {name: _first(gpu, paths) for name, paths in FIRST_OF.items()}
    for name, paths in SUM_OF.items():
        found = [value for path in paths if (value := _number(gpu.findtext(path))) is not None]
        values[name] = sum(found) if found else None
    for name, reason in REASONS.items():
        events = ("clocks_event", "clocks_throttle")
        values[name] = _first(gpu, tuple(f"{event}_reasons/{event}_reason_{reason}" for event in events))
    if values["temperature_limit_c"] is None:
        values["temperature_limit_c"] = _limit_by_distance(gpu)
    pstate = (gpu.findtext("performance_state") or "").strip()
    values["pstate"] = float(pstate[1:]) if re.fullmatch(r"P\d+", pstate) else None
    values["recovery_action"] = _recovery_action(gpu)
    return GpuReading(
        (gpu.findtext("uuid") or address).strip(),
        (gpu.findtext("pci/pci_bus_id") or address).strip(),
        (gpu.findtext("product_name") or "").strip(),
        {name: value for name, value in values.items() if value is not None},
        _processes(gpu),
    )


def _number(text: str | None) -> float | None:
    word = (text or "").strip()
    if word in WORDS:
        return WORDS[word]
    match = QUANTITY.fullmatch(word)
    return float(match[1]) * SCALES.get(match[2], 1.0) if match else None


def _first(gpu: ElementTree.Element, paths: tuple[str, ...]) -> float | None:
    numbers = (_number(gpu.findtext(path)) for path in paths)
    return next((number for number in numbers if number is not None), None)


def _limit_by_distance(gpu: ElementTree.Element) -> float | None:
    """Newer drivers give how far the limit is (T.Limit) and at what distance the clocks slow down."""
    paths = ("gpu_temp", "gpu_temp_tlimit", "gpu_temp_slow_tlimit_threshold")
    celsius, distance, slow_distance = (_number(gpu.findtext(f"temperature/{path}")) for path in paths)
    if celsius is None or distance is None or slow_distance is None:
        return None
    return celsius + distance - slow_distance


def _recovery_action(gpu: ElementTree.Element) -> float | None:
    action = (gpu.findtext("gpu_recovery_action") or "").strip()
    if action in ACTIONS:
        return ACTIONS[action]
    is_drained = _number(gpu.findtext("gpu_reset_status/drain_and_reset_recommended"))
    return None if is_drained is None else 4.0 * is_drained


def _processes(gpu: ElementTree.Element) -> tuple[GpuProcess, ...]:
    """Those that compute; the desktop's are left out."""
    found = []
    for process in gpu.iterfind("processes/process_info"):
        pid, used_bytes = _number(process.findtext("pid")), _number(process.findtext("used_memory"))
        if pid is not None and "C" in (process.findtext("type") or "C"):
            name = (process.findtext("process_name") or "").strip()
            found.append(GpuProcess(int(pid), name, None if used_bytes is None else int(used_bytes)))
    return tuple(found)
