"""Spares: the published sizes, the definition of a quantile, and layouts that fit what is left."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.planner.legality import nearest_layout, refusals, with_layout
from jobs.spec.job import JobSpec
from jobs.spec.load import load_spec
from ops.spares import binomial_quantile, layout_for, plan_spares

SPEC = """\
model: {preset: tiny}
data: {seq_len: 64, sources: [{kind: text, path: corpus.txt}]}
optim: {lr: 3e-4}
train: {steps: 10, global_batch_size: 24, micro_batch_size: 1}
"""


@pytest.mark.parametrize(
    ("rate", "n_nodes", "one_day", "eight_hours"),
    [
        (0.0065, 128, 4, 2),
        (0.0065, 256, 5, 3),
        (0.0065, 1024, 13, 6),
        (0.0065, 2048, 22, 10),
        (0.00234, 128, 2, 1),
        (0.00234, 1024, 7, 3),
    ],
)
def test_sizes_at_the_rates_that_meta_published(
    rate: float, n_nodes: int, one_day: int, eight_hours: int
) -> None:
    assert plan_spares(n_nodes, rate, 1.0).n_spares == one_day
    assert plan_spares(n_nodes, rate, 1 / 3).n_spares == eight_hours


@given(st.integers(0, 300), st.floats(0, 1), st.floats(0, 0.999))
def test_a_quantile_is_the_smallest_number_that_covers_it(n: int, p: float, quantile: float) -> None:
    k = binomial_quantile(n, p, quantile)
    below = [math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1)]
    assert math.fsum(below) >= quantile - 1e-9
    assert k == 0 or math.fsum(below[:-1]) < quantile + 1e-9


def test_what_a_plan_costs_and_leaves_adds_up() -> None:
    """Spares - nodes out = idle spares - nodes short, on average."""
    plan = plan_spares(256, 0.0065, 1.0)
    balance = plan.idle_node_days_per_day - plan.short_node_days_per_day
    assert balance == pytest.approx(plan.n_spares - plan.n_out_mean, abs=1e-9)
    assert plan.short_frac <= 0.01
    assert plan_spares(256, 0.0065, 1.0, quantile=0.5).short_frac > 0.01
    assert plan_spares(64, 0.0, 1.0).n_spares == 0


@pytest.mark.parametrize("wrong", [(-1, 0.1, 0.9), (4, 1.5, 0.9), (4, 0.1, 1.0)])
def test_figures_that_mean_nothing_are_refused(wrong: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="quantile"):
        binomial_quantile(*wrong)
    with pytest.raises(ValueError, match="repair_days"):
        plan_spares(4, 0.1, -1.0)


def spec_of(tmp_path: Path, strategy: str) -> JobSpec:
    (tmp_path / "corpus.txt").write_text("hello world")
    (tmp_path / "spec.yaml").write_text(f"{SPEC}strategy: {strategy}\n")
    return load_spec(tmp_path / "spec.yaml")


def test_the_next_smaller_layout_shares_the_same_batch_evenly(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "{kind: native, dp: 4, tp: 2}")
    sizes = {n: layout_for(spec, n, nearest_layout) for n in range(9)}
    found = {n: (mesh.dp, mesh.tp) for n, mesh in sizes.items() if mesh is not None}
    assert found == {1: (1, 1), 2: (1, 2), 3: (1, 2), 4: (2, 2), 5: (2, 2), 6: (3, 2), 7: (3, 2), 8: (4, 2)}
    assert sizes[0] is None
    for mesh in sizes.values():
        assert mesh is None or refusals(with_layout(spec, mesh)) == []


def test_a_pipeline_without_copies_is_cut_by_a_divisor(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "{kind: native, pp: 4}")
    mesh = layout_for(spec, 3, nearest_layout)
    assert mesh is not None
    assert mesh.world_size <= 3
    assert refusals(with_layout(spec, mesh)) == []
    assert layout_for(spec, 4, nearest_layout) == spec.strategy.mesh


def test_nothing_is_made_up_where_the_planner_knows_no_layout(tmp_path: Path) -> None:
    assert layout_for(spec_of(tmp_path, "{kind: native, dp: 4}"), 2, lambda _: None) is None
