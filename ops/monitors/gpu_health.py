"""GPUs through NVML (nvidia-ml-py): the one file that imports pynvml.

Reads; resets nothing and sets nothing. A call into a wedged driver may block for ever: who runs the monitors
gives each its own time. In a container without the host's process ids the processes on a GPU cannot be told
from ours, so own_pids is then to be None.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

import pynvml

from ops.monitors.changes import States
from ops.monitors.gpu_readings import GpuChanges, GpuProcess, GpuReading, throttle_flags
from ops.signal import Entity, EntityKind, Signal

ABSENT = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
"""There is no NVIDIA GPU here, or nothing to drive it."""
LINK_COUNTERS = {
    "nvlink_replays": (pynvml.NVML_NVLINK_ERROR_DL_REPLAY,),
    "nvlink_recoveries": (pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,),
    "nvlink_crc_errors": (pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT, pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA),
}
"""Up to NVLink 4; NVLink 5 has fields instead."""
LINK_FIELDS = {
    pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS: "nvlink_receive_errors",
    pynvml.NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS: "nvlink_integrity_errors",
    pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS: "nvlink_recoveries",
    pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS: "nvlink_failed_recoveries",
}
FIELDS = {
    pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: "recovery_action",
    pynvml.NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR: "pcie_nonfatal_errors",
    pynvml.NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR: "pcie_fatal_errors",
}
VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of the union by nvmlValueType_t."""


