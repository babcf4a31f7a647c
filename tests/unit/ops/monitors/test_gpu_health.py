"""NVML through the real binding, against a library that is told what to report."""

import ctypes
import os
import subprocess
import sys

import pynvml
import pytest

from ops.monitors.gpu_health import GpuHealthMonitor
from tests.support.fake_nvml import FakeNvml, build

OURS = (100, 101)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(library, tmp_path, monkeypatch):
    """The binding holds the fake one for this test only: others in this process may ask for the real one."""
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(pynvml, "nvmlLib", loaded)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    fake = FakeNvml(tmp_path / "answers", {})
    loaded.fake_nvml_answers(str(fake.path).encode())
    fake.plug(2)
    return fake


@pytest.fixture
def monitor(nvml):
    monitor = GpuHealthMonitor("n1", lambda: OURS)
    assert monitor.is_supported()
    assert monitor.check(0.0) == []
    yield monitor
    monitor.close()


def told(monitor, now=1.0):
    return [(s.entity.name, s.kind, s.value) for s in monitor.check(now)]


def test_a_healthy_node_says_nothing_and_its_readings_are_there(monitor):
    assert told(monitor) == []
    first, second = monitor.readings
    assert (first.uuid, first.pci_bus_id, first.product) == (
        "GPU-0",
        "00000000:01:00.0",
        "NVIDIA H100 80GB HBM3",
    )
    assert second.uuid == "GPU-1"
    expected = {
        "temperature_c": 55,
        "power_w": 612,
        "power_limit_w": 700,
        "sm_clock_mhz": 1755,
        "pcie_width": 16,
    }
    assert expected.items() <= first.values.items()
    assert first.values["ecc_corrected_volatile"] == 12
    assert first.values["nvlink_crc_errors/0"] == 1
    assert [(p.pid, p.used_bytes) for p in first.processes] == [(100, 1_000_000), (101, 2_000_000)]


@pytest.mark.parametrize(
    ("change", "kind", "value"),
    [
        ({"ecc/0/0": 20}, "ecc_corrected_volatile", 8),
        ({"ecc/0/1": 41}, "ecc_corrected_aggregate", 1),
        ({"ecc/1/0": 2}, "ecc_uncorrected_volatile", 2),
        ({"ecc/1/1": 2}, "ecc_uncorrected_aggregate", 1),
        ({"ecc/1/1/7": 5}, "sram_uncorrected_many", 5),
        ({"remapped_rows": "0 2 0 0"}, "remapped_rows_uncorrected", 1),
        ({"remapped_rows": "1 1 0 0"}, "remapped_rows_corrected", 1),
        ({"remapped_rows": "0 1 1 0"}, "row_remap_pending", 1),
        ({"remapped_rows": "0 1 0 1"}, "row_remap_failure", 1),
        ({"retired_pages_pending": 1}, "retired_pages_pending", 1),
        ({"clocks_event_reasons": 0x8}, "throttled_hw", 1),
        ({"clocks_event_reasons": 0x20}, "throttled_sw_thermal", 1),
        ({"clocks_event_reasons": 0x40}, "throttled_hw_thermal", 1),
        ({"clocks_event_reasons": 0x84}, "throttled_power_brake", 1),
        ({"temperature/0": 93}, "temperature_high", 93),
        ({"power_limit_mw": 400_000}, "power_limit_low", 400),
        ({"pcie_gen": 3}, "pcie_gen_low", 3),
        ({"pcie_width": 8}, "pcie_width_low", 8),
        ({"pcie_replays": 10}, "pcie_replays", 7),
        ({"field/180/0": 1}, "pcie_fatal_errors", 1),
        ({"nvlink_active/1": 0}, "nvlink_down", 1),
        ({"nvlink_errors/0/0": 9}, "nvlink_replays", 4),
        ({"nvlink_errors/0/1": 1}, "nvlink_recoveries", 1),
        ({"nvlink_errors/0/3": 2}, "nvlink_crc_errors", 2),
        ({"field/230/0": 2}, "recovery_action", 2),
        ({"processes": "100 1 666 5000"}, "foreign_process", 666),
        ({"error.nvmlDeviceGetPcieReplayCounter": 16}, "reset_required", 1),
    ],
)
def test_each_fault_is_told_once_of_the_right_gpu(nvml, monitor, change, kind, value):
    nvml.put({f"1.{key}": answer for key, answer in change.items()})
    assert told(monitor) == [("GPU-1", kind, value)]
    assert told(monitor) == []


