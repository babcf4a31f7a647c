"""Reports of `nvidia-smi -q -x` in four schemas, broken in each way that a monitor has to tell."""

from pathlib import Path

import pytest

from ops.monitors.gpu_readings import pci_address, uuid_at
from ops.monitors.nvidia_smi_xml import NvidiaSmiMonitor, parse_report, run_nvidia_smi

FOLDER = Path(__file__).parents[3] / "data" / "nvidia_smi"
A100 = "GPU-513536b6-7d19-9063-b049-1e69664bb298"


def report(name):
    return (FOLDER / f"{name}.xml").read_text()


def reading(name):
    (found,) = parse_report(report(name)).readings
    return found


def test_schema_10_of_a_card_that_reports_little():
    gpu = reading("gtx-1070-ti")
    assert (gpu.uuid, gpu.product) == ("GPU-f9ba66fc-a7f5-94c5-da19-019ef2f9c665", "GeForce GTX 1070 Ti")
    assert dict(gpu.values) == {
        "temperature_c": 39,
        "sm_clock_mhz": 135,
        "utilization_frac": 0,
        "pcie_gen": 1,
        "pcie_width": 16,
        "memory_used_bytes": 42 << 20,
        "memory_size_bytes": 4096 << 20,
        "pstate": 8,
    }


def test_schema_11_with_processes_and_retired_pages():
    gpu = reading("tesla-t4")
    expected = {
        "pcie_gen": 3,
        "pcie_gen_max": 3,
        "pcie_width": 8,
        "pcie_width_max": 16,
        "ecc_uncorrected_volatile": 0,
        "retired_pages_uncorrected": 0,
        "retired_pages_pending": 0,
        "temperature_c": 40,
        "temperature_limit_c": 93,
        "power_w": 26.78,
        "power_limit_w": 70,
        "throttled_hw": 0,
    }
    assert expected.items() <= gpu.values.items()
    assert [(p.pid, p.name, p.used_bytes) for p in gpu.processes] == [(5762, "python", 1005 << 20)]


def test_schema_12_with_mig():
    gpu = reading("a100-sxm4-v12")
    assert (gpu.uuid, gpu.pci_bus_id) == (A100, "00000000:01:00.0")
    expected = {
        "memory_temperature_c": 44,
        "memory_temperature_limit_c": 95,
        "power_w": 67.03,
        "recovery_action": 0,
    }
    assert expected.items() <= gpu.values.items()
    assert gpu.values["reset_required"] == 0
    assert not {"remapped_rows_corrected", "utilization_frac"} & set(gpu.values)


def test_schema_13_gives_a_distance_instead_of_a_limit():
    gpu = reading("rtx-4000-sff-ada-v13")
    expected = {
        "temperature_c": 38,
        "temperature_limit_c": 89,
        "power_w": 8.44,
        "row_remap_failure": 0,
        "pstate": 8,
    }
    assert expected.items() <= gpu.values.items()
    assert not {"ecc_corrected_volatile", "sram_threshold_exceeded", "unrepairable_memory"} & set(gpu.values)


