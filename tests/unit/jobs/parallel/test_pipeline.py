"""Every schedule against one process, in fp64: loss, each gradient, and evaluation."""

import pytest
import torch

from jobs.engines.base import MicroBatch
from jobs.mesh import Mesh
from jobs.models.losses import IGNORED_LABEL
from jobs.models.operations import Operations
from jobs.parallel.pipeline import Pipeline
from jobs.planner.stages import plan_stages
from jobs.spec.strategy import NativeStrategy, PipelineSection
from tests.support.layouts import gathered, local_model, plain_gradients, sum_gradients
from tests.support.ranks import run_ranks
from tests.support.tiny_runs import tiny_model, tiny_spec

CPU = torch.device("cpu")
TOLERANCE = 1e-12
"""fp64, relative to the largest entry."""
SCALE = 1 / 37
MICRO = 2
SEQ_LEN = 12


def micro_batches(n: int) -> list[MicroBatch]:
    """Uneven documents and masks; no two micro-batches alike."""
    generator = torch.Generator().manual_seed(n)
    shape = (n * MICRO, SEQ_LEN)
    tokens = torch.randint(0, 61, shape, generator=generator)
    labels = torch.randint(0, 61, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < torch.linspace(0, 0.9, n * MICRO)[:, None]] = (
        IGNORED_LABEL
    )
    ids = (torch.rand(shape, generator=generator) < 0.2).cumsum(1).int()
    positions = torch.arange(SEQ_LEN).expand(shape).contiguous()
    cuts = [part.split(MICRO) for part in (tokens, labels, positions, ids)]
    return [MicroBatch(*parts) for parts in zip(*cuts, strict=True)]


def joined(batches: list[MicroBatch]) -> tuple[torch.Tensor, ...]:
    fields = ("tokens", "labels", "positions", "document_ids")
    return tuple(torch.cat([getattr(batch, field) for batch in batches]) for field in fields)


def pipeline_on(groups, model_spec, section):
    """This rank's stages and their placements, tied embeddings one Parameter where both ends are here."""
    spec = tiny_spec(model=model_spec)
    spec = spec.model_copy(update={"strategy": NativeStrategy(pp=groups.mesh.pp, pipeline=section)})
    stages = plan_stages(model_spec, groups.mesh.pp, section.schedule, section.stages_per_rank, section.split)
    held, placed = [], {}
    for stage in stages:
        if stage.pp_rank == groups.pp.rank:
            model, placements = local_model(
                model_spec, groups.mesh, groups, Operations(), stages=stages, stage=stage
            )
            held.append((stage, model))
            placed |= placements
    first, last = held[0][1], held[-1][1]
    if model_spec.tie_embeddings and first is not last and first.is_first and last.is_last:
        last.lm_head.weight = first.embed_tokens.weight
    return Pipeline(held, spec, groups, CPU), held, placed


def step_on_rank(groups, model_spec, section, counts):
    """For each number of micro-batches: loss, evaluated loss, whole gradients (rank 0), trace kinds."""
    pipeline, held, placed = pipeline_on(groups, model_spec, section)
    results = []
    for n in counts:
        batches = micro_batches(n)
        for _, model in held:
            model.zero_grad()
        loss = pipeline.run(batches, SCALE)
        grads = {}
        for _, model in held:
            placements = {
                model.logical_name(path): placed[model.logical_name(path)]
                for path, parameter in model.named_parameters()
                if model.logical_name(path) not in grads
            }
            grads |= sum_gradients_of(model, placements, groups)
        whole = gathered(grads, placed, groups)
        evaluated = pipeline.evaluate(MicroBatch(*joined(batches)))
        results.append((loss, evaluated, whole, pipeline.last_trace()))
    return results


def sum_gradients_of(model, placements, groups):
    return {
        name: grad for name, grad in sum_gradients(model, placements, groups).items() if name in placements
    }


def assert_equals_one_process(model_spec, section, pp, counts, tmp_path):
    ranks = run_ranks(step_on_rank, Mesh(pp=pp), tmp_path, model_spec, section, counts)
    for number, n in enumerate(counts):
        reference_loss, reference = plain_gradients(model_spec, *joined(micro_batches(n)))
        per_rank = [results[number] for results in ranks]
        loss = sum(result[0] for result in per_rank)
        assert abs(float(loss / SCALE / reference_loss) - 1) <= TOLERANCE
        assert [float(result[0]) != 0 for result in per_rank].count(True) == 1
        evaluated = sum(result[1] for result in per_rank)
        assert abs(float(evaluated / reference_loss) - 1) <= TOLERANCE
        grads = per_rank[0][2]
        assert grads.keys() == reference.keys()
        for name, expected in reference.items():
            difference = (grads[name] / SCALE - expected).abs().max() / expected.abs().max()
            assert float(difference) <= TOLERANCE, f"{name} at {n} micro-batches"
    return ranks


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_1f1b_on_two_ranks(tied, tmp_path):
    model = tiny_model(n_layers=4, tie_embeddings=tied)
    assert_equals_one_process(model, PipelineSection(), 2, [2, 3, 4], tmp_path)
