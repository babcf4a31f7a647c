"""Every schedule against one process, in fp64: loss, each gradient, and evaluation."""

from dataclasses import replace

import pytest
import torch

from jobs.engines.base import MicroBatch
from jobs.engines.native import NativeEngine
from jobs.mesh import Mesh
from jobs.models.init import build_llama
from jobs.models.losses import IGNORED_LABEL, cross_entropy_sum
from jobs.models.operations import Operations
from jobs.models.router_losses import RouterLossScale
from jobs.parallel.pipeline import Pipeline
from jobs.parallel.recompute import recompute_operations
from jobs.parallel.tensor import tensor_operations
from jobs.planner.bubble import bubble_frac, busy_s, span_s
from jobs.planner.stages import plan_stages, schedule_refusal
from jobs.spec.model import MoeSpec
from jobs.spec.strategy import NativeStrategy, PipelineSection
from tests.support.layouts import SEED, gathered, gradients, local_model, sum_gradients
from tests.support.ranks import run_ranks
from tests.support.tiny_runs import n_valid, share, tiny_model, tiny_spec, whole_batch

CPU = torch.device("cpu")
TOLERANCE = 1e-12
"""fp64, relative to the largest entry."""
SCALE = 1 / 37
MICRO = 2
SEQ_LEN = 12
VOCAB = 61


def micro_batches(n: int) -> list[MicroBatch]:
    """Uneven documents and masks; no two micro-batches alike."""
    generator = torch.Generator().manual_seed(n)
    shape = (n * MICRO, SEQ_LEN)
    tokens = torch.randint(0, VOCAB, shape, generator=generator)
    labels = torch.randint(0, VOCAB, shape, generator=generator)
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


def small_model(**changes):
    shape = {"vocab_size": VOCAB, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 24, "n_layers": 4}
    return tiny_model(**(shape | changes))


def layout_operations(groups, model_spec):
    operations = tensor_operations(Operations(), groups.tp, sequence_parallel=True)
    if model_spec.moe is not None:
        operations = replace(operations, router_losses=RouterLossScale(7, SEQ_LEN))
    return operations


def pipeline_on(groups, model_spec, section, recompute="none"):
    """This rank's stages and their placements, tied embeddings one Parameter where both ends are here."""
    mesh = groups.mesh
    strategy = NativeStrategy(pp=mesh.pp, tp=mesh.tp, pipeline=section)
    spec = tiny_spec(model=model_spec).model_copy(update={"strategy": strategy})
    stages = plan_stages(model_spec, mesh.pp, section.schedule, section.stages_per_rank, section.split)
    held, placed = [], {}
    for stage in stages:
        if stage.pp_rank == groups.pp.rank:
            operations = recompute_operations(layout_operations(groups, model_spec), recompute)
            model, own = local_model(model_spec, mesh, groups, operations, stages=stages, stage=stage)
            held.append((stage, model))
            placed |= own
    first, last = held[0][1], held[-1][1]
    if model_spec.tie_embeddings and first is not last and first.is_first and last.is_last:
        last.lm_head.weight = first.embed_tokens.weight
    return Pipeline(held, spec, groups, CPU), [model for _, model in held], placed


def steps_on_rank(groups, model_spec, section, counts, recompute="none"):
    """For each number of micro-batches: loss, evaluated loss, whole gradients (rank 0), loads, trace."""
    pipeline, models, placed = pipeline_on(groups, model_spec, section, recompute)
    results = []
    for n in counts:
        batches = micro_batches(n)
        for model in models:
            model.zero_grad()
            for router in loads(model):
                router.zero_()
        loss = pipeline.run(batches, SCALE)
        grads = {}
        for model in models:
            own = {name: placed[name] for name in gradients(model) if name not in grads}
            summed = sum_gradients(model, own, groups)
            grads |= {name: summed[name] for name in own}
        evaluated = pipeline.evaluate(MicroBatch(*joined(batches)))
        counted = [int(router.sum()) for model in models for router in loads(model)]
        results.append((loss, evaluated, gathered(grads, placed, groups), counted, pipeline.last_trace()))
    return results


def loads(model):
    return [buffer for name, buffer in model.named_buffers() if name.endswith("load")]


