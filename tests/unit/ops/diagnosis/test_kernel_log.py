"""Kernel logs: real ones, every kind of message, what belongs together, and lines that mean nothing."""

from pathlib import Path

import pytest

from ops.diagnosis.kernel_events import KernelLogReader
from ops.diagnosis.kernel_log import classify_kernel_line, diagnose_kernel_log, kernel_signals
from ops.diagnosis.kernel_patterns import kernel_patterns
from ops.diagnosis.verdict import Role
from ops.incident import FailureClass as Class
from ops.signal import Entity, EntityKind

DATA = Path(__file__).parents[3] / "data/kernel_logs"
MESSAGES = [line.split("\t") for line in (DATA / "messages.tsv").read_text().splitlines() if line[0] != "#"]
OUT, RANKS, NOTE = "RESTART_WITHOUT_NODE", "RESTART_RANKS", "OBSERVE"


def xid(code, rest="", at=1.0, pci="0000:18:00"):
    return f"[{at:12.6f}] NVRM: Xid (PCI:{pci}): {code}, pid='<unknown>', name=<unknown>, {rest}"


def patterns_of(verdicts):
    return [v.pattern for v in verdicts]


@pytest.mark.parametrize(
    ("name", "pattern", "failure_class", "action", "culprit"),
    [
        (
            "dmesg_xid119_gsp.log",
            "xid_119",
            Class.GPU_HARDWARE,
            OUT,
            "gpu GPU-509665ad-b600",
        ),
        ("dmesg_xid31_48_gcm.log", "xid_48", Class.GPU_HARDWARE, OUT, "gpu 000d:00:00"),
        ("dmesg_oom.log", "oom_kill", Class.HOST_OUT_OF_MEMORY, RANKS, "node n1"),
        ("dmesg_nvme_io_error_gcm.log", "block_io_error", Class.STORAGE, OUT, "storage nvme2n1"),
        ("dmesg_nccl_segfault.log", "segfault_gpu_library", Class.USER_CODE, RANKS, "node n1"),
        ("dmesg_os.log", "file_limit", Class.ENVIRONMENT, "PAGE", "node n1"),
        ("fabricmanager.log", "sxid_12028", Class.GPU_HARDWARE, OUT, "link 0000:86:00"),
        ("kmsg_2_peermem.log", "peermem", Class.NETWORK, NOTE, "node n1"),
        ("pstore_erst.txt", "kernel_bug", Class.NODE_LOST, OUT, "node n1"),
    ],
)
def test_real_logs(name, pattern, failure_class, action, culprit):
    first = diagnose_kernel_log((DATA / name).read_text().splitlines(), node="n1")[0]
    assert (first.pattern, first.failure_class, first.action) == (pattern, failure_class, action)
    assert str(first.culprit).startswith(culprit)
    assert "n1" in str(first.culprit)
    assert first.evidence.split(" (")[0] in (DATA / name).read_text()


def test_a_real_log_of_a_healthy_node_names_no_fault():
    verdicts = diagnose_kernel_log((DATA / "kmsg_1.log").read_text().splitlines(), node="n1")
    assert {v.role for v in verdicts} <= {Role.BENIGN}


def test_a_memory_kill_outranks_an_ambiguous_xid_of_hours_before():
    verdicts = diagnose_kernel_log((DATA / "dmesg_oom.log").read_text().splitlines())
    assert verdicts[0].failure_class is Class.HOST_OUT_OF_MEMORY
    by_pattern = {v.pattern: v for v in verdicts}
    assert by_pattern["xid_13"].role is Role.AMBIGUOUS
    assert by_pattern["xid_43"].role is Role.CASCADE
    assert "httpd[123]" in by_pattern["oom_kill"].evidence


@pytest.mark.parametrize(("pattern", "action", "culprit", "text"), [m for m in MESSAGES if m[0] != "benign"])
def test_each_kind_of_message(pattern, action, culprit, text):
    verdict = classify_kernel_line(f"[  12.345678] {text}", "n1")
    assert (verdict.pattern, verdict.action) == (pattern, action)
    assert str(verdict.culprit).startswith(culprit)
    assert verdict.role is not Role.BENIGN


