"""GPUs through a dcgm-exporter on this node: its text over HTTP, on loopback only.

The gauge of Xids shows the last one for ever: only its change is an Xid, and the same one twice cannot be
seen there. Where the exporter also counts them by code, those counts are used instead. Knows the names of
old and new releases. Reads nothing from other nodes.
"""

import http.client
import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ops.monitors.changes import States
from ops.monitors.gpu_readings import GpuChanges, GpuReading, throttle_flags
from ops.signal import Entity, EntityKind, Signal

DEFAULT_URL = "http://127.0.0.1:9400/metrics"
MAX_RESPONSE_BYTES = 16 << 20
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)\s*(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
LABEL = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
LINK_ERRORS = re.compile(
    r"DCGM_FI_DEV_NVLINK_(CRC_FLIT|CRC_DATA|REPLAY|RECOVERY)_ERROR_(?:COUNT_)?(?:L(\d+)(?:_TOTAL)?|TOTAL)"
)
LINK_KINDS = {
    "CRC_FLIT": "nvlink_crc_errors",
    "CRC_DATA": "nvlink_crc_errors",
    "REPLAY": "nvlink_replays",
    "RECOVERY": "nvlink_recoveries",
}
BLANKS = (
    (2147483632.0, 2147483647.0),
    (140737488355328.0, 140737488355343.0),
    (9223372036854775792.0, float("inf")),
)
"""DCGM's "no value", "not found", "not supported", "not permitted" as int32, float and int64."""
XID_GAUGES = ("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR")
XID_COUNTS = ("DCGM_EXP_XID_ERRORS_COUNT", "DCGM_EXP_XID_ERRORS_TOTAL")
SXID_GAUGES = {
    "DCGM_FI_DEV_NVSWITCH_FATAL_ERRORS": "Fatal",
    "DCGM_FI_DEV_SXID_FATAL_ERROR": "Fatal",
    "DCGM_FI_DEV_NVSWITCH_NON_FATAL_ERRORS": "Non-fatal",
    "DCGM_FI_DEV_SXID_NON_FATAL_ERROR": "Non-fatal",
}
NAMES = {
    "ECC_SBE_VOL_TOTAL": "ecc_corrected_volatile",
    "ECC_DBE_VOL_TOTAL": "ecc_uncorrected_volatile",
    "ECC_SBE_AGG_TOTAL": "ecc_corrected_aggregate",
    "ECC_DBE_AGG_TOTAL": "ecc_uncorrected_aggregate",
    "ECC_DBE_AGG_SRM": "sram_uncorrected_aggregate",
    "SRAM_EXCEEDED": "sram_threshold_exceeded",
    "THRESHOLD_SRM": "sram_threshold_exceeded",
    "RETIRED_SBE": "retired_pages_corrected",
    "PAGE_RETIRED_SBE_TOTAL": "retired_pages_corrected",
    "RETIRED_DBE": "retired_pages_uncorrected",
    "PAGE_RETIRED_DBE_TOTAL": "retired_pages_uncorrected",
    "RETIRED_PENDING": "retired_pages_pending",
    "PAGE_RETIRED_PENDING": "retired_pages_pending",
    "CORRECTABLE_REMAPPED_ROWS": "remapped_rows_corrected",
    "ROW_REMAP_CORRECTABLE_TOTAL": "remapped_rows_corrected",
    "UNCORRECTABLE_REMAPPED_ROWS": "remapped_rows_uncorrected",
    "ROW_REMAP_UNCORRECTABLE_TOTAL": "remapped_rows_uncorrected",
    "ROW_REMAP_FAILURE": "row_remap_failure",
    "ROW_REMAP_FAILED": "row_remap_failure",
    "ROW_REMAP_PENDING": "row_remap_pending",
    "GPU_RECOVERY_ACTION": "recovery_action",
    "PCIE_REPLAY_COUNTER": "pcie_replays",
    "PCIE_REPLAY_TOTAL": "pcie_replays",
    "PCIE_LINK_GEN": "pcie_gen",
    "PCIE_MAX_LINK_GEN": "pcie_gen_max",
    "PCIE_LINK_WIDTH": "pcie_width",
    "PCIE_MAX_LINK_WIDTH": "pcie_width_max",
    "GPU_TEMP": "temperature_c",
    "GPU_TEMP_CELSIUS": "temperature_c",
    "SLOWDOWN_TEMP": "temperature_limit_c",
    "GPU_TEMP_SLOWDOWN_CELSIUS": "temperature_limit_c",
    "MEMORY_TEMP": "memory_temperature_c",
    "MEMORY_TEMP_CELSIUS": "memory_temperature_c",
    "MEM_MAX_OP_TEMP": "memory_temperature_limit_c",
    "MEMORY_MAX_OP_TEMP_CELSIUS": "memory_temperature_limit_c",
    "POWER_USAGE": "power_w",
    "BOARD_POWER_WATTS": "power_w",
    "ENFORCED_POWER_LIMIT": "power_limit_w",
    "BOARD_POWER_LIMIT_ENFORCED_WATTS": "power_limit_w",
    "POWER_MGMT_LIMIT_DEF": "power_limit_default_w",
    "BOARD_POWER_LIMIT_DEFAULT_WATTS": "power_limit_default_w",
    "SM_CLOCK": "sm_clock_mhz",
    "MAX_SM_CLOCK": "sm_clock_max_mhz",
    "PSTATE": "pstate",
    "GPU_PSTATE": "pstate",
    "NVLINK_RX_ERROR_TOTAL": "nvlink_receive_errors",
    "NVLINK_INTEGRITY_ERROR_TOTAL": "nvlink_integrity_errors",
    "NVLINK_RECOVERY_FAILED_TOTAL": "nvlink_failed_recoveries",
}
"""Field without "DCGM_FI_DEV_" -> value of a reading."""
REASON_MASKS = ("CLOCK_THROTTLE_REASONS", "CLOCKS_EVENT_REASONS", "CLOCKS_EVENT_REASON")


@dataclass(frozen=True)
class Sample:
    """One line of an exposition."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def device(self) -> str:
        """UUID of the GPU; with an old exporter perhaps only its index."""
        return self.labels.get("UUID") or self.labels.get("uuid") or self.labels.get("gpu", "")


def parse_samples(text: str) -> Iterator[Sample]:
    """Samples with a value; comments, blanks of DCGM and lines that are none are passed over."""
    for line in text.splitlines():
        match = SAMPLE.fullmatch(line.strip())
        if line.startswith("#") or match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if value == value and not any(low <= value <= high for low, high in BLANKS):
            yield Sample(match[1], dict(LABEL.findall(match[2] or "")), value)


def gpu_readings(samples: Iterator[Sample] | list[Sample]) -> list[GpuReading]:
    """Readings of the GPUs, in the order of the text. Of several MIG instances the highest value counts."""
    values: dict[str, dict[str, float]] = {}
    products: dict[str, str] = {}
    addresses: dict[str, str] = {}
    for sample in samples:
        if not sample.device or not sample.name.startswith("DCGM_") or "nvswitch" in sample.labels:
            continue
        own = values.setdefault(sample.device, {})
        products.setdefault(sample.device, sample.labels.get("modelName", ""))
        addresses.setdefault(sample.device, sample.labels.get("pci_bus_id", ""))
        name = sample.name.removeprefix("DCGM_FI_DEV_")
        link = LINK_ERRORS.fullmatch(sample.name)
        if link is not None:
            key = f"{LINK_KINDS[link[1]]}/{link[2] or 'all'}"
            own[key] = own.get(key, 0.0) + sample.value
        elif name in REASON_MASKS:
            own.update(throttle_flags(int(sample.value)))
        elif name in NAMES:
            own[NAMES[name]] = max(sample.value, own.get(NAMES[name], sample.value))
    return [GpuReading(uuid, addresses[uuid], products[uuid], own) for uuid, own in values.items()]


@dataclass
class _Codes:
    """Xids seen, so that a new one is known."""

    gauges: dict[tuple[str, ...], float] = field(default_factory=dict)
    counts: dict[tuple[str, ...], float] = field(default_factory=dict)
    is_first: bool = True

    def new(self, samples: list[Sample]) -> Iterator[tuple[Sample, int, str]]:
        """Sample, code and severity of each new Xid and SXid."""
        counted = {sample.device for sample in samples if sample.name in XID_COUNTS}
        counts_before, self.counts = self.counts, {}
        for sample in samples:
            instance = sample.labels.get("GPU_I_ID", "")
            if sample.name in XID_COUNTS:
                code = sample.labels.get("xid", "")
                key = (sample.name, sample.device, instance, code)
                # Of a sliding window, so it falls too, and a line goes when its count is none.
                rose = sample.value > counts_before.get(key, 0.0)
                self.counts[key] = sample.value
                if rose and not self.is_first and code.isdigit() and int(code):
                    yield sample, int(code), ""
            elif sample.name in XID_GAUGES or sample.name in SXID_GAUGES:
                switch = sample.labels.get("nvswitch", "")
                key = (sample.name, sample.device, instance, switch)
                changed = sample.value != self.gauges.get(key, 0.0)
                self.gauges[key] = sample.value
                is_counted = sample.name in XID_GAUGES and sample.device in counted
                if changed and sample.value and not self.is_first and not is_counted:
                    yield sample, int(sample.value), SXID_GAUGES.get(sample.name, "")
        self.is_first = False


class DcgmMonitor:
    """Watches the GPUs of a node through its exporter."""

    name = "dcgm"

    def __init__(self, node: str, url: str = DEFAULT_URL, timeout_s: float = 5.0) -> None:
        """Remember where to ask.

        Args:
            node: address of this node.
            url: of the exporter; its host is a loopback address or localhost.
            timeout_s: for each part of the exchange.

        Raises:
            ValueError: the URL leads elsewhere.
        """
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme != "http" or not _is_loopback(host):
            raise ValueError(f"the DCGM exporter is read on loopback only, by http: {url}")
        self._host, self._port, self._path = host, parts.port or 80, parts.path or "/"
        self._timeout_s = timeout_s
        self._node = node
        self._changes = GpuChanges(self.name, node)
        self._codes = _Codes()
        self._states = States()
        self.readings: tuple[GpuReading, ...] = ()
        """Of the last check."""

    def is_supported(self) -> bool:
        """An exporter answers and shows DCGM's fields."""
        try:
            return any(sample.name.startswith("DCGM_") for sample in parse_samples(self._fetch()))
        except (OSError, http.client.HTTPException):
            return False

    def check(self, now: float) -> list[Signal]:
        """What changed: see gpu_readings; xid, sxid (the code); dcgm_unreachable, which is no GPU's fault."""
        try:
            samples = list(parse_samples(self._fetch()))
            self.readings = tuple(gpu_readings(samples))
            if not self.readings:  # It has just started, or its engine is gone; the GPUs need not be.
                raise http.client.HTTPException("shows no GPU")
        except (OSError, http.client.HTTPException) as error:
            self.readings = ()
            return self._turn(True, f"{self._host}:{self._port}: {error}", now)
        found = self._turn(False, "it answers again", now)
        for sample, code, severity in self._codes.new(samples):
            found.append(self._code_signal(sample, code, severity, now))
        return found + self._changes.check(self.readings, {}, None, now)

    def _code_signal(self, sample: Sample, code: int, severity: str, now: float) -> Signal:
        told = sample.labels.get("err_msg", "")
        if severity:
            switch = Entity(EntityKind.LINK, f"nvswitch{sample.labels.get('nvswitch', '')}", self._node)
            return Signal(now, self.name, "sxid", switch, code, f"SXid {code}, {severity}")
        entity = Entity(EntityKind.GPU, sample.device, self._node)
        return Signal(now, self.name, "xid", entity, code, f"Xid {code}" + (f": {told}" if told else ""))

    def _turn(self, is_bad: bool, text: str, now: float) -> list[Signal]:
        turned = self._states.turned("unreachable", is_bad)
        if turned is None:
            return []
        kind = "dcgm_unreachable" if turned else "dcgm_unreachable_cleared"
        return [Signal(now, self.name, kind, Entity(EntityKind.NODE, self._node), None, text)]

    def _fetch(self) -> str:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request("GET", self._path)
            response = connection.getresponse()
            content = response.read(MAX_RESPONSE_BYTES)
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"status {response.status}")
        return content.decode("utf-8", "replace")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
