"""Texts of real failures: the class right or unknown, never wrong; the root found among its victims."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.diagnosis.evidence import classify_line, diagnose_log
from ops.diagnosis.verdict import Role, Verdict

DATA = Path(__file__).parents[3] / "data" / "classifier"
CASE_CLASSES = {
    "application": "user_code",
    "software": "user_code",
    "collective_timeout": "hang",
    "host_shared_memory": "host_out_of_memory",
    "warning_hardware": "benign",
}
LABEL_CLASSES = {
    "hardware-GPU": {"gpu_hardware"},
    "software-user-bug": {"user_code", "configuration"},
    "OOM-GPU": {"gpu_out_of_memory"},
    "OOM-host": {"host_out_of_memory"},
    "transient-infra": {"node_lost", "worker_killed", "unknown"},
}


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def diagnosed(text: str) -> Verdict:
    return diagnose_log(text.split("\n"))


def expected_of_line(row: dict[str, Any]) -> set[str]:
    if row["role"] == "benign":
        return {"benign"}
    classes = LABEL_CLASSES.get(row["label"], {row["label"]})
    return classes | {"unknown"} if row["role"] == "ambiguous" else classes


LINES = rows("failure_lines.jsonl")
OWN = rows("own_lines.jsonl")


def test_cases_are_right_or_unknown() -> None:
    told = {
        case["id"]: (CASE_CLASSES.get(case["expect_class"], case["expect_class"]), diagnosed(case["text"]))
        for case in rows("cases.jsonl")
    }
    wrong = {i: (e, v) for i, (e, v) in told.items() if v.failure_class not in (e, "unknown")}
    assert not wrong
    right = sum(verdict.failure_class == expected for expected, verdict in told.values())
    assert right >= 32, "of 33: one has its telling line cut off"


@pytest.mark.parametrize("row", LINES, ids=lambda row: row["text"][:40])
def test_failure_lines(row: dict[str, Any]) -> None:
    verdict = diagnosed(row["text"])
    assert verdict.failure_class in expected_of_line(row)
    if row["role"] == "cascade_candidate":
        assert verdict.role is Role.CASCADE
    if row["role"] in ("ambiguous", "cascade_candidate"):
        assert verdict.confidence < 0.5, "nothing is to be done on the strength of this alone"
    if row["role"] == "root_candidate":
        assert verdict.confidence > 0.5


@pytest.mark.parametrize("row", OWN, ids=lambda row: row["text"][:40])
def test_lines_of_our_own(row: dict[str, Any]) -> None:
    assert diagnosed(row["text"]).failure_class in row["classes"]


NEGATIVE = (DATA / "negative_lines.txt").read_text().splitlines()


@pytest.mark.parametrize("line", NEGATIVE)
def test_what_only_looks_like_a_failure_is_none(line: str) -> None:
    verdict = classify_line(line)
    assert verdict.failure_class in ("unknown", "benign")
    assert verdict.role is not Role.ROOT


def test_a_healthy_log_is_nothing() -> None:
    healthy = [line for line in NEGATIVE if "simulated" not in line]
    assert diagnose_log(healthy).confidence == 0.0


# -- composed logs -----------------------------------------------------------------------------------------

ADVICE = [
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high "
    "memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or "
    "other unexpected errors.",
]
RAY_DEATH = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: RayTrainWorker\n\tip: 10.0.0.3\nThe actor is dead because its worker process has died. "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error "
    "code 2. End of file. " + ADVICE[1]
)
CASCADES = [row["text"] for row in LINES if row["role"] == "cascade_candidate"] + [
    RAY_DEATH,
    "[rank2]:[E ProcessGroupNCCL.cpp:577] [Rank 2] Some NCCL operations have failed or timed out. Due to the "
    "asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.",
    "[rank2]:[E ProcessGroupNCCL.cpp:583] [Rank 2] To avoid data inconsistency, we are taking the entire "
    "process down.",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "srun: error: node7: task 3: Exited with exit code 1",
]
VICTIMS_OF_ANY_ROOT = [
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=4, "
    "NumelOut=4, Timeout(ms)=8000) ran for 8097 milliseconds before timing out.",
    "NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, opcode 0",
]
BYSTANDERS = [
    *NEGATIVE[:20],
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
]
YIELDING = ("hang", "network")
ROOTS = [row for row in LINES if row["role"] in ("root_candidate", "cause_confirmation")]


@settings(max_examples=60, deadline=None)
@given(root=st.sampled_from(ROOTS), seed=st.integers(0, 2**32))
def test_the_root_is_found_whatever_the_order(root: dict[str, Any], seed: int) -> None:
    dice = random.Random(seed)
    blocks = [root["text"], *dice.sample(CASCADES, 5), *ADVICE, *dice.sample(BYSTANDERS, 8)]
    if root["label"] not in YIELDING:
        blocks += VICTIMS_OF_ANY_ROOT
    dice.shuffle(blocks)
    verdict = diagnose_log("\n".join(blocks).split("\n"))
    assert verdict.failure_class in expected_of_line(root)
    assert (
        verdict.evidence.split(" (")[0].strip()[:60] in root["text"].replace("\t", "")
        or verdict.evidence in root["text"]
    )
    if verdict.failure_class != "unknown":
        assert verdict.role is Role.ROOT


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_confirmation_that_comes_last_names_what_was_ambiguous(seed: int) -> None:
    dice = random.Random(seed)
    confirmation = dice.choice([row["text"] for row in LINES if row["role"] == "cause_confirmation"])
    killed = [
        "exitcode  : -9 (pid: 28474)  (SIGKILL)\ntraceback : Signal 9 (SIGKILL) received by PID 28474",
        "RuntimeError: DataLoader worker (pid 715) is killed by signal: Killed.",
    ]
    blocks = [dice.choice(killed), *dice.sample(CASCADES, 4), *VICTIMS_OF_ANY_ROOT]
    dice.shuffle(blocks)
    verdict = diagnose_log("\n".join([*blocks, confirmation]).split("\n"))
    assert verdict.failure_class == "host_out_of_memory"
    assert verdict.role is Role.ROOT
    assert verdict.confidence >= 0.9


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_victims_alone_are_never_a_root(seed: int) -> None:
    dice = random.Random(seed)
    blocks = dice.sample(CASCADES, 6) + ADVICE
    dice.shuffle(blocks)
    verdict = diagnose_log("\n".join(blocks).split("\n"))
    assert verdict.role in (Role.CASCADE, Role.AMBIGUOUS)
    assert verdict.confidence < 0.5


def test_rays_death_text_and_advice_are_never_a_cause() -> None:
    assert diagnosed(RAY_DEATH).failure_class == "unknown"
    for text in ADVICE:
        assert diagnosed(text).failure_class == "unknown"
    after = diagnosed(
        "(raylet) /tmp/ray/session_1 is over 95% full, available space: 2 GB; capacity: 70 GB.\n" + RAY_DEATH
    )
    assert after.failure_class == "storage"
    assert str(after.culprit) == "storage /tmp/ray/session_1"


# -- order, window, culprits -------------------------------------------------------------------------------


def test_the_first_of_equal_roots_wins_by_the_clock_if_there_is_one() -> None:
    late = "2026-01-02 10:00:05,000 ERROR train.py:9 -- KeyError: 'b'"
    early = (
        "2026-01-02 10:00:01,000 ERROR load.py:3 -- OSError: [Errno 28] No space left on device: '/ckpt/a'"
    )
    assert diagnose_log([late, early]).failure_class == "storage"
    assert diagnose_log(["KeyError: 'b'", early]).failure_class == "user_code"


def test_what_training_survived_is_no_cause() -> None:
    steps = [f"step {n} | loss: 2.{n} | grad norm 0.9" for n in range(20)]
    survived = "OSError: [Errno 28] No space left on device: '/ckpt/step-3'"
    fatal = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB"
    log = [*steps[:5], survived, *steps[5:], fatal, RAY_DEATH]
    assert diagnose_log(log).failure_class == "gpu_out_of_memory"
    assert diagnose_log([*log[:-2], RAY_DEATH]).failure_class == "storage", "nothing else explains the death"


def test_the_line_that_ends_a_traceback_counts_and_the_source_in_it_does_not() -> None:
    log = """\