@pytest.mark.parametrize("text", [m[3] for m in MESSAGES if m[0] == "benign"])
def test_what_looks_bad_and_is_not(text):
    verdict = classify_kernel_line(text)
    assert (verdict.failure_class, verdict.role, verdict.action) == (Class.BENIGN, Role.BENIGN, NOTE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "containerBoxID Xid 79 seen",
        "# handles Xid (PCI:0000:18:00): 79, see the manual",
        "NVRM: GPU Board Serial Number: 1650124014249",
        "NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d",
        "NVRM: A GPU crash dump has been created. If possible, please run",
        "nvidia-nvswitch0: SXid (PCI:0000:ba:00.0): 22013, Severity 0 Engine instance 27",
        "nvidia-nvswitch0: SXid (PCI:0000:ba:00.0): 22013, Data {0x00000001, 0x00000001}",
        "EXT4-fs (nvme0n1p1): mounted filesystem with ordered data mode",
        "XFS (nvme0n1): Ending clean mount",
        "mlx5_core 0000:5c:00.0: Port module event: module 0, Cable plugged",
        "perf: interrupt took too long (2509 > 2500), lowering",
        'audit: type=1400 audit(1): profile="oom-kill" name="Xid"',
        "systemd[1]: Started Network Manager link down helper",
        "step 12 loss nan-safe timeout=600 oom=false",
    ],
)
def test_lines_that_mean_nothing(text):
    assert classify_kernel_line(text) is None


def test_one_fault_told_by_many_lines_is_one_verdict():
    lines = [
        "[1.0] NVRM: GPU at PCI:0000:a1:00: GPU-1",
        xid(79, "GPU has fallen off the bus.", pci="0000:a1:00"),
        "[1.0] NVRM: GPU 0000:a1:00.0: GPU has fallen off the bus.",
        "[1.0] NVRM: A GPU crash dump has been created. If possible, please run",
    ]
    (verdict,) = diagnose_kernel_log(lines, node="n1")
    assert verdict.culprit == Entity(EntityKind.GPU, "GPU-1", "n1")


def test_xid_45_follows_another_within_a_minute_and_is_ambiguous_alone():
    together = diagnose_kernel_log([xid(45, at=100), xid(95, at=130)])
    assert [(v.pattern, v.role) for v in together] == [("xid_95", Role.ROOT), ("xid_45", Role.CASCADE)]
    apart = diagnose_kernel_log([xid(45, at=100), xid(95, at=200)])
    assert [(v.pattern, v.role) for v in apart] == [("xid_95", Role.ROOT), ("xid_45", Role.AMBIGUOUS)]


def test_an_ambiguous_xid_beside_broken_hardware_is_a_cascade_on_that_gpu_only():
    lines = [xid(31, at=100), xid(48, at=101), xid(13, at=100, pci="0000:19:00")]
    verdicts = {v.pattern: v for v in diagnose_kernel_log(lines)}
    assert verdicts["xid_31"].role is Role.CASCADE
    assert verdicts["xid_13"].role is Role.AMBIGUOUS


def test_an_ambiguous_xid_on_several_gpus_follows_the_program():
    verdicts = diagnose_kernel_log([xid(109, pci=f"0000:{i:02x}:00") for i in range(3)])
    assert {(v.failure_class, v.action) for v in verdicts} == {(Class.USER_CODE, RANKS)}
    alone = diagnose_kernel_log([xid(109)])[0]
    assert (alone.failure_class, alone.action) == (Class.GPU_HARDWARE, OUT)


def test_xid_154_counts_once_a_node_and_says_what_to_do():
    text = "GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)"
    lines = [xid(74, at=10)] + [xid(154, text, at=11, pci=f"0000:{16 + i:02x}:00") for i in range(16)]
    verdicts = diagnose_kernel_log(lines, node="n1")
    assert patterns_of(verdicts) == ["xid_74", "xid_154"]
    assert verdicts[0].action == "RESTART"
    assert "Drain P2P" in verdicts[0].advice
    assert verdicts[1].culprit == Entity(EntityKind.NODE, "n1", "n1")
    assert verdicts[1].role is Role.CONFIRMATION


