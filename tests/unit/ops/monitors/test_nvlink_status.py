"""The links of GPUs as `nvidia-smi nvlink` prints them."""

from pathlib import Path

import pytest

from ops.monitors.nvidia_smi_xml import NvidiaSmiMonitor
from ops.monitors.nvlink_status import parse_nvlink_status

FOLDER = Path(__file__).parents[3] / "data" / "nvidia_smi"
A100 = "GPU-513536b6-7d19-9063-b049-1e69664bb298"
STATUS = (
    f"GPU 0: NVIDIA A100-SXM4-80GB (UUID: {A100})\n"
    "\t Link 0: 25 GB/s\n\t Link 1: 25 GB/s\n\t Link 2: <inactive>\n"
)


def test_eight_gpus_of_twelve_links():
    gpus = parse_nvlink_status((FOLDER / "nvlink_status_a100.txt").read_text())
    assert len({gpu.uuid for gpu in gpus}) == 8
    assert {gpu.product for gpu in gpus} == {"NVIDIA A100-SXM4-80GB"}
    for gpu in gpus:
        assert [gpu.values[f"nvlink_active/{link}"] for link in range(12)] == [1.0] * 12
        assert gpu.values["nvlink_gbyte_per_s/11"] == 25


def test_error_counts_are_summed_by_kind():
    text = STATUS + "\t Link 0: Replay Errors: 3\n\t Link 0: Recovery Errors: 0\n"
    text += "\t Link 1: CRC FLIT Errors: 2\n\t Link 1: CRC Data Errors: 1\n"
    (gpu,) = parse_nvlink_status(text)
    counts = {key: value for key, value in gpu.values.items() if "errors" in key or "repl" in key}
    assert counts == {"nvlink_replays/0": 3, "nvlink_crc_errors/1": 3}
    assert gpu.values["nvlink_recoveries/0"] == 0


@pytest.fixture
def links():
    return [STATUS]


@pytest.fixture
def monitor(links):
    report = (FOLDER / "a100-sxm4-v12.xml").read_text()
    monitor = NvidiaSmiMonitor("n1", lambda: report, run_links=lambda: links[0])
    assert monitor.check(0.0) == []  # The third link leads nowhere.
    return monitor


ALL_DOWN = (
    f"GPU 0: A100 (UUID: {A100})\nNVML: Unable to retrieve NVLink information as all links are inActive\n"
)


@pytest.mark.parametrize(
    ("change", "kind", "value"),
    [
        (STATUS.replace("Link 1: 25 GB/s", "Link 1: <inactive>"), "nvlink_down", 1),
        (STATUS.replace("Link 1: 25 GB/s", "Link 1: 12.5 GB/s"), "nvlink_slow", 12.5),
        (ALL_DOWN, "nvlinks_down", 1),
    ],
)
def test_links_that_fail_and_come_back(links, monitor, change, kind, value):
    links[0] = change
    (signal,) = monitor.check(1.0)
    assert (signal.kind, signal.value, signal.entity.name) == (kind, value, A100)
    assert monitor.check(2.0) == []
    links[0] = STATUS
    assert [signal.kind for signal in monitor.check(3.0)] == [f"{kind}_cleared"]


def test_a_card_that_never_had_a_link_up():
    report = (FOLDER / "a100-sxm4-v12.xml").read_text()
    assert NvidiaSmiMonitor("n1", lambda: report, run_links=lambda: ALL_DOWN).check(0.0) == []


def fail():
    raise OSError("no such option")


def test_a_tool_that_knows_no_links():
    report = (FOLDER / "a100-sxm4-v12.xml").read_text()
    monitor = NvidiaSmiMonitor("n1", lambda: report, run_links=fail)
    assert monitor.check(0.0) == []
    assert len(monitor.readings) == 1
    assert parse_nvlink_status("") == []
