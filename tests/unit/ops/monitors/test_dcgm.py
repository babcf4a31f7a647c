"""An exporter of DCGM on loopback, whose text a test changes."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ops.monitors.dcgm import NAMES, REASON_MASKS, DcgmMonitor, gpu_readings, parse_samples

FOLDER = Path(__file__).parents[3] / "data" / "dcgm"
UUID = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"


class Exporter:
    """A real HTTP server."""

    def __init__(self):
        self.lines, self.status = {}, 200
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                assert self.path == "/metrics"
                body = exporter.text().encode()
                self.send_response(exporter.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/metrics"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def text(self):
        return "# HELP DCGM_FI_DEV_X y\n" + "".join(f"{line} {value}\n" for line, value in self.lines.items())

    def show(self, name, value, gpu=0, **labels):
        """None takes the line away."""
        labels = {"gpu": gpu, "UUID": f"GPU-{gpu}", "modelName": r"H100, 80 \"GB\"", **labels}
        line = name + "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}"
        self.lines.pop(line, None)
        if value is not None:
            self.lines[line] = value

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def exporter():
    exporter = Exporter()
    for gpu in (0, 1):
        exporter.show("DCGM_FI_DEV_GPU_TEMP", 50, gpu)
        exporter.show("DCGM_FI_DEV_XID_ERRORS", 31 if gpu else 0, gpu)
        exporter.show("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 9223372036854775794, gpu)
        exporter.show("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", 4, gpu)
    yield exporter
    exporter.close()


@pytest.fixture
def monitor(exporter):
    monitor = DcgmMonitor("n1", exporter.url)
    assert monitor.is_supported()
    assert monitor.check(0.0) == []  # The Xid that the second one shows is old.
    return monitor


def told(monitor):
    return [(s.entity.name, s.kind, s.value) for s in monitor.check(1.0)]


def test_the_sample_of_the_exporters_readme():
    (reading,) = gpu_readings(parse_samples((FOLDER / "readme_sample.prom").read_text()))
    assert reading.uuid == UUID
    assert dict(reading.values) == {"sm_clock_mhz": 139}  # Its memory temperature is a blank of DCGM.


def test_the_health_fields_that_it_shows_unless_told_otherwise_are_known():
    rows = (FOLDER / "default-counters.csv").read_text().splitlines()
    fields = {row.lstrip("# ").split(",")[0].strip().removeprefix("DCGM_FI_DEV_") for row in rows}
    marks = (
        "ECC_SBE",
        "ECC_DBE",
        "RETIRED",
        "REMAP",
        "PCIE_REPLAY",
        "GPU_TEMP",
        "MEMORY_TEMP",
        "POWER_USAGE",
    )
    asked = {field for field in fields if any(mark in field for mark in marks)}
    assert len(asked) == 14
    assert asked <= set(NAMES)


def test_an_xid_is_its_change(exporter, monitor):
    assert told(monitor) == []
    exporter.show("DCGM_FI_DEV_XID_ERRORS", 79, gpu=1)
    assert told(monitor) == [("GPU-1", "xid", 79)]
    assert told(monitor) == []  # The gauge stays there for ever.
    exporter.show("DCGM_FI_DEV_XID_ERRORS", 0, gpu=1)  # The exporter was restarted.
    assert told(monitor) == []
    exporter.show("DCGM_FI_DEV_XID_ERRORS", 79, gpu=1)
    assert told(monitor) == [("GPU-1", "xid", 79)]


def test_an_xid_in_a_line_that_was_not_there_before(exporter, monitor):
    exporter.show("DCGM_FI_DEV_XID_ERRORS", None, gpu=0)
    assert told(monitor) == []
    labels = {"err_code": "48", "err_msg": "Double Bit ECC Error"}
    exporter.show("DCGM_FI_DEV_XID_ERRORS", 48, gpu=0, **labels)
    (signal,) = monitor.check(5.0)
    assert (signal.at, signal.kind, signal.text) == (5.0, "xid", "Xid 48: Double Bit ECC Error")


def test_counts_by_code_show_the_same_xid_twice(exporter, monitor):
    def count(value):
        exporter.show("DCGM_EXP_XID_ERRORS_COUNT", value, gpu=0, xid="94", window_size_in_ms="300000")

    count(1)
    exporter.show("DCGM_FI_DEV_XID_ERRORS", 94, gpu=0)
    assert told(monitor) == [("GPU-0", "xid", 94)]
    count(2)
    assert told(monitor) == [("GPU-0", "xid", 94)]
    count(1)  # The first one leaves the window.
    assert told(monitor) == []
    count(None)
    assert told(monitor) == []
    count(1)
    assert told(monitor) == [("GPU-0", "xid", 94)]


def test_an_sxid_blames_the_switch(exporter, monitor):
    exporter.lines['DCGM_FI_DEV_NVSWITCH_FATAL_ERRORS{nvswitch="2",Hostname="n1"}'] = 20034
    (signal,) = monitor.check(1.0)
    assert (signal.kind, signal.value, str(signal.entity)) == ("sxid", 20034, "link nvswitch2 (node n1)")
    assert "Fatal" in signal.text
    assert told(monitor) == []


@pytest.mark.parametrize(
    ("name", "before", "after", "kind", "value"),
    [
        ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", 4, 9, "pcie_replays", 5),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 0, 1, "ecc_uncorrected_volatile", 1),
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE", 0, 1, "row_remap_failure", 1),
        ("DCGM_FI_DEV_ROW_REMAP_FAILED", 0, 1, "row_remap_failure", 1),
        ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", 2, 3, "remapped_rows_uncorrected", 1),
        ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 1, 4, "nvlink_crc_errors", 3),
        ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L3", 0, 2, "nvlink_replays", 2),
        ("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_L3_TOTAL", 0, 2, "nvlink_recoveries", 2),
        ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 4, 0x44, "throttled_hw_thermal", 1),
    ],
)
def test_each_fault_is_told_once(exporter, monitor, name, before, after, kind, value):
    exporter.show(name, before, gpu=1)
    assert told(monitor) == []
    exporter.show(name, after, gpu=1)
    assert told(monitor) == [("GPU-1", kind, value)]
    assert told(monitor) == []


def test_a_gpu_that_is_no_longer_shown(exporter, monitor):
    exporter.lines = {line: value for line, value in exporter.lines.items() if "GPU-1" not in line}
    assert told(monitor) == [("GPU-1", "gpu_missing", 1)]


@pytest.mark.parametrize("way", ["closed", "error", "empty"])
def test_an_exporter_that_fails_is_no_fault_of_a_gpu(exporter, monitor, way):
    if way == "closed":
        exporter.server.shutdown()
        exporter.server.socket.close()
    elif way == "error":
        exporter.status = 500
    lines, exporter.lines = exporter.lines, ({} if way == "empty" else exporter.lines)
    assert told(monitor) == [("n1", "dcgm_unreachable", None)]
    assert told(monitor) == []
    if way != "closed":
        exporter.status, exporter.lines = 200, lines
        assert told(monitor) == [("n1", "dcgm_unreachable_cleared", None)]


def test_odd_text_is_passed_over():
    text = (
        'DCGM_FI_DEV_GPU_TEMP{gpu="0", UUID="GPU-a, }\\"b"} 41 1700000000000\n'
        'DCGM_FI_DEV_GPU_TEMP{gpu="1"} 42\n'
        '...\nDCGM_FI_DEV_GPU_TEMP{ 5\nDCGM_FI_DEV_X{gpu="0"} NaN\nDCGM_FI_DEV_X{gpu="0"} abc\n\nup 1\n'
    )
    samples = [(s.name, s.device, s.value) for s in parse_samples(text)]
    assert samples[:2] == [
        ("DCGM_FI_DEV_GPU_TEMP", 'GPU-a, }\\"b', 41),
        ("DCGM_FI_DEV_GPU_TEMP", "1", 42),
    ]
    assert samples[2:] == [("up", "", 1)]


@pytest.mark.parametrize("url", ["http://10.0.0.3:9400/metrics", "https://127.0.0.1/", "http://example.org/"])
def test_only_loopback(url):
    with pytest.raises(ValueError, match="loopback"):
        DcgmMonitor("n1", url)


def test_no_exporter_and_something_else_there(exporter):
    exporter.lines = {"node_load1": 3}
    assert not DcgmMonitor("n1", exporter.url).is_supported()
    assert DcgmMonitor("n1", exporter.url.replace("127.0.0.1", "localhost"))
    exporter.server.shutdown()
    exporter.server.socket.close()
    assert not DcgmMonitor("n1", exporter.url).is_supported()


def test_every_name_leads_to_a_value_that_is_known():
    assert len(REASON_MASKS) == 3
    samples = [s for name in NAMES for s in parse_samples(f'DCGM_FI_DEV_{name}{{UUID="g"}} 3\n')]
    (reading,) = gpu_readings(samples)
    assert set(reading.values) == set(NAMES.values())
