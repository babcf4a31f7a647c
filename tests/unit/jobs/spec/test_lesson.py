"""Lesson files: what they take, and the sentence for what they refuse."""

from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.spec.lesson import AXIS_OF, load_lesson
from jobs.spec.load import load_spec

SPECS = Path(__file__).parents[4] / "jobs" / "specs"
LESSON = """\
lesson: tp
model: {kind: mlp, n_layers: 4, d_model: 64}
train: {steps: 1, batch_size: 16}
strategy:
  tp: 2
"""


def refusal(folder: Path, old: str, new: str, *overrides: str) -> str:
    assert LESSON.count(old) == 1
    (folder / "lesson.yaml").write_text(LESSON.replace(old, new))
    with pytest.raises(SpecError) as caught:
        load_lesson(folder / "lesson.yaml", overrides)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize("name", AXIS_OF)
def test_there_is_a_file_for_every_lesson(name: str) -> None:
    spec = load_lesson(SPECS / f"lesson_{name}.yaml")
    assert spec is not None
    assert spec.lesson == name
    assert spec.n_ranks == spec.mesh.world_size > 1


def test_any_number_of_ranks_by_override() -> None:
    spec = load_lesson(SPECS / "lesson_dp.yaml", ["strategy.dp=2", "train.steps=1"])
    assert spec is not None
    assert (spec.n_ranks, spec.train.steps) == (2, 1)


def test_a_run_is_no_lesson() -> None:
    assert load_lesson(SPECS / "tiny.yaml") is None


def test_a_lesson_is_no_run() -> None:
    with pytest.raises(SpecError, match=r"lesson_dp\.yaml: is a lesson .*packtrain run"):
        load_spec(SPECS / "lesson_dp.yaml")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "lesson: tp",
            "lesson: pt",
            "lesson.yaml:1: lesson: must be one of collectives, dp, tp, sp, pp, zero",
        ),
        ("lesson: tp\n", "", "lesson.yaml:1: lesson: missing in the spec"),
        ("n_layers: 4", "n_layer: 4", "lesson.yaml:2: model.n_layer: unknown key; did you mean n_layers?"),
        (
            "n_layers: 4",
            "n_layers: 3",
            "lesson.yaml:2: model.n_layers=3 does not divide by 2 (layers work in",
        ),
        ("steps: 1", "steps: none", "lesson.yaml:3: train.steps: wants a whole number, got the text 'none'"),
        ("kind: mlp", "kind: llama", "lesson.yaml:2: model.kind: must be mlp; got the text 'llama'"),
        ("tp: 2", "tp: 0", "lesson.yaml:5: strategy.tp: must be greater than 0; got 0"),
        ("tp: 2", "tp: 3", "lesson.yaml:2: model.d_model=64 does not divide by strategy.tp=3"),
        (
            "tp: 2",
            "dp: 2",
            "lesson.yaml:5: strategy.dp=2 with lesson tp, which runs along tp; leave strategy.dp",
        ),
        ("tp: 2", "zero_stage: 1", "lesson.yaml:5: strategy.zero_stage: unknown key"),
        (LESSON[-17:], "optim: {lr: 1}\n", "optim: unknown key"),
    ],
)
def test_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert expected in refusal(tmp_path, old, new)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["lesson=dp", "strategy={dp: 3}"], "train.batch_size=16 does not divide by strategy.dp=3"),
        (["lesson=pp", "strategy={pp: 8}"], "model.n_layers=4 does not divide by strategy.pp=8"),
        (
            ["lesson=pp", "strategy={pp: 2}", "train.micro_batches=3"],
            "does not divide by train.micro_batches=3",
        ),
        (["lesson=ep", "strategy={ep: 16}"], "model.n_experts=8 does not divide by strategy.ep=16"),
        (["lesson=ep", "strategy={ep: 2}", "model.top_k=9"], "model.top_k=9 experts of model.n_experts=8"),
        (["lesson=cp", "strategy={cp: 16}"], "train.batch_size=16 does not divide by 2 x strategy.cp"),
    ],
)
def test_what_does_not_divide(tmp_path: Path, overrides: list[str], expected: str) -> None:
    assert expected in refusal(tmp_path, "lesson: tp", "lesson: tp", *overrides)