def test_an_nvlink_line_that_waits_for_xid_154_does_what_that_says():
    line = xid(145, "RLW_REMAP Nonfatal XC0 i0 Link 3 (0x00000082 0x00000004)")
    assert diagnose_kernel_log([line])[0].action == RANKS
    said = xid(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    assert {v.pattern: v.action for v in diagnose_kernel_log([line, said])}["xid_145"] == OUT


def test_xid_74_beside_an_sxid_is_the_switches():
    switch = "[ 100.5] nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63 LTSSM Fault Up"
    together = diagnose_kernel_log([xid(74, at=100), switch])
    assert [(v.pattern, v.role) for v in together] == [("sxid_20034", Role.ROOT), ("xid_74", Role.CASCADE)]
    apart = diagnose_kernel_log([xid(74, at=300), switch])
    assert {(v.pattern, v.role) for v in apart} == {("sxid_20034", Role.ROOT), ("xid_74", Role.ROOT)}


def test_repeated_row_remaps_call_for_a_diagnosis_and_a_burst_does_not():
    burst = diagnose_kernel_log([xid(63, at=10 + i) for i in range(9)])[0]
    assert (burst.role, burst.action) == (Role.BENIGN, NOTE)
    repeated = diagnose_kernel_log([xid(63, at=1000 * i) for i in range(3)])[0]
    assert (repeated.failure_class, repeated.action) == (Class.GPU_HARDWARE, OUT)
    on_three_gpus = diagnose_kernel_log([xid(63, at=1000 * i, pci=f"0000:{i:02x}:00") for i in range(3)])
    assert {v.role for v in on_three_gpus} == {Role.BENIGN}


def test_one_flap_is_tolerated_and_two_in_five_minutes_are_not():
    def down(*times):
        return diagnose_kernel_log([f"[{t:.6f}] mlx5_core 0000:5c:00.0 ens1: Link down" for t in times])[
            0
        ].action

    assert down(10.0) == down(10.0, 10.0) == down(10.0, 900.0) == "RESTART"
    assert down(10.0, 200.0) == OUT


def test_victims_get_the_name_of_their_rank():
    line = "[1.0] Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB"
    ours = diagnose_kernel_log([line], node="n1", ranks_by_pid={77: 3})[0]
    assert ours.culprit == Entity(EntityKind.RANK, "3", "n1")
    foreign = diagnose_kernel_log([line], node="n1", ranks_by_pid={78: 3})[0]
    assert foreign.confidence < 0.5
    assert foreign.culprit == Entity(EntityKind.NODE, "n1", "n1")


def test_the_reaper_of_a_victim_is_no_second_kill():
    lines = [
        "[1.0] Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB",
        "[1.1] oom_reaper: reaped process 77 (python), now anon-rss:0kB",
    ]
    assert patterns_of(diagnose_kernel_log(lines)) == ["oom_kill_cgroup"]


def test_signals_carry_code_time_and_host():
    lines = [
        "2025-02-23T16:24:18+0000 node017 kernel: NVRM: Xid (PCI:0000:9b:00): 119, pid=7, name=a b, Timeout",
        "[12.5] I/O error, dev sda, sector 1",
        "nothing",
    ]
    xid_signal, disk = kernel_signals(lines, now=2e9)
    assert (xid_signal.kind, xid_signal.value, xid_signal.at) == ("xid", 119.0, 1740327858.0)
    assert xid_signal.entity == Entity(EntityKind.GPU, "0000:9b:00", "node017")
    assert (disk.kind, disk.value, disk.at) == ("block_io_error", None, 2e9)
    assert (xid_signal.text, disk.text) == (lines[0], lines[1])


def test_pid_and_name_of_an_xid():
    event = KernelLogReader().read(
        "NVRM: Xid (PCI:0000:9b:00): 43, pid=2924364, name=my trainer, Ch 00000008"
    )
    assert (event.pid, event.process) == (2924364, "my trainer")
    event = KernelLogReader().read(xid(79, "GPU has fallen off the bus."))
    assert (event.pid, event.process) == (None, "")


def test_rows_say_where_they_are_from_and_what_they_need():
    for row in kernel_patterns():
        assert row.source
        assert row.needs
        assert 0 < row.confidence <= 0.95