Traceback (most recent call last):
  File "/app/train.py", line 7, in main
    raise KeyError("CUDA out of memory. Tried to allocate")
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: batch 7 has no labels"""
    verdict = diagnosed(log)
    assert verdict.failure_class == "user_code"
    assert verdict.evidence == "ValueError: batch 7 has no labels"


def test_an_exception_out_of_a_tracker_is_the_trackers() -> None:
    log = """\
Traceback (most recent call last):
  File "/app/train.py", line 7, in main
  File "/opt/site-packages/mlflow/tracking/client.py", line 99, in log_batch
  File "/opt/site-packages/requests/adapters.py", line 501, in send
requests.exceptions.ReadTimeout: read timed out"""
    assert diagnosed(log).failure_class == "tracking"


@pytest.mark.parametrize(
    ("line", "culprit"),
    [
        ("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB", "rank 3"),
        ("     [1] finished collective #2, but didn't join collective #3 (count from 1)", "rank 1"),
        ("(TrainWorker pid=5, ip=10.0.0.7) KeyError: 'x'", "unknown"),
        ("(TrainWorker pid=5, ip=10.0.0.7) MemoryError", "node 10.0.0.7"),
        ("OSError: [Errno 5] Input/output error: '/mnt/a/b'", "storage /mnt/a/b"),
        (
            "The node with node id: 3f and address: 10.0.0.4 and node name: x has been marked dead",
            "node 10.0.0.4",
        ),
        ("NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.", "gpu 0000:18:00"),
        ("train.py: error: unrecognized arguments: --lrr 3", "job"),
    ],
)
def test_culprits(line: str, culprit: str) -> None:
    assert str(classify_line(line).culprit).strip() == culprit


def test_a_segfault_once_is_ambiguous_and_twice_at_one_place_is_the_software() -> None:
    line = (
        "python[{}]: segfault at 7f ip 00007f7c7ac69996 sp 00007f7c error 4 in libnccl.so.2[7f7c7ac00000+d3]"
    )
    once = diagnose_log([line.format(7)])
    twice = diagnose_log([line.format(7), line.format(8)])
    assert (once.failure_class, once.role) == ("worker_killed", Role.AMBIGUOUS)
    assert (twice.failure_class, twice.role) == ("user_code", Role.ROOT)


def test_an_xid_in_a_ranks_log_outweighs_what_the_rank_saw() -> None:
    log = [
        "terminate called after throwing an instance of 'c10::CUDAError'",
        "  what():  CUDA error: unknown error",
        "kernel: NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', GPU has fallen off the bus.",
    ]
    assert diagnose_log(log).failure_class == "gpu_hardware"


def test_exceptions_that_say_little_take_their_class_from_where_they_were_raised() -> None:
    def ends_in(file: str, function: str, error: str) -> Verdict:
        return diagnosed(
            f'Traceback (most recent call last):\n  File "/app/train.py", line 3, in main\n'
            f'    go()\n  File "{file}", line 7, in {function}\n    step()\n{error}'
        )

    packages = "/usr/lib/python3.11/site-packages"
    error = "RuntimeError: it went wrong"
    assert ends_in("/app/model.py", "forward", error).failure_class == "user_code"
    assert ends_in(f"{packages}/lib/thing.py", "run", error).failure_class == "unknown"
    assert (
        ends_in(f"{packages}/torch/serialization.py", "load", "EOFError").failure_class
        == "corrupt_checkpoint"
    )
    assert ends_in(f"{packages}/wandb/sdk/run.py", "log", error).failure_class == "tracking"
    assert diagnosed(error).failure_class == "unknown"
