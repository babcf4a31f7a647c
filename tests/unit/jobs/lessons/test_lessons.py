"""Each lesson's ranks against one process, in fp64; and that the comparison would notice."""

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.comm.groups import Groups
from jobs.lessons.compare import METHODS, findings, run_rank
from jobs.lessons.context import positions_of
from jobs.lessons.toy import Piece
from jobs.lessons.verdict import RankReport, judge
from jobs.spec.lesson import AXIS_OF, Lesson, LessonSpec
from tests.support.ranks import run_ranks

SMALL = {"kind": "mlp", "n_layers": 4, "d_model": 32, "n_heads": 4, "n_experts": 4}
TRAIN = {"steps": 2, "batch_size": 16, "micro_batches": 4, "precision": "fp64"}


def spec_of(lesson: Lesson, n_ranks: int, **train: Any) -> LessonSpec:
    strategy = {AXIS_OF[lesson]: n_ranks}
    return LessonSpec.model_validate(
        {"lesson": lesson, "model": SMALL, "train": TRAIN | train, "strategy": strategy}
    )


def run_many(groups: Groups, specs: list[LessonSpec]) -> list[RankReport]:
    return [run_rank(groups, spec) for spec in specs]


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("lessons", [("collectives", "dp", "zero"), ("tp", "sp"), ("pp",), ("ep",), ("cp",)])
def test_equals_one_process(lessons: tuple[Lesson, ...], n_ranks: int, tmp_path: Path) -> None:
    specs = [spec_of(lesson, n_ranks) for lesson in lessons]
    ranks = run_ranks(run_many, specs[0].mesh, tmp_path, specs)
    for i, lesson in enumerate(lessons):
        verdict = judge([rank[i].findings for rank in ranks])
        assert verdict.ok, (lesson, verdict)
        assert verdict.worst < 1e-12, (lesson, verdict)
        said = [rank[i].said for rank in ranks]
        titles = [[text for kind, text in one if kind == "title"] for one in said]
        assert titles[0], lesson
        assert all(one == titles[0] for one in titles), "a part is shown once all ranks are past it"
        for number, one in enumerate(said):
            own = [text for kind, text in one if kind == "line" and text.startswith("[")]
            assert own, (lesson, number)
            assert all(text.startswith(f"[{METHODS[lesson]}] Rank {number}: ") for text in own)


def test_single_precision_is_within_the_limit(tmp_path: Path) -> None:
    spec = spec_of("sp", 2, precision="fp32")
    ranks = run_ranks(run_many, spec.mesh, tmp_path, [spec])
    verdict = judge([rank[0].findings for rank in ranks])
    assert verdict.ok
    assert verdict.worst > 1e-9, (
        "the sums are taken in another order: a difference of nothing compares nothing"
    )


def test_uneven_parts_of_a_mean_are_noticed(tmp_path: Path) -> None:
    """The schema refuses them: the mean of means is not the mean."""
    spec = spec_of("dp", 2)
    uneven = spec.model_copy(update={"train": spec.train.model_copy(update={"batch_size": 15})})
    ranks = run_ranks(run_many, uneven.mesh, tmp_path, [uneven])
    verdict = judge([rank[0].findings for rank in ranks])
    assert not verdict.ok
    assert verdict.worst > 1e-3


def test_findings_name_what_no_rank_has_shown() -> None:
    whole = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    left = findings([Piece("a", whole["a"][:, :2], (0, 0))], whole)
    right = findings([Piece("a", whole["a"][:, 2:], (0, 2)), Piece("b", whole["b"])], whole)
    assert judge([left]).missing == ("a", "b")
    assert judge([left, right]).missing == ()
    assert judge([right]).missing == ("a",)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([1.0, 2.0]), 0.0),
        (torch.tensor([1.0, 2.1]), 0.1 / 5**0.5),
        (torch.tensor([1.0, float("nan")]), float("inf")),
        (torch.tensor([1.0, 2.0, 3.0]), float("inf")),
    ],
)
def test_differences(value: torch.Tensor, expected: float) -> None:
    whole = {"a": torch.tensor([1.0, 2.0])}
    assert judge([findings([Piece("a", value)], whole)]).worst == pytest.approx(expected, rel=1e-5)


def test_zigzag_shares_the_pairs_out_evenly() -> None:
    parts = [positions_of("zig-zag", 16, rank, 4) for rank in range(4)]
    assert sorted(torch.cat(parts).tolist()) == list(range(16))
    assert len({int((part + 1).sum()) for part in parts}) == 1
