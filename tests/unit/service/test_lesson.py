"""Lessons through the command line: what is printed, the exit code, and that nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from jobs.errors import PacktrainError
from jobs.spec.lesson import LessonSpec
from service.lesson import in_order, run_lesson
from tests.support.commands import command, refusal
from tests.support.ranks import run_ranks  # noqa: F401  (says to conftest that ranks are forked here)

ROOT = Path(__file__).parents[3]
SPECS = ROOT / "jobs" / "specs"
SMALL = ["--set", "model.d_model=32", "--set", "train.batch_size=16", "--set", "train.steps=2"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dp", "[data_parallelism] Rank 1: step = 0, loss = "),
        ("tp", "[tensor_parallelism] Rank 1: step = 0, forward pass produced activations 16x32["),
        ("pp", "[pipeline_parallelism] Rank 0: sending 4x32["),
        ("collectives", "[collectives] Rank 1: before [10 11]  after [0 1]"),
    ],
)
def test_the_ranks_speak_in_order_and_equal_one_process(name: str, expected: str) -> None:
    axis = {"collectives": "dp"}.get(name, name)
    answer = command("run", str(SPECS / f"lesson_{name}.yaml"), *SMALL, "--set", f"strategy.{axis}=2")
    assert answer.code == 0, answer
    assert expected in answer.out
    assert "equal to one process: yes, worst difference" in answer.out.splitlines()[-1]
    if name == "dp":
        lines = [line for line in answer.out.splitlines() if "step = " in line]
        assert [line[19:25] for line in lines] == ["Rank 0", "Rank 1"] * 2


def test_lines_are_taken_in_turn_part_by_part() -> None:
    zero = [("line", "a0"), ("title", "next"), ("line", "b0"), ("line", "c0")]
    one = [("title", "next"), ("line", "b1")]
    assert list(in_order([zero, one])) == ["a0", "", "-- next", "b0", "b1", "c0"]


def test_unequal_is_exit_code_one() -> None:
    """Two parts of 8 and 7 rows: the mean of their means is not the mean."""
    spec = LessonSpec.model_validate(
        {"lesson": "dp", "model": {"kind": "mlp", "d_model": 32}, "strategy": {"dp": 2}}
    )
    uneven = spec.model_copy(update={"train": spec.train.model_copy(update={"batch_size": 15, "steps": 1})})
    said: list[str] = []
    assert run_lesson(uneven, said.append) == 1
    assert said[-1].startswith("equal to one process: NO, worst difference ")


def test_a_failing_rank_is_one_error_with_its_traceback() -> None:
    spec = LessonSpec.model_validate(
        {"lesson": "ep", "model": {"kind": "mlp", "d_model": 32, "n_experts": 4}, "strategy": {"ep": 2}}
    )
    greedy = spec.model_copy(update={"model": spec.model.model_copy(update={"top_k": 5})})
    with pytest.raises(PacktrainError, match=r"rank 0 of 2: Traceback(.|\n)*expert\.py(.|\n)*out of range"):
        run_lesson(greedy, lambda _: None)


def test_validate_prints_the_resolved_lesson() -> None:
    answer = command("validate", str(SPECS / "lesson_ep.yaml"), "--set", "strategy.ep=2")
    assert answer.json["strategy"]["ep"] == 2
    assert "ok: lesson ep, 2 ranks" in answer.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["run", "--set", "strategy.dp=3"],
            "train.batch_size=128 does not divide by strategy.dp=3",
        ),
        (["run", "--set", "train.stepz=3"], "train.stepz: unknown key; did you mean steps?"),
        (["run", "--demo-kill"], "a lesson runs by itself"),
        (["submit"], "is a lesson"),
    ],
)
def test_wrong_input_is_one_error(words: list[str], expected: str) -> None:
    verb, *options = words
    lines = refusal(verb, str(SPECS / "lesson_dp.yaml"), *options)
    assert len(lines) == 1
    assert expected in lines[0]


def test_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    """As a terminal does: the signal reaches every process of the group."""
    words = ["run", str(SPECS / "lesson_dp.yaml"), *SMALL[:4], "--set", "train.steps=1000"]
    with subprocess.Popen(
        [sys.executable, "-m", "service", *words, "--set", "strategy.dp=2"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    ) as lesson:
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline and len(members(lesson.pid)) < 4:
            assert lesson.poll() is None
            time.sleep(0.05)
        os.killpg(lesson.pid, signal.SIGINT)
        out, _ = lesson.communicate(timeout=20)
        assert lesson.returncode in (3, 130), out
        assert "Traceback" not in out
    deadline = time.monotonic() + 10
    while members(lesson.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(lesson.pid) == []
    assert not list(tmp_path.glob("packtrain-lesson-*"))


def members(session: int) -> list[str]:
    """Live processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found