def one_process(model_spec, batches):
    operations = Operations()
    if model_spec.moe is not None:
        operations = replace(operations, router_losses=RouterLossScale(7, SEQ_LEN))
    model = build_llama(model_spec, SEED, CPU, torch.float64, operations)
    tokens, labels, positions, ids = joined(batches)
    loss = cross_entropy_sum(model(tokens, positions, ids), labels) * SCALE
    loss.backward()
    return loss.detach(), gradients(model)


def assert_equals_one_process(model_spec, section, mesh, counts, tmp_path, recompute="none"):
    mesh = Mesh(pp=mesh) if isinstance(mesh, int) else mesh
    ranks = run_ranks(steps_on_rank, mesh, tmp_path, model_spec, section, counts, recompute)
    for number, n in enumerate(counts):
        reference_loss, reference = one_process(model_spec, micro_batches(n))
        per_rank = [results[number] for results in ranks]
        with_loss = [result for result in per_rank if float(result[0]) != 0]
        assert len(with_loss) == mesh.tp
        for loss, evaluated, *_ in with_loss:
            assert abs(float(loss / reference_loss) - 1) <= TOLERANCE
            assert abs(float(evaluated * SCALE / reference_loss) - 1) <= TOLERANCE
        assert sum(float(result[1]) != 0 for result in per_rank) == mesh.tp
        grads = per_rank[0][2]
        assert grads.keys() == reference.keys()
        for name, expected in reference.items():
            difference = (grads[name] - expected).abs().max() / expected.abs().max()
            assert float(difference) <= TOLERANCE, f"{name} with {n} micro-batches"
    return ranks


CASES = {
    "gpipe": (2, PipelineSection(schedule="gpipe"), {}, [1, 2, 3, 5]),
    "1f1b": (2, PipelineSection(), {}, [2, 3, 6]),
    "1f1b, tied": (2, PipelineSection(), {"tie_embeddings": True}, [2, 5]),
    "interleaved": (2, PipelineSection(schedule="interleaved_1f1b", stages_per_rank=2), {}, [1, 3, 4]),
    "zero-bubble": (2, PipelineSection(schedule="interleaved_zero_bubble"), {}, [1, 2, 3, 6]),
    "zbv, tied": (
        2,
        PipelineSection(schedule="zbv_zero_bubble", stages_per_rank=2),
        {"tie_embeddings": True},
        [1, 2, 5],
    ),
    "gpipe on 4": (4, PipelineSection(schedule="gpipe", split=(3, 3, 2, 2)), {"n_layers": 10}, [1, 3]),
    "1f1b on 4": (4, PipelineSection(), {"n_layers": 10, "tie_embeddings": True}, [4, 6]),
    "1f1b by parameters": (4, PipelineSection(split="parameters"), {"n_layers": 10}, [5]),
    "interleaved on 4": (
        4,
        PipelineSection(schedule="interleaved_1f1b", stages_per_rank=2),
        {"n_layers": 10, "tie_embeddings": True},
        [2, 6],
    ),
    "zero-bubble on 4": (
        4,
        PipelineSection(schedule="interleaved_zero_bubble", stages_per_rank=2),
        {"n_layers": 10},
        [4, 6],
    ),
    "zbv on 4": (4, PipelineSection(schedule="zbv_zero_bubble", stages_per_rank=2), {"n_layers": 10}, [3, 7]),
    "dualpipev on 3": (
        3,
        PipelineSection(schedule="dualpipev", stages_per_rank=2),
        {"n_layers": 7, "tie_embeddings": True},
        [6, 7],
    ),
    "dualpipev on 4": (4, PipelineSection(schedule="dualpipev", stages_per_rank=2), {"n_layers": 8}, [8]),
}


@pytest.mark.parametrize(("pp", "section", "changes", "counts"), CASES.values(), ids=CASES.keys())
def test_equals_one_process(pp, section, changes, counts, tmp_path):
    for n in counts:
        assert schedule_refusal(section.schedule, pp, section.stages_per_rank, n) is None
    assert_equals_one_process(small_model(**changes), section, pp, counts, tmp_path)