STANDING = {
    "tesla-t4": {"pcie_width_low"},  # As a cloud's virtual machine has it.
    "a10g": {"pcie_width_low"},
    "rtx-3090-v12": {"power_limit_low"},  # Its owner set 200 W of 350 W.
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.xml")), ids=lambda path: path.stem)
def test_real_reports_tell_what_stands_once(path):
    monitor = NvidiaSmiMonitor("n1", path.read_text)
    assert monitor.is_supported()
    assert {signal.kind for signal in monitor.check(0.0)} == STANDING.get(path.stem, set())
    assert monitor.check(1.0) == []


class Tool:
    """The tool of a node with two GPUs, whose report a test changes."""

    def __init__(self):
        first = report("a100-sxm4-v12").replace(">N/A</remapped_rows>", f">{ROWS}</remapped_rows>")
        start, end = first.index("    <gpu id"), first.index("</nvidia_smi_log>")
        gpu = first[start:end]
        second = gpu.replace("01:00.0", "41:00.0").replace(A100, "GPU-second")
        self.head, self.gpus, self.tail = first[:start], [gpu, second], first[end:]
        self.complaint = ""

    def __call__(self):
        return self.complaint + self.head + "".join(self.gpus) + self.tail

    def change(self, old, new, gpu=1):
        assert self.gpus[gpu].count(old) >= 1, old
        self.gpus[gpu] = self.gpus[gpu].replace(old, new, 1)


ROWS = (
    "<remapped_row_corr>0</remapped_row_corr><remapped_row_unc>0</remapped_row_unc>"
    "<remapped_row_pending>No</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>"
)


@pytest.fixture
def tool():
    return Tool()


@pytest.fixture
def monitor(tool):
    monitor = NvidiaSmiMonitor("n1", tool, lambda: (1,))
    assert monitor.check(0.0) == []
    assert len(monitor.readings) == 2
    return monitor


def element(name, value):
    return f"<{name}>{value}</{name}>"


AGGREGATE = (
    "<aggregate>\n                <sram_correctable>0</sram_correctable>\n                "
    "<sram_uncorrectable>{}</sram_uncorrectable>"
)
PROCESS = "<processes><process_info><pid>{}</pid><type>{}</type></process_info></processes>"


@pytest.mark.parametrize(
    ("name", "old", "new", "kind", "value"),
    [
        ("dram_uncorrectable", 0, 3, "ecc_uncorrected_volatile", 3),
        ("dram_correctable", 0, 7, "ecc_corrected_volatile", 7),
        ("remapped_row_unc", 0, 1, "remapped_rows_uncorrected", 1),
        ("remapped_row_pending", "No", "Yes", "row_remap_pending", 1),
        ("remapped_row_failure", "No", "Yes", "row_remap_failure", 1),
        ("reset_required", "No", "Yes", "reset_required", 1),
        ("drain_and_reset_recommended", "No", "Yes", "recovery_action", 4),
        ("clocks_event_reason_hw_thermal_slowdown", "Not Active", "Active", "throttled_hw_thermal", 1),
        ("gpu_temp", "27 C", "90 C", "temperature_high", 90),
        ("memory_temp", "44 C", "96 C", "memory_temperature_high", 96),
        ("current_link_gen", 4, 1, "pcie_gen_low", 1),
        ("current_link_width", "16x", "4x", "pcie_width_low", 4),
        ("replay_counter", 0, 12, "pcie_replays", 12),
        ("current_power_limit", "500.00 W", "300.00 W", "power_limit_low", 300),
    ],
)
def test_each_fault_is_told_once_of_the_right_gpu(tool, monitor, name, old, new, kind, value):
    tool.change(element(name, old), element(name, new))
    (signal,) = monitor.check(1.0)
    assert (signal.kind, signal.value, signal.entity.name) == (kind, value, "GPU-second")
    assert monitor.check(2.0) == []


def test_sram_errors_count_in_both_forms(tool, monitor):
    tool.change(AGGREGATE.format(0), AGGREGATE.format(5))
    assert [s.kind for s in monitor.check(1.0)] == ["ecc_uncorrected_aggregate", "sram_uncorrected_many"]
    text = tool.gpus[1].replace(
        element("sram_uncorrectable", 5),
        element("sram_uncorrectable_parity", 4) + element("sram_uncorrectable_secded", 3),
    )
    tool.gpus[1] = text
    assert [(s.kind, s.value) for s in monitor.check(2.0)] == [("ecc_uncorrected_aggregate", 2)]


def test_processes_of_others(tool, monitor):
    tool.change("<processes />", PROCESS.format(1, "C"))
    assert monitor.check(1.0) == []
    tool.change(PROCESS.format(1, "C"), PROCESS.format(77, "G"))
    assert monitor.check(2.0) == []
    tool.change(PROCESS.format(77, "G"), PROCESS.format(77, "C+G"))
    assert [(s.kind, s.value) for s in monitor.check(3.0)] == [("foreign_process", 77)]


COMPLAINT = (
    "Unable to determine the device handle for GPU0000:41:00.0: GPU is lost.  "
    "Reboot the system to recover this GPU\n"
)


@pytest.mark.parametrize("way", ["complaint and the rest", "complaint alone", "element"])
def test_a_lost_gpu(tool, monitor, way):
    if way == "element":
        tool.change(element("gpu_temp", "27 C"), element("gpu_temp", "GPU is lost"))
        told = monitor.check(1.0)
    elif way == "complaint alone":
        monitor._run = lambda: COMPLAINT
        told = [signal for signal in monitor.check(1.0) if signal.kind == "gpu_lost"]
    else:
        tool.complaint = COMPLAINT
        del tool.gpus[1]
        told = monitor.check(1.0)
    (signal,) = told
    assert (signal.kind, signal.entity.name) == ("gpu_lost", "GPU-second")
    assert signal.text.startswith("GPU is lost")


def test_a_gpu_that_is_no_longer_listed(tool, monitor):
    del tool.gpus[1]
    assert [(s.kind, s.entity.name, s.value) for s in monitor.check(1.0)] == [
        ("gpu_missing", "GPU-second", 1)
    ]


def test_a_tool_that_stops_working_is_told_of_the_node(tool, monitor):
    monitor._run = lambda: "Failed to initialize NVML: Driver/library version mismatch\n"
    (signal,) = monitor.check(1.0)
    assert (signal.kind, str(signal.entity)) == ("nvidia_smi_unusable", "node n1")
    assert "version mismatch" in signal.text
    assert monitor.check(2.0) == []
    monitor._run = tool
    assert [s.kind for s in monitor.check(3.0)] == ["nvidia_smi_unusable_cleared"]


@pytest.mark.parametrize("text", ["", "No devices were found\n", "<nvidia_smi_log><gpu></nvidia_smi_log>"])
def test_what_is_no_report(text):
    with pytest.raises(ValueError, match="report of nvidia-smi"):
        parse_report(text)
    assert not NvidiaSmiMonitor("n1", lambda: text).is_supported()


def test_the_report_of_another_vendor_is_none():
    text = (FOLDER / "mi100_rocm602.json").read_text()
    assert not NvidiaSmiMonitor("n1", lambda: text).is_supported()


def test_no_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not NvidiaSmiMonitor("n1").is_supported()
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho problem >&2\nexec /bin/cat {FOLDER}/a10g.xml\n")
    script.chmod(0o755)
    assert run_nvidia_smi().startswith("problem\n<?xml")
    assert NvidiaSmiMonitor("n1").is_supported()


def test_addresses_of_kernel_and_tool_are_compared():
    assert pci_address("PCI:0000:9B:00") == pci_address("00000000:9b:00.0") == "0000:9b:00"
    assert pci_address("00010000:01:00.0") == "10000:01:00"
    gpus = [reading("a100-sxm4-v12"), reading("tesla-t4")]
    assert uuid_at(gpus, "PCI:0000:01:00") == A100
    assert uuid_at(gpus, "PCI:0000:02:00") is None