@pytest.mark.parametrize(
    ("bad", "good", "kind"),
    [
        ({"clocks_event_reasons": 0x48}, {"clocks_event_reasons": 0}, "throttled_hw_thermal"),
        ({"pcie_width": 4}, {"pcie_width": 16}, "pcie_width_low"),
        ({"nvlink_active/0": 0}, {"nvlink_active/0": 1}, "nvlink_down"),
        ({"processes": "9 9"}, {"processes": ""}, "foreign_process"),
        ({"field/230/0": 1}, {"field/230/0": 0}, "recovery_action"),
    ],
)
def test_what_is_in_order_again_is_told(nvml, monitor, bad, good, kind):
    nvml.put({f"0.{key}": answer for key, answer in bad.items()})
    assert ("GPU-0", kind) in [signal[:2] for signal in told(monitor)]
    nvml.put({f"0.{key}": answer for key, answer in good.items()})
    assert ("GPU-0", f"{kind}_cleared") in [signal[:2] for signal in told(monitor)]
    assert told(monitor) == []


def test_standing_faults_are_told_at_the_first_check_and_old_counts_are_not(nvml):
    nvml.put({"0.remapped_rows": "0 12 1 1", "0.ecc/1/1": 99, "0.nvlink_active/0": 0})
    monitor = GpuHealthMonitor("n1")
    kinds = [signal[1] for signal in told(monitor)]
    assert sorted(kinds) == ["remapped_rows_many", "row_remap_failure", "row_remap_pending"]
    monitor.close()


def test_pages_that_older_gpus_retire(nvml):
    nvml.put({"0.retired_pages/0": 1, "0.retired_pages/1": 0, "0.retired_pages_pending": 0})
    monitor = GpuHealthMonitor("n1")
    assert told(monitor) == []
    nvml.put({"0.retired_pages/1": 30})
    assert told(monitor) == [("GPU-0", "retired_pages_uncorrected", 30)]
    monitor.close()


def test_nvlink_5_counts_in_fields(nvml):
    nvml.put({f"0.nvlink_errors/0/{counter}": None for counter in range(4)})
    nvml.put({"0.field/214/0": "big 0", "0.field/208/1": f"big {1 << 40}"})
    monitor = GpuHealthMonitor("n1")
    assert told(monitor) == []
    nvml.put({"0.field/214/0": "big 1", "0.field/208/1": f"big {(1 << 40) + 6}"})
    (failed, errors) = monitor.check(2.0)
    assert (failed.kind, failed.value) == ("nvlink_failed_recoveries", 1)
    assert (errors.kind, errors.value) == ("nvlink_receive_errors", 6)
    assert "link 1" in errors.text
    monitor.close()


def test_a_gpu_that_tells_only_how_far_its_limit_is(nvml):
    nvml.put({"0.temperature_threshold/1": None, "0.temperature_margin": 30})
    monitor = GpuHealthMonitor("n1")
    assert told(monitor) == []
    assert monitor.readings[0].values["temperature_limit_c"] == 85
    nvml.put({"0.temperature/0": 85, "0.temperature_margin": 0})
    assert told(monitor) == [("GPU-0", "temperature_high", 85)]
    monitor.close()


def test_a_link_that_idles_is_not_slow_and_a_hot_gpu_has_to_cool_down(nvml, monitor):
    nvml.put({"0.pstate": 8, "0.pcie_gen": 1})
    assert told(monitor) == []
    nvml.put({"0.temperature/0": 92})
    assert told(monitor) == [("GPU-0", "temperature_high", 92)]
    for celsius in (91, 92, 90):
        nvml.put({"0.temperature/0": celsius})
        assert told(monitor) == []
    nvml.put({"0.temperature/0": 88})
    assert told(monitor) == [("GPU-0", "temperature_high_cleared", 88)]


