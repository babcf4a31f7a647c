"""Which layers each pipeline stage holds, and which pipeline rank holds which stages. Pure; runs nothing.

one stage a rank          0 1 2 3            rank i holds stage i
interleaved, 2 a rank     0 1 2 3 0 1 2 3    stage i is on rank i mod pp (arXiv 2104.04473, 2.2)
V-shaped, 2 a rank        0 1 2 3 3 2 1 0    first and last stage on rank 0 (arXiv 2401.10241, 5)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from jobs.spec.model import ModelSpec, parameter_shapes
from jobs.spec.strategy import PipelineSchedule, Recompute, Split

V_SHAPED: frozenset[PipelineSchedule] = frozenset({"zbv_zero_bubble", "dualpipev"})
INTERLEAVED: frozenset[PipelineSchedule] = frozenset({"interleaved_1f1b", "interleaved_zero_bubble"})
SPLIT_BACKWARD: frozenset[PipelineSchedule] = frozenset({"interleaved_zero_bubble", *V_SHAPED})
"""Take the backward pass apart: first the inputs' gradients, which others wait for, the weights' later."""


@dataclass(frozen=True)
class Stage:
    """A run of layers that one rank computes without sending anything."""

    index: int
    pp_rank: int
    layers: range
    """Global layer numbers."""
    is_first: bool
    """Looks up the embedding."""
    is_last: bool
    """Applies the final norm and the head, and takes the loss."""

    def holds(self, name: str, model: ModelSpec) -> bool:
        """Whether it computes with a parameter, by logical name; tied embeddings are on both ends."""
        part = name.split(".")
        if part[0] == "layers":
            return int(part[1]) in self.layers
        if part[0] == "embed_tokens":
            return self.is_first or (self.is_last and model.tie_embeddings)
        return self.is_last


ONE_STAGE_SCHEDULE: PipelineSchedule = "1f1b"


def plan_stages(
    model: ModelSpec,
    pp: int,
    schedule: PipelineSchedule = ONE_STAGE_SCHEDULE,
    stages_per_rank: int = 1,
    split: Split = "layers",
) -> tuple[Stage, ...]:
    """All stages, first to last.

    Args:
        model: the model.
        pp: pipeline ranks.
        schedule: decides where virtual stages lie.
        stages_per_rank: virtual stages on each rank.
        split: see jobs.spec.strategy.Split.

    Raises:
        ValueError: fewer layers than stages, or a list that does not add up; says both numbers.
    """
    n_stages = pp * stages_per_rank
    counts = _layer_counts(model, n_stages, split)
    stages = []
    first = 0
    for index, count in enumerate(counts):
        layers = range(first, first + count)
        pp_rank = rank_of_stage(schedule, pp, index)
        stages.append(Stage(index, pp_rank, layers, index == 0, index == n_stages - 1))
        first += count
    return tuple(stages)


def rank_of_stage(schedule: PipelineSchedule, pp: int, index: int) -> int:
    """Pipeline rank that holds a stage."""
    turn, place = divmod(index, pp)
    return pp - 1 - place if schedule in V_SHAPED and turn % 2 == 1 else place


def schedule_refusal(
    schedule: PipelineSchedule, pp: int, stages_per_rank: int, n_micro_batches: int
) -> str | None:
    """Why a schedule cannot run, in one sentence that says what to change; None where it can.

    Args:
        schedule: the schedule.
        pp: pipeline ranks, two or more.
        stages_per_rank: virtual stages on each rank.
        n_micro_batches: micro-batches of a step (grad_accum_steps).
    """
    if schedule in ("gpipe", "1f1b") and stages_per_rank != 1:
        return (
            f"pipeline.schedule={schedule} has one stage a rank and stages_per_rank={stages_per_rank}; "
            "set stages_per_rank to 1 or take an interleaved schedule"
        )
    if schedule == "interleaved_1f1b" and stages_per_rank < 2:
        return "pipeline.schedule=interleaved_1f1b with stages_per_rank=1 is 1f1b; take that, or more stages"
    if schedule in V_SHAPED and stages_per_rank != 2:
        return (
            f"pipeline.schedule={schedule} folds the pipeline once, so each rank has two stages; "
            f"stages_per_rank={stages_per_rank}: set it to 2"
        )
    needed = {"1f1b": pp, "dualpipev": 2 * pp}.get(schedule, 1)
    if n_micro_batches < needed:
        return (
            f"pipeline.schedule={schedule} over pp={pp} needs {needed} micro-batches a step or more; "
            f"there are {n_micro_batches}: raise train.global_batch_size, lower train.micro_batch_size, or "
            "take gpipe"
        )
    rounds = max(1, n_micro_batches // pp)
    if schedule in INTERLEAVED and n_micro_batches % rounds:
        return (
            f"pipeline.schedule={schedule} over pp={pp} runs micro-batches in {rounds} equal rounds; "
            f"{n_micro_batches} of them do not divide: use {n_micro_batches // pp * pp} or "
            f"{-(-n_micro_batches // pp) * pp}"
        )
    return None


def recompute_refusal(schedule: PipelineSchedule, modes: Sequence[Recompute]) -> str | None:
    """Why stages cannot recompute so under a schedule, in one sentence; None where they can.

    torch's checkpoints compute a layer again for each pass through its graph, and a backward pass taken
    apart is one pass for the input and one for nearly each weight: "full" would run every layer about ten
    times, and "ops" forbids the second pass.

    Args:
        schedule: the schedule.
        modes: of the stages.
    """
    barred = sorted({mode for mode in modes if mode in ("full", "ops")})
    if schedule in SPLIT_BACKWARD and barred:
        return (
            f"recompute={barred[0]} does not go with pipeline.schedule={schedule}, which takes the backward "
            "pass apart: use recompute=attention or none, or the schedule 1f1b or interleaved_1f1b"
        )
    return None


def stage_params(model: ModelSpec, stages: tuple[Stage, ...]) -> list[int]:
    """Trained parameters of each stage; tied embeddings count on the first and on the last."""
    embedding, layers, end = _sizes(model)
    return [
        sum(layers[i] for i in stage.layers) + embedding * stage.is_first + end * stage.is_last
        for stage in stages
    ]


def _layer_counts(model: ModelSpec, n_stages: int, split: Split) -> list[int]:
    if not isinstance(split, str):
        if len(split) != n_stages or sum(split) != model.n_layers:
            raise ValueError(
                f"pipeline.split={list(split)} has {len(split)} stages and {sum(split)} layers; "
                f"there are {n_stages} stages (pp x stages_per_rank) and {model.n_layers} layers"
            )
        return list(split)
    if model.n_layers < n_stages:
        raise ValueError(
            f"{model.n_layers} layers do not fill {n_stages} pipeline stages (pp x stages_per_rank); "
            f"use at most {model.n_layers} stages"
        )
    if split == "layers":
        each, more = divmod(model.n_layers, n_stages)
        return [each + (index < more) for index in range(n_stages)]
    return _even_by_parameters(model, n_stages)


def _even_by_parameters(model: ModelSpec, n_stages: int) -> list[int]:
    """The contiguous split, at least one layer a stage, whose largest stage is smallest."""
    embedding, layers, end = _sizes(model)
    n = len(layers)
    before = [0]
    for size in layers:
        before.append(before[-1] + size)

    def weight(start: int, stop: int, stage: int) -> int:
        ends = embedding * (stage == 0) + end * (stage == n_stages - 1)
        return before[stop] - before[start] + ends

    # best[stop]: the largest stage of the best split of layers [0, stop) over the stages so far.
    best: dict[int, tuple[int, list[int]]] = {stop: (weight(0, stop, 0), [stop]) for stop in range(1, n + 1)}
    for stage in range(1, n_stages):
        best = {
            stop: min(
                (max(best[start][0], weight(start, stop, stage)), [*best[start][1], stop - start])
                for start in range(stage, stop)
            )
            for stop in range(stage + 1, n + 1)
        }
    return best[n][1]


def _sizes(model: ModelSpec) -> tuple[int, list[int], int]:
    """Parameters of the embedding, of each layer, and of final norm with head."""
    layers = [0] * model.n_layers
    for name, shape in parameter_shapes(model).items():
        if name.startswith("layers."):
            layers[int(name.split(".")[1])] += prod(shape)
    embedding = model.vocab_size * model.d_model
    return embedding, layers, embedding + model.d_model