@pytest.mark.parametrize("section", [PipelineSection(), CASES["zbv, tied"][1]], ids=["1f1b", "zbv"])
def test_hidden_states_cut_over_tensor_ranks(section, tmp_path):
    model = small_model(n_kv_heads=2, tie_embeddings=True)
    assert_equals_one_process(model, section, Mesh(pp=2, tp=2), [3], tmp_path)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_experts_with_router_losses(schedule, tmp_path):
    """Their losses start in the backward pass, which zero-bubble goes through twice: each counts once."""
    moe = MoeSpec(
        n_experts=4,
        top_k=2,
        d_ff=16,
        router="sigmoid",
        balance_loss_coef=0.3,
        z_loss_coef=0.1,
        bias_update_rate=0.1,
    )
    model = small_model(moe=moe)
    ranks = assert_equals_one_process(model, PipelineSection(schedule=schedule), 2, [2, 3], tmp_path)
    for results in ranks:
        for n, (_, _, _, counted, _) in zip([2, 3], results, strict=True):
            assert counted == [n * MICRO * SEQ_LEN * moe.top_k] * 2


@pytest.mark.parametrize(
    ("schedule", "mode"), [("1f1b", "full"), ("gpipe", "ops"), ("interleaved_zero_bubble", "attention")]
)
def test_recomputation_inside_stages(schedule, mode, tmp_path):
    section = PipelineSection(schedule=schedule)
    assert_equals_one_process(small_model(), section, 2, [2, 3], tmp_path, mode)


def test_a_trace_holds_each_action_once(tmp_path):
    section = PipelineSection(schedule="interleaved_zero_bubble", stages_per_rank=2)
    ranks = run_ranks(steps_on_rank, Mesh(pp=2), tmp_path, small_model(), section, [4])
    for rank, (result,) in enumerate(ranks):
        trace = result[4]
        assert all(0 <= action.start_s <= action.end_s for action in trace)
        assert list(trace) == sorted(trace, key=lambda action: action.start_s)
        noted = sorted((a.kind, a.stage, a.micro_batch) for a in trace if a.kind.startswith("forward"))
        assert noted == [("forward", stage, i) for stage in (rank, rank + 2) for i in range(4)]
        whole, split = (
            sorted((a.stage, a.micro_batch) for a in trace if a.kind in kinds)
            for kinds in (("backward", "backward_weight"), ("backward", "backward_input"))
        )
        assert whole == split == [(stage, i) for stage in (rank, rank + 2) for i in range(4)]
        losses = sorted(a.micro_batch for a in trace if a.kind == "loss")
        assert losses == ([0, 1, 2, 3] if rank == 1 else [])
    assert 0 < bubble_frac([result[4] for (result,) in ranks]) < 1


def engine_on_rank(groups):
    """Bubbles that two steps report, and what the traces behind the second one say."""
    strategy = NativeStrategy(dp=groups.mesh.dp, pp=groups.mesh.pp)
    spec = tiny_spec(dp=groups.mesh.dp, accum=3).model_copy(update={"strategy": strategy})
    engine = NativeEngine(spec, groups, CPU)
    bubbles = []
    for step in range(2):
        batch = whole_batch(step)
        own = share(batch, groups.dp.rank, groups.mesh.dp, 3)
        bubbles.append(engine.train_step(own, n_valid(batch), 1e-3).bubble_frac)
    return bubbles, engine._pipeline and engine._pipeline.last_trace()


def test_a_step_reports_the_bubble_of_all_pipelines(tmp_path):
    results = run_ranks(engine_on_rank, Mesh(dp=2, pp=2), tmp_path)
    bubbles, traces = zip(*results, strict=True)
    assert all(own == bubbles[0] for own in bubbles)
    assert all(0 < bubble < 1 for bubble in bubbles[0])
    busy = sum(busy_s(trace) for trace in traces)
    # Ranks 0 and 2 are first stages, 1 and 3 last ones: a span is the mean over the pipelines.
    spans = [sum(span_s(traces[rank]) for rank in ranks) for ranks in ((0, 2), (1, 3))]
    assert bubbles[0][1] == pytest.approx(1 - busy / (2 * max(spans)))


def test_no_pipeline_has_no_bubble(tmp_path):
    assert run_ranks(engine_on_rank, Mesh(), tmp_path) == [([None, None], None)]


def refused_on_rank(groups):
    pipeline, *_ = pipeline_on(groups, small_model(), PipelineSection())
    try:
        pipeline.run(micro_batches(1), SCALE)
    except ValueError as error:
        return str(error)
    return None


def test_too_few_micro_batches_are_refused(tmp_path):
    for text in run_ranks(refused_on_rank, Mesh(pp=2), tmp_path):
        assert "needs 2 micro-batches a step or more; there are 1" in text