@pytest.mark.parametrize("where", ["*", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetRemappedRows"])
def test_a_lost_gpu_is_told_once_by_its_uuid(nvml, monitor, where):
    nvml.put({f"1.error.{where}": 15})
    (signal,) = monitor.check(5.0)
    assert (signal.kind, str(signal.entity), signal.text) == (
        "gpu_lost",
        "gpu GPU-1 (node n1)",
        "GPU is lost",
    )
    assert told(monitor) == []
    assert [reading.uuid for reading in monitor.readings] == ["GPU-0"]
    nvml.put({f"1.error.{where}": None})
    assert told(monitor) == [("GPU-1", "gpu_lost_cleared", None)]


def test_a_gpu_lost_from_the_start_has_only_its_index(nvml):
    nvml.put({"1.error.*": 15})
    monitor = GpuHealthMonitor("n1")
    assert told(monitor) == [("index 1", "gpu_lost", None)]
    nvml.put({"1.error.*": None})
    assert told(monitor) == []
    nvml.put({"1.error.*": 15})
    assert told(monitor) == [("GPU-1", "gpu_lost", None)]
    monitor.close()


@pytest.mark.parametrize("code", [10, 999])
def test_a_gpu_that_answers_nothing_is_unreachable(nvml, monitor, code):
    nvml.put({"0.error.*": code})
    assert told(monitor) == [("GPU-0", "gpu_unreachable", None)]
    assert told(monitor) == []


def test_fewer_gpus_than_at_the_start(nvml, monitor):
    nvml.put({"gpus": 1})
    assert told(monitor) == [("GPU-1", "gpu_missing", 1)]
    assert told(monitor) == []


def test_fewer_gpus_than_the_node_should_have(nvml):
    monitor = GpuHealthMonitor("n1", n_expected=8)
    (signal,) = monitor.check(0.0)
    assert (signal.kind, signal.value, str(signal.entity)) == ("gpu_count_low", 2, "node n1")
    assert monitor.check(1.0) == []
    monitor.close()


def test_unsupported_fields_are_no_fault(nvml):
    """A consumer card: no ECC, no remapping, no NVLink; an old driver without newer functions."""
    nvml.answers.clear()
    nvml.put({"gpus": 1, "0.uuid": "GPU-0", "0.temperature_old/0": 60, "0.temperature_threshold/1": 90})
    monitor = GpuHealthMonitor("n1", lambda: ())
    assert monitor.is_supported()
    assert told(monitor) == []
    assert monitor.readings[0].values["temperature_c"] == 60
    nvml.put({"0.temperature_old/0": 95, "0.clocks_throttle_reasons": 0x40})
    assert sorted(signal[1] for signal in told(monitor)) == ["temperature_high", "throttled_hw_thermal"]
    monitor.close()


def test_a_gpu_of_others_is_not_ours_to_see(nvml):
    nvml.put({"1.error.nvmlDeviceGetHandleByIndex_v2": 4})
    monitor = GpuHealthMonitor("n1")
    assert told(monitor) == []
    assert len(monitor.readings) == 1
    monitor.close()


@pytest.mark.parametrize(("code", "supported"), [(9, False), (4, False), (18, True), (999, True)])
def test_a_driver_that_is_missing_is_no_fault_and_one_that_refuses_is(nvml, code, supported):
    nvml.put({"init": code})
    monitor = GpuHealthMonitor("n1")
    assert monitor.is_supported() == supported
    (signal,) = monitor.check(0.0)
    assert (signal.kind, str(signal.entity)) == ("nvml_unusable", "node n1")
    assert monitor.check(1.0) == []
    nvml.put({"init": 0})
    assert [s.kind for s in monitor.check(2.0)] == ["nvml_unusable_cleared"]
    monitor.close()


def test_a_driver_that_is_reloaded_under_us(nvml, monitor):
    pynvml.nvmlShutdown()
    assert [signal[1] for signal in told(monitor)] == ["nvml_unusable"]
    assert [signal[1] for signal in told(monitor)] == ["nvml_unusable_cleared"]


def test_no_gpu(nvml):
    nvml.put({"gpus": 0})
    monitor = GpuHealthMonitor("n1")
    assert not monitor.is_supported()
    assert monitor.check(0.0) == []
    monitor.close()


def test_the_binding_finds_the_library_by_its_name(library, nvml):
    code = (
        "from ops.monitors.gpu_health import GpuHealthMonitor\n"
        "monitor = GpuHealthMonitor('n1')\n"
        "assert monitor.is_supported() and monitor.check(0.0) == []\n"
        "print([reading.uuid for reading in monitor.readings])\n"
    )
    places = {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_ANSWERS": str(nvml.path)}
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=30, capture_output=True, env=os.environ | places
    )
    assert run.stdout.decode().strip() == "['GPU-0', 'GPU-1']"


def test_no_library():
    """In a process that has not loaded the fake one. On a machine with a GPU the real one answers."""
    code = (
        "import ctypes\n"
        "from ops.monitors.gpu_health import GpuHealthMonitor\n"
        "try:\n    ctypes.CDLL('libnvidia-ml.so.1'); is_there = True\n"
        "except OSError:\n    is_there = False\n"
        "monitor = GpuHealthMonitor('n1')\n"
        "assert is_there or not monitor.is_supported()\n"
        "assert is_there or [s.kind for s in monitor.check(0.0)] == ['nvml_unusable']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.gpu
def test_the_real_library_on_a_healthy_gpu():
    code = (
        "from ops.monitors.gpu_health import GpuHealthMonitor\n"
        "monitor = GpuHealthMonitor('n1')\n"
        "assert monitor.is_supported()\n"
        "first = {s.kind for s in monitor.check(0.0)}\n"
        "assert not first & {'gpu_lost', 'gpu_unreachable', 'gpu_missing', 'row_remap_failure'}, first\n"
        "reading = monitor.readings[0]\n"
        "assert reading.uuid.startswith('GPU-') and reading.pci_bus_id\n"
        "assert reading.values['temperature_c'] > 0\n"
        "assert reading.values['pcie_gen_max'] >= 1\n"
        "print(reading)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