class _Device:
    """One GPU's handle: asks, and remembers how answers failed."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.needs_reset = False
        self.failure = ""

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """The answer, or None where the GPU, the driver or our rights do not give one.

        Raises:
            pynvml.NVMLError_GpuIsLost: it has fallen off the bus.
        """
        try:
            return function(self.handle, *args)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                raise
            if error.value == pynvml.NVML_ERROR_RESET_REQUIRED:
                self.needs_reset = True
            elif error.value in (pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_TIMEOUT):
                self.failure = str(error)
            return None


class GpuHealthMonitor:
    """Watches every GPU of a node that this process may see."""

    name = "gpu_health"

    def __init__(
        self,
        node: str,
        own_pids: Callable[[], Collection[int]] | None = None,
        n_expected: int | None = None,
    ) -> None:
        """Remember whom to watch; NVML is started by is_supported.

        Args:
            node: address of this node.
            own_pids: processes that may be on the GPUs; None: whose they are is not asked.
            n_expected: GPUs that the node has when it is whole; None: what is there at the first check.
        """
        self._node = node
        self._own_pids = own_pids
        self._n_expected = n_expected
        self._is_open = False
        self._changes = GpuChanges(self.name, node)
        self._node_states = States()
        self._uuid_of_index: dict[int, str] = {}
        self.readings: tuple[GpuReading, ...] = ()
        """Of the last check: for gauges, and to find a UUID by a PCI address."""

    def is_supported(self) -> bool:
        """NVML is there with a GPU. A driver that is there and refuses is supported: check tells it."""
        if self._n_expected:
            return True
        try:
            self._open()
            return bool(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            return error.value not in (*ABSENT, pynvml.NVML_ERROR_NO_PERMISSION)

    def check(self, now: float) -> list[Signal]:
        """What changed: see gpu_readings; and nvml_unusable, gpu_count_low (how many are left)."""
        try:
            self._open()
            n_gpus = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self.readings = ()
            self.close()  # So that the next check starts NVML anew: a driver may have been reloaded.
            return self._turn("nvml_unusable", True, None, f"NVML: {error}", now)
        found = self._turn("nvml_unusable", False, None, "NVML answers again", now)
        if self._n_expected is not None:
            text = f"{n_gpus} of {self._n_expected} GPUs are there"
            found += self._turn("gpu_count_low", n_gpus < self._n_expected, n_gpus, text, now)
        readings, unreadable = [], {}
        for index in range(n_gpus):
            reading, failure = self._read(index)
            if reading is not None:
                readings.append(reading)
            elif failure is not None:
                uuid = self._uuid_of_index.get(index, f"index {index}")
                unreadable[uuid] = failure
        self.readings = tuple(readings)
        own_pids = None if self._own_pids is None else self._own_pids()
        return found + self._changes.check(readings, unreadable, own_pids, now)

    def close(self) -> None:
        """Let go of NVML."""
        if self._is_open:
            self._is_open = False
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _open(self) -> None:
        if not self._is_open:
            pynvml.nvmlInit()
            self._is_open = True

    def _read(self, index: int) -> tuple[GpuReading | None, tuple[str, str] | None]:
        """A reading, or how it failed; neither for a GPU that is not ours to see."""
        try:
            device = _Device(pynvml.nvmlDeviceGetHandleByIndex(index))
            uuid = _text(pynvml.nvmlDeviceGetUUID(device.handle))
            self._uuid_of_index[index] = uuid
            reading = _read_device(device, uuid)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                return None, ("gpu_lost", str(error))
            if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
                return None, None
            return None, ("gpu_unreachable", str(error))
        if device.failure and not reading.values:
            return None, ("gpu_unreachable", device.failure)
        return reading, None

    def _turn(self, kind: str, is_bad: bool, value: float | None, text: str, now: float) -> list[Signal]:
        turned = self._node_states.turned(kind, is_bad)
        if turned is None:
            return []
        entity = Entity(EntityKind.NODE, self._node)
        return [Signal(now, self.name, kind if turned else f"{kind}_cleared", entity, value, text)]


def _read_device(device: _Device, uuid: str) -> GpuReading:
    pci = device.ask(pynvml.nvmlDeviceGetPciInfo)
    product = device.ask(pynvml.nvmlDeviceGetName)
    values: dict[str, float] = {}
    for part in (_memory_errors, _speed_and_heat, _pcie, _fields, _nvlinks):
        values.update((key, value) for key, value in part(device) if value is not None)
    processes = device.ask(pynvml.nvmlDeviceGetComputeRunningProcesses) or []
    if values:
        values["reset_required"] = float(device.needs_reset)
    elif device.needs_reset:
        values["reset_required"] = 1.0
    return GpuReading(
        uuid,
        "" if pci is None else _text(pci.busId),
        "" if product is None else _text(product),
        values,
        tuple(GpuProcess(process.pid, "", process.usedGpuMemory) for process in processes),
    )


Readings = Iterator[tuple[str, float | None]]


def _memory_errors(device: _Device) -> Readings:
    for name, kind in (
        ("corrected", pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        ("uncorrected", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    ):
        for span, counter in (
            ("volatile", pynvml.NVML_VOLATILE_ECC),
            ("aggregate", pynvml.NVML_AGGREGATE_ECC),
        ):
            yield f"ecc_{name}_{span}", device.ask(pynvml.nvmlDeviceGetTotalEccErrors, kind, counter)
    yield (
        "sram_uncorrected_aggregate",
        device.ask(
            pynvml.nvmlDeviceGetMemoryErrorCounter,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_AGGREGATE_ECC,
            pynvml.NVML_MEMORY_LOCATION_SRAM,
        ),
    )
    rows = device.ask(pynvml.nvmlDeviceGetRemappedRows)
    names = ("remapped_rows_corrected", "remapped_rows_uncorrected", "row_remap_pending", "row_remap_failure")
    yield from zip(names, rows or (None,) * 4, strict=True)
    for name, cause in (
        ("corrected", pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS),
        ("uncorrected", pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR),
    ):
        pages = device.ask(pynvml.nvmlDeviceGetRetiredPages, cause)
        yield f"retired_pages_{name}", None if pages is None else len(pages)
    yield "retired_pages_pending", device.ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus)


def _speed_and_heat(device: _Device) -> Readings:
    reasons = device.ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons)
    if reasons is None:  # Its name before driver 535.
        reasons = device.ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    if reasons is not None:
        yield from throttle_flags(reasons).items()
    temperature_c = device.ask(pynvml.nvmlDeviceGetTemperatureV, pynvml.NVML_TEMPERATURE_GPU)
    if temperature_c is None:
        temperature_c = device.ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
    yield "temperature_c", temperature_c
    limit_c = device.ask(pynvml.nvmlDeviceGetTemperatureThreshold, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    if limit_c is None and temperature_c is not None:  # Newer GPUs tell only how far it is.
        margin_c = device.ask(pynvml.nvmlDeviceGetMarginTemperature)
        limit_c = None if margin_c is None else temperature_c + margin_c
    yield "temperature_limit_c", limit_c
    for name, function in (
        ("power_w", pynvml.nvmlDeviceGetPowerUsage),
        ("power_limit_w", pynvml.nvmlDeviceGetEnforcedPowerLimit),
        ("power_limit_default_w", pynvml.nvmlDeviceGetPowerManagementDefaultLimit),
    ):
        milliwatts = device.ask(function)
        yield name, None if milliwatts is None else milliwatts / 1000
    yield "sm_clock_mhz", device.ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
    yield "sm_clock_max_mhz", device.ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)
    pstate = device.ask(pynvml.nvmlDeviceGetPerformanceState)
    yield "pstate", None if pstate == pynvml.NVML_PSTATE_UNKNOWN else pstate


def _pcie(device: _Device) -> Readings:
    yield "pcie_gen", device.ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration)
    yield "pcie_gen_max", device.ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration)
    yield "pcie_width", device.ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth)
    yield "pcie_width_max", device.ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth)
    yield "pcie_replays", device.ask(pynvml.nvmlDeviceGetPcieReplayCounter)


def _fields(device: _Device) -> Readings:
    yield from _field_values(device, FIELDS, None)


def _nvlinks(device: _Device) -> Readings:
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        is_active = device.ask(pynvml.nvmlDeviceGetNvLinkState, link)
        if is_active is None:
            return
        yield f"nvlink_active/{link}", is_active
        if not is_active:
            continue
        for name, counters in LINK_COUNTERS.items():
            counts = [
                device.ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, link, counter) for counter in counters
            ]
            known = [count for count in counts if count is not None]
            yield f"{name}/{link}", sum(known) if known else None
        for name, value in _field_values(device, LINK_FIELDS, link):
            yield f"{name}/{link}", value


def _field_values(device: _Device, names: dict[int, str], scope: int | None) -> Iterator[tuple[str, float]]:
    """The fields that the GPU has, each with a return code and a type of its own."""
    ids = [field if scope is None else (field, scope) for field in names]
    for value in device.ask(pynvml.nvmlDeviceGetFieldValues, ids) or ():
        if value.nvmlReturn == pynvml.NVML_SUCCESS and value.valueType < len(VALUE_TYPES):
            yield names[value.fieldId], getattr(value.value, VALUE_TYPES[value.valueType])


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
