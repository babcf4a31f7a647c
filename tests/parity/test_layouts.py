"""The matrix: every layout equals one process in loss, gradient norm, every gradient, and the weights after.

fp32: loss 1e-6, norm 1e-6, each gradient 1e-5, weights after one AdamW and one SGD step 1e-5, losses over ten
steps 1e-5; fp64 four orders tighter (jobs/parity/compare.py). Documents are uneven and masked, labels too.
"""

from pathlib import Path
from typing import Any

import pytest

from jobs.engines.preload import preload_modules
from jobs.parity.compare import compare_layout
from tests.support.parity_runs import MOE, layout_spec, runner

pytestmark = [pytest.mark.parity, pytest.mark.timeout(240)]
RANKS_PRELOAD = (*preload_modules("deepspeed_zero"), "jobs.parity.rank")

Case = tuple[dict[str, Any], dict[str, Any]]
"""Keys of the strategy; arguments of layout_spec."""
INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
MATRIX: dict[str, Case] = {
    # each method alone
    "dp2": ({"dp": 2}, {"accum": 3}),
    "dp4 zero1": ({"dp": 4, "zero_stage": 1}, {"accum": 3}),
    "tp2": ({"tp": 2, "sequence_parallel": False}, {}),
    "tp4": ({"tp": 4, "sequence_parallel": False}, {}),
    "tp2 sp": ({"tp": 2}, {"accum": 3}),
    "tp4 sp, kv heads 2": ({"tp": 4}, {}),
    "tp2 sp, vocab 511": ({"tp": 2}, {"model": {"vocab_size": 511}}),
    "tp2 sp, tied": ({"tp": 2}, {"model": {"tie_embeddings": True}}),
    "cp2 ring": ({"cp": 2}, {"accum": 3}),
    "cp4 ring": ({"cp": 4}, {}),
    "cp2 ring, causal": ({"cp": 2}, {"mask_documents": False}),
    "cp2 ulysses": ({"cp": 2, "context_method": "ulysses"}, {}),
    "cp4 ulysses": ({"cp": 4, "context_method": "ulysses"}, {}),
    "cp2 all-gather": ({"cp": 2, "context_method": "all_gather"}, {}),
    "cp4 all-gather": ({"cp": 4, "context_method": "all_gather"}, {}),
    "ep2": ({"dp": 2, "ep": 2}, {"model": MOE, "accum": 3}),
    "ep4": ({"dp": 4, "ep": 4}, {"model": MOE}),
    "pp2 gpipe": ({"pp": 2, "pipeline": {"schedule": "gpipe"}}, {"accum": 3}),
    "pp2 1f1b": ({"pp": 2}, {"accum": 3}),
    "pp4 1f1b": ({"pp": 4}, {"accum": 4}),
    "pp2 interleaved": ({"pp": 2, "pipeline": INTERLEAVED}, {"accum": 4}),
    "pp2 1f1b, tied": ({"pp": 2}, {"accum": 3, "model": {"tie_embeddings": True}}),
    "pp4, 10 layers": ({"pp": 4}, {"accum": 4, "model": {"n_layers": 10}}),
    "pp4, 10 layers as listed": (
        {"pp": 4, "pipeline": {"split": [2, 3, 3, 2]}},
        {"accum": 4, "model": {"n_layers": 10, "tie_embeddings": True}},
    ),
    "pp2 zero bubble": (
        {"pp": 2, "pipeline": {"schedule": "interleaved_zero_bubble", "stages_per_rank": 2}},
        {"accum": 4},
    ),
    "pp2 zbv, tied": (
        {"pp": 2, "pipeline": {"schedule": "zbv_zero_bubble", "stages_per_rank": 2}},
        {"accum": 4, "model": {"tie_embeddings": True}},
    ),
    "pp2 dualpipev": (
        {"pp": 2, "pipeline": {"schedule": "dualpipev", "stages_per_rank": 2}},
        {"accum": 4},
    ),
    # composed
    "tp2 pp2": ({"tp": 2, "pp": 2}, {"accum": 3, "model": {"tie_embeddings": True}}),
    "tp2 cp2": ({"tp": 2, "cp": 2}, {"accum": 3}),
    "tp2 cp2 ulysses": ({"tp": 2, "cp": 2, "context_method": "ulysses"}, {}),
    "ep2 tp2": ({"dp": 2, "tp": 2, "ep": 2}, {"model": MOE}),
    "ep2 in tp2": ({"tp": 2, "ep": 2}, {"model": MOE}),
    "ep2 dp2": ({"dp": 4, "ep": 2}, {"model": MOE, "accum": 3}),
    "ep2 etp2": ({"dp": 4, "ep": 2, "etp": 2}, {"model": MOE}),
    "ep2 cp2": ({"cp": 2, "ep": 2}, {"model": MOE}),
    "cp2 pp2": ({"cp": 2, "pp": 2}, {"accum": 3}),
    "dp2 tp2 pp2": ({"dp": 2, "tp": 2, "pp": 2}, {"accum": 3}),
    "dp2 cp2 tp2": ({"dp": 2, "cp": 2, "tp": 2}, {"accum": 3}),
    "ep2 tp2 pp2": ({"dp": 2, "tp": 2, "pp": 2, "ep": 2}, {"model": MOE | {"n_layers": 4}, "accum": 3}),
    "zero1 tp2": ({"dp": 2, "tp": 2, "zero_stage": 1}, {"accum": 3}),
    "zero1 pp2": ({"dp": 2, "pp": 2, "zero_stage": 1}, {"accum": 3, "model": {"tie_embeddings": True}}),
    "zero1 ep2": ({"dp": 4, "ep": 2, "zero_stage": 1}, {"model": MOE}),
    "dp2 pp2 tp2 interleaved": ({"dp": 2, "pp": 2, "tp": 2, "pipeline": INTERLEAVED}, {"accum": 4}),
    "tp2 pp2 zbv": (
        {"tp": 2, "pp": 2, "pipeline": {"schedule": "zbv_zero_bubble", "stages_per_rank": 2}},
        {"accum": 4, "model": {"tie_embeddings": True}},
    ),
    "recompute full, tp2 pp2": ({"tp": 2, "pp": 2, "recompute": ["full", "attention"]}, {"accum": 3}),
    "recompute ops, cp2": ({"cp": 2, "recompute": "ops"}, {}),
    "recompute full, ep2": ({"dp": 2, "ep": 2, "recompute": "full"}, {"model": MOE}),
    # DeepSpeed
    "deepspeed zero1 tp2": ({"kind": "deepspeed_zero", "stage": 1, "dp": 2, "tp": 2}, {"accum": 3}),
    "deepspeed zero2 tp2": ({"kind": "deepspeed_zero", "stage": 2, "dp": 2, "tp": 2}, {}),
    "deepspeed zero3 tp2": ({"kind": "deepspeed_zero", "stage": 3, "dp": 2, "tp": 2}, {"accum": 3}),
}
TIGHT = (
    "dp4 zero1",
    "tp4 sp, kv heads 2",
    "tp2 sp, vocab 511",
    "cp4 ring",
    "pp4, 10 layers as listed",
    "ep2 tp2 pp2",
    "dp2 cp2 tp2",
    "dp2 pp2 tp2 interleaved",
)
"""Checked in fp64 as well: four orders tighter leave no room for a small wrong term."""


@pytest.mark.parametrize("name", MATRIX)
def test_a_layout_equals_one_process(name: str, tmp_path: Path) -> None:
    strategy, arguments = MATRIX[name]
    report = compare_layout(layout_spec(strategy, **arguments), runner(tmp_path))
    assert report.problems == ()


@pytest.mark.parametrize("name", TIGHT)
def test_in_fp64_it_does_so_four_orders_tighter(name: str, tmp_path: Path) -> None:
    strategy, arguments = MATRIX[name]
    report = compare_layout(layout_spec(strategy, precision="fp64", **arguments), runner(tmp_path))
    assert report.problems == ()
