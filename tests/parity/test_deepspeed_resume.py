"""State taken out of one DeepSpeed engine and put into another, at the same layout and across layouts."""

from pathlib import Path

import pytest
import torch

from jobs.comm.groups import Groups
from jobs.engines.base import Engine
from jobs.engines.deepspeed_zero import DeepspeedZeroEngine
from jobs.engines.native import NativeEngine
from jobs.engines.preload import preload_modules
from jobs.spec.job import JobSpec
from tests.support.deepspeed_runs import (
    CPU,
    Saved,
    assemble,
    load,
    lr_of,
    make_spec,
    reference_loop,
    same,
    save,
    train_one,
    zero_spec,
)
from tests.support.ranks import run_ranks

RANKS_PRELOAD = preload_modules("deepspeed_zero")
pytestmark = pytest.mark.parity

CASES = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "stage 1 bf16": (1, {"precision": "bf16"}),
    "stage 2 bf16": (2, {"precision": "bf16"}),
    "stage 3 bf16": (3, {"precision": "bf16"}),
    "stage 3 bf16, small parameters stay gathered": (
        3,
        {"precision": "bf16", "options": {"stage3_param_persistence_threshold": 300, "sub_group_size": 700}},
    ),
}


def _resume(groups: Groups) -> list[str]:
    """Names of the cases in which a fresh engine does not go on as the first one does."""
    wrong = []
    for case, (stage, changes) in CASES.items():
        spec = zero_spec(groups.dp.size, stage, **changes)
        first = DeepspeedZeroEngine(spec, groups, CPU)
        for step in range(3):
            train_one(first, step, groups)
        saved = save(first)
        expected = [train_one(first, step, groups) for step in range(3, 6)]

        second = DeepspeedZeroEngine(spec, groups, CPU)
        assert not same(saved, save(second))
        for chunk, source in zip(second.chunks(), saved, strict=True):
            chunk.tensor.copy_(source[3])
        second.after_load(lr_of(2))
        if not same(saved, save(second)):
            wrong.append(f"{case}: state after loading")
        if [train_one(second, step, groups) for step in range(3, 6)] != expected:
            wrong.append(f"{case}: losses or norms")
        if not same(save(first), save(second)):
            wrong.append(f"{case}: final state")
    return wrong


def test_same_layout_goes_on_bitwise(tmp_path: Path) -> None:
    assert run_ranks(_resume, 2, tmp_path) == [[], []]


LEG_STEPS = 4
Leg = tuple[list[float], Saved]


def _leg(groups: Groups, spec: JobSpec, whole: dict[str, torch.Tensor] | None, first: int) -> Leg:
    """Train LEG_STEPS steps, from a state where there is one."""
    engine: Engine
    if spec.strategy.kind == "native":
        engine = NativeEngine(spec, groups, CPU)
    else:
        engine = DeepspeedZeroEngine(spec, groups, CPU)
    if whole is not None:
        load(engine, whole, lr_of(first - 1))
    losses = [train_one(engine, step, groups).loss for step in range(first, first + LEG_STEPS)]
    return losses, save(engine)


ROUTES: dict[str, list[tuple[int, int | None]]] = {
    "ZeRO-3 on 4 ranks, ZeRO-1 on 2, native on 1": [(4, 3), (2, 1), (1, None)],
    "native on 2 ranks, ZeRO-2 on 3, ZeRO-0 on 2, ZeRO-3 on 1": [(2, None), (3, 2), (2, 0), (1, 3)],
}
"""Legs as dp and ZeRO stage, None for native."""


@pytest.mark.parametrize(("route", "tied"), list(zip(ROUTES, (False, True), strict=True)))
def test_state_moves_between_stages_sizes_and_engines(route: str, tied: bool, tmp_path: Path) -> None:
    """As if the run had never stopped.

    The right behaviour of deepspeedai/DeepSpeed#2898: another world size resumes, with optimizer moments.
    """
    legs = [
        make_spec(dp, tied=tied) if stage is None else zero_spec(dp, stage, tied=tied)
        for dp, stage in ROUTES[route]
    ]
    losses: list[float] = []
    whole = None
    for spec in legs:
        ranks = run_ranks(_leg, spec.world_size, tmp_path, spec, whole, len(losses))
        assert all(rank[0] == pytest.approx(ranks[0][0], abs=1e-6) for rank in ranks)
        losses += ranks[0][0]
        whole = assemble([rank[1] for rank in ranks])
        assert whole["optim/step"].tolist() == [len(losses)]
    expected, _, model = reference_loop(make_spec(1, tied=tied), len(losses))
    assert losses == pytest.approx(expected, abs=1e-5)
    assert whole is not None
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole[f"model/{name}"], parameter.detach(), rtol=0, atol=2e-5)
