"""JSON lines of other tools: SuperBench's monitor and diagnosis, gcm's checks."""

import json
from pathlib import Path

import pytest

from ops.monitors.health_lines import HealthLinesMonitor, HealthLinesReader

FOLDER = Path(__file__).parents[3] / "data" / "health"


@pytest.fixture
def reader():
    return HealthLinesReader("health_lines", "n1")


def lines(name):
    return (FOLDER / name).read_text().splitlines()


def test_the_nodes_that_superbench_calls_defective(reader):
    found = [signal for line in lines("diagnosis_summary.jsonl") for signal in reader.signals(line, 1.0)]
    assert [(s.kind, s.entity.name) for s in found] == [
        ("node_defective", "sb-validation-01"),
        ("node_defective", "sb-validation-03"),
    ]
    assert found[0].text.startswith("KernelLaunch: kernel-launch/event_overhead:0(B/L: 0.0060 VAL: 0.1000")
    assert found[1].text.startswith("FailedTest: mem-bw/D2H_Mem_BW:0_miss")


def test_a_node_without_defects(reader):
    assert reader.signals(json.dumps({"Category": None, "Defective Details": None, "index": "a"}), 1.0) == []


def test_superbenchs_monitor_shows_when_a_gpu_changes(reader):
    told = [
        [(s.entity.name, s.kind, s.value) for s in reader.signals(line, 1.0)]
        for line in lines("monitor.jsonl")
    ]
    assert told == [
        [],
        [],
        [],
        [("index 1", "power_limit_low", 200)],
        [("index 0", "ecc_corrected_volatile", 12), ("index 1", "power_limit_low_cleared", 250)],
    ]


def test_uncorrected_errors_remapped_rows_and_a_gpu_that_is_gone(reader):
    record = json.loads(lines("monitor.jsonl")[0]) | {"gpu_remap_uncorrectable_error:2": 0}
    assert reader.signals(json.dumps(record), 1.0) == []
    record |= {"gpu_uncorrected_ecc:5": 1, "gpu_remap_uncorrectable_error:2": 1}
    record = {key: value for key, value in record.items() if not key.endswith(":7")}
    found = {(s.entity.name, s.kind, s.value) for s in reader.signals(json.dumps(record), 2.0)}
    assert found == {
        ("index 5", "ecc_uncorrected_volatile", 1),
        ("index 2", "remapped_rows_uncorrected", 1),
        ("index 7", "gpu_missing", 7),
    }


def check(result, node="n7", name="check_nvidia_smi_row_remap", text="row remap pending on GPU 3"):
    return json.dumps({"node": node, "health_check": name, "type": "prolog", "result": result, "_msg": text})


def test_gcms_checks_are_told_when_they_turn(reader):
    told = [
        [(s.kind, s.entity.name) for s in reader.signals(check(result), 1.0)]
        for result in (0, 2, 2, 3, 0, 1, 1, 2)
    ]
    assert told == [
        [],
        [("health_check_failed", "n7")],
        [],
        [],
        [("health_check_failed_cleared", "n7")],
        [("health_check_warning", "n7")],
        [],
        [("health_check_warning_cleared", "n7"), ("health_check_failed", "n7")],
    ]
    (other,) = reader.signals(check(2, node="n8"), 1.0)
    assert other.text == "check_nvidia_smi_row_remap: row remap pending on GPU 3"


@pytest.mark.parametrize(
    "line", ["", "no json", "[1]", "{}", '{"time": "x", "cpu_usage": 3.0}', '{"gpu_usage:x": 1}']
)
def test_other_lines_say_nothing(reader, line):
    assert reader.signals(line, 1.0) == []


def test_the_file_is_followed(tmp_path):
    path = tmp_path / "health.jsonl"
    assert not HealthLinesMonitor(path, "n1").is_supported()
    assert HealthLinesMonitor(path, "n1").check(0.0) == []
    path.write_text(check(2) + "\n")
    monitor = HealthLinesMonitor(path, "n1")
    assert monitor.is_supported()
    assert monitor.check(0.0) == []
    with path.open("a") as file:
        file.write(check(2) + "\n")
    assert [s.kind for s in monitor.check(5.0)] == ["health_check_failed"]
    monitor.close()
