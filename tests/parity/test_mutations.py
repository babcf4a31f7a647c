"""The matrix has teeth: each classic mistake, put into a layout that is right, is found by the comparison.

A mutation is applied inside the ranks, before they build their engine; the same layouts pass without one
(test_layouts.py). The kinds are those that public reports show to slip through composed layouts.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import jobs.engines.layout as layout
import jobs.engines.native as native
import jobs.engines.native_parameters as native_parameters
from jobs.comm.groups import Axis, Groups
from jobs.engines.base import MicroBatch
from jobs.parallel.context import split_batch
from jobs.parallel.placement import kv_replicas, place_parameters
from jobs.parallel.tensor import tensor_operations
from jobs.parity.compare import ParityReport, compare
from jobs.parity.rank import RankNumbers, measure_rank
from jobs.parity.reference import reference
from jobs.spec.job import JobSpec
from tests.support.parity_runs import MOE, layout_spec, runner

pytestmark = [pytest.mark.parity, pytest.mark.timeout(180)]
RANKS_PRELOAD = ("jobs.parity.rank",)


def alone(axis: Axis) -> Axis:
    """The axis of a rank that forgot its peers."""
    return Axis((axis.ranks[axis.rank],), 0, None)


def put(module: ModuleType, name: str, function: Callable[..., Any]) -> None:
    """Let the module use this function: the module that calls it, which took the right one by its name."""
    assert callable(getattr(module, name))
    setattr(module, name, function)


def sum_over_nobody(line: str) -> Callable[[Groups], Groups]:
    return lambda groups: replace(groups, sums=groups.sums | {line: alone(groups.sums[line])})


def sum_over_another_line(line: str, taken: str) -> Callable[[Groups], Groups]:
    return lambda groups: replace(groups, sums=groups.sums | {line: groups.sums[taken]})


def count_replicas_each(groups: Groups) -> Groups:
    """Parameters that are whole on every tp rank count once a rank (torchtitan#596, Megatron#5916)."""

    def placed(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = place_parameters(*args, **kwargs)
        n_replicas = {name: len(groups.sums[p.sum_over].ranks) for name, p in found.items()}
        return {name: replace(p, n_replicas=n_replicas[name]) for name, p in found.items()}

    put(native_parameters, "place_parameters", placed)
    return groups


def forget_rope_offset(groups: Groups) -> Groups:
    """Positions counted from zero on each context rank (Megatron#560)."""

    def from_zero(batch: MicroBatch, cp: Axis) -> MicroBatch:
        part = split_batch(batch, cp)
        return replace(part, positions=torch.arange(part.tokens.shape[1]).expand_as(part.tokens))

    put(native, "split_batch", from_zero)
    return groups


def forget_accumulation(groups: Groups) -> Groups:
    """Each micro-batch weighs as if it were the whole step (deepspeedai/DeepSpeed#3982's kind)."""
    run = native.NativeEngine._run

    def undivided(self: Any, batches: list[MicroBatch], scale: float) -> torch.Tensor:
        return run(self, batches, scale * len(batches))

    native.NativeEngine._run = undivided
    return groups


def mean_of_means(groups: Groups) -> Groups:
    """Each rank divides by its own valid labels (torchtitan#1842)."""
    step = native.NativeEngine.train_step

    def own_count(self: Any, batches: list[MicroBatch], n_valid_tokens: int, lr: float) -> Any:
        own = sum(int((batch.labels >= 0).sum()) for batch in batches)
        return step(self, batches, own * groups.dp.size, lr)

    native.NativeEngine.train_step = own_count
    return groups


def no_gradient_sum_into_columns(groups: Groups) -> Groups:
    """The f of arXiv 1909.08053 forgotten: hidden states get a part of their gradient."""

    def blind(base: Any, tp: Axis, sequence_parallel: bool) -> Any:
        operations = tensor_operations(base, tp, sequence_parallel)
        return replace(operations, columns=base.columns)

    put(layout, "tensor_operations", blind)
    return groups


Mutation = Callable[[Groups], Groups]
CASES: dict[str, tuple[Mutation, dict[str, Any], dict[str, Any]]] = {
    "a reduction removed: data": (sum_over_nobody("data"), {"dp": 2}, {}),
    "a reduction removed: data, context parallel": (sum_over_nobody("data"), {"cp": 2}, {}),
    "a reduction removed: norms under sequence parallelism": (
        sum_over_another_line("data_tp", "data"),
        {"dp": 2, "tp": 2},
        {},
    ),
    "the wrong group: matrices over dp and tp": (
        sum_over_another_line("data", "data_tp"),
        {"dp": 2, "tp": 2},
        {"model": {"vocab_size": 64}},  # pieces of one size, so that nothing crashes
    ),
    "shared kv heads not summed": (sum_over_another_line("data_kv", "data"), {"tp": 4}, {}),
    "a tied embedding's sum dropped": (
        sum_over_another_line("data_ends", "data"),
        {"pp": 2},
        {"accum": 2, "model": {"tie_embeddings": True}},
    ),
    "expert gradients not summed": (sum_over_nobody("edp"), {"dp": 4, "ep": 2}, {"model": MOE}),
    "expert gradients over the dense group": (
        sum_over_another_line("edp", "data"),
        {"dp": 4, "ep": 2},
        {"model": MOE},
    ),
    "replicas counted each in the norm": (count_replicas_each, {"tp": 2, "sequence_parallel": False}, {}),
    "positions from zero on each context rank": (forget_rope_offset, {"cp": 2}, {"mask_documents": False}),
    "accumulation not divided": (forget_accumulation, {"dp": 2}, {"accum": 3}),
    "a mean of means": (mean_of_means, {"dp": 2}, {"accum": 3}),
    "hidden states' gradient not summed over tp": (
        no_gradient_sum_into_columns,
        {"tp": 2, "sequence_parallel": False},
        {},
    ),
}


def mutated_rank(groups: Groups, name: str, spec: JobSpec) -> RankNumbers:
    mutation, _, _ = CASES[name]
    return measure_rank(mutation(groups), spec, 2)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    _, strategy, arguments = CASES[name]
    spec = layout_spec(strategy, **arguments)
    mesh = spec.strategy.mesh
    ranks = runner(tmp_path)(mutated_rank, mesh, kv_replicas(spec.model, mesh), name, spec)
    report: ParityReport = compare(spec, list(ranks), reference(spec, 2))
    assert not report.ok
    # Not by a hair: the mistake is far outside of what rounding explains.
    worst = max(report.grad_norm_rel, report.loss_abs, report.gradients[0].rel)
    assert not worst < 1e-4, report.problems
