"""Any layout that is legal builds, trains two steps and equals one process; any other is refused with why."""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jobs.comm.groups import Axis, Groups
from jobs.engines.build import build_engine
from jobs.engines.preload import preload_modules
from jobs.mesh import SUMS, Mesh
from jobs.parity.compare import compare_layout
from jobs.planner.legality import refusals
from jobs.spec.job import JobSpec
from tests.support.parity_runs import layout_spec, runner

pytestmark = [pytest.mark.parity, pytest.mark.timeout(400)]
RANKS_PRELOAD = (*preload_modules("deepspeed_zero"), "jobs.parity.rank")
MAX_RANKS = 8
N_TRAINED = 10


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    n_heads = draw(st.sampled_from([2, 4, 6]))
    head_dim = 4
    model: dict[str, Any] = {
        "vocab_size": draw(st.integers(9, 70)),
        "n_layers": draw(st.integers(1, 5)),
        "d_model": 24,
        "n_heads": n_heads,
        "n_kv_heads": draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if n_heads % n == 0])),
        "head_dim": head_dim,
        "d_ff": draw(st.integers(7, 40)),
        "tie_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        router = draw(st.sampled_from(["softmax", "sigmoid"]))
        n_experts = draw(st.integers(2, 6))
        model["moe"] = {
            "n_experts": n_experts,
            "top_k": draw(st.integers(1, min(3, n_experts))),
            "d_ff": draw(st.integers(5, 20)),
            "n_shared_experts": draw(st.integers(0, 1)),
            "n_dense_layers": draw(st.integers(0, 1)),
            "router": router,
            "balance_loss_coef": draw(st.sampled_from([0.0, 0.05])),
            "z_loss_coef": draw(st.sampled_from([0.0, 0.01])),
            "bias_update_rate": draw(st.sampled_from([0.0, 0.01])) if router == "sigmoid" else 0.0,
            "capacity_factor": draw(st.sampled_from([None, 1.25])),
        }
    return model


def sizes(*axes: str) -> st.SearchStrategy[dict[str, int]]:
    """Axes of 1, 2 or 4 ranks, not more than MAX_RANKS in all."""
    meshes = st.fixed_dictionaries({axis: st.sampled_from([1, 1, 2, 4]) for axis in axes})
    return meshes.filter(
        lambda found: (
            Mesh(**{a: n for a, n in found.items() if a not in ("ep", "etp")}).world_size
            in range(2, MAX_RANKS + 1)
        )
    )


@st.composite
def strategies(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["native", "native", "native", "deepspeed_zero", "deepspeed_pipeline"]))
    recompute = st.sampled_from(["none", "none", "attention", "ops", "full"])
    if kind == "deepspeed_pipeline":
        return {"kind": kind, "stage": draw(st.sampled_from([0, 1])), **draw(sizes("dp", "pp"))}
    both = {
        "kind": kind,
        "sequence_parallel": draw(st.booleans()),
        "context_method": draw(st.sampled_from(["ring", "ulysses", "all_gather"])),
        "recompute": draw(recompute),
    }
    if kind == "deepspeed_zero":
        stage = draw(st.sampled_from([0, 1, 2, 3]))
        return both | {"stage": stage} | draw(sizes("dp", "cp", "tp", "ep", "etp"))
    schedules = [
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipev",
    ]
    pipeline = {
        "schedule": draw(st.sampled_from(schedules)),
        "stages_per_rank": draw(st.sampled_from([1, 2])),
        "split": draw(st.sampled_from(["layers", "parameters"])),
    }
    mesh = draw(sizes("dp", "pp", "cp", "tp", "ep", "etp"))
    return both | {"zero_stage": draw(st.sampled_from([0, 1])), "pipeline": pipeline} | mesh


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    return layout_spec(
        draw(strategies()),
        draw(models()),
        accum=draw(st.integers(1, 4)),
        seq_len=draw(st.sampled_from([12, 16, 32])),
        mask_documents=draw(st.booleans()),
    )


@settings(
    max_examples=N_TRAINED,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # each example starts ranks: a failing one is shown as it is, not made smaller
)
@given(specs().filter(lambda spec: not refusals(spec)))
def test_a_legal_layout_equals_one_process(spec: JobSpec) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = compare_layout(spec, runner(Path(folder)), n_steps=2)
    assert report.problems == ()


def unjoined(mesh: Mesh) -> Groups:
    """Groups as rank 0 would have them, without processes: enough to be refused."""
    lone = Axis((0,), 0, None)
    axes = dict.fromkeys(("world", "dp", "pp", "cp", "tp", "kv", "ep", "etp"), lone)
    return Groups(mesh=mesh, rank=0, **axes, sums=dict.fromkeys(SUMS, lone), control=None)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(specs().filter(refusals))
def test_any_other_is_refused_with_the_reason_and_a_way_out(spec: JobSpec) -> None:
    import torch

    for refusal in refusals(spec):
        assert refusal.key.split(".")[0] in JobSpec.model_fields
        assert re.search(r"\d", refusal.reason), refusal.reason
        assert refusal.nearest
        if refusal.layout is not None:
            assert refusal.layout.world_size <= spec.world_size
    with pytest.raises(ValueError, match=r"nearest: "):
        build_engine(spec, unjoined(spec.strategy.mesh), torch.device("cpu"))
