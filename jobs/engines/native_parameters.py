"""The native engine's memory: this rank's pieces of the parameters, flat, bucket by bucket. Takes no step.

    weights     |  bucket 0  |  bucket 1  | ...   what forward and backward use
    masters     |            |            |       what the optimizer moves: the weights, or fp32 beside them
    gradients   |            |            |       summed over the bucket's ranks while backward runs

All pieces in a bucket are summed over the same line of ranks and held by the same number of ranks. With
zero_stage 1 masters (and moments) cover this rank's span of each bucket only:

    bucket of 4 ranks   |  rank 0  |  rank 1  |  rank 2  |  rank 3  |   gradients: reduce-scatter
    weights             |<------------- all-gather ---------------->|   after the update
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from jobs.comm.buckets import Bucket, plan_buckets, plan_writers
from jobs.comm.groups import Axis, Groups
from jobs.engines.layout import operations_for
from jobs.models.init import initial_value, take_parameters
from jobs.models.llama import Llama
from jobs.parallel.placement import chunk, place_parameters
from jobs.planner.stages import Stage, plan_stages
from jobs.spec.job import JobSpec
from jobs.spec.model import ModelSpec
from jobs.spec.strategy import NativeStrategy
from jobs.state import Chunk, boxes_of_flat_range


@dataclass(frozen=True)
class Precision:
    """Element types of what a parameter needs."""

    weights: torch.dtype
    masters: torch.dtype
    gradients: torch.dtype


PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "fp64": Precision(torch.float64, torch.float64, torch.float64),
    "bf16": Precision(torch.bfloat16, torch.float32, torch.float32),
    "bf16_kahan": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp8": Precision(torch.bfloat16, torch.float32, torch.float32),
}
"""By train.precision."""


@dataclass(frozen=True)
class FlatBucket:
    """One bucket of this rank."""

    plan: Bucket
    axis: Axis
    """Ranks that the gradients are summed over."""
    n_replicas: int
    """Ranks of the whole world that hold these very pieces: axis.size, or more where the rest has the sum."""
    span: slice
    """What this rank updates: all of the bucket, or its part of it under zero_stage 1."""
    weights: torch.Tensor
    """[plan.stop]; the modules' parameters are views of it."""
    masters: torch.Tensor
    """[length of span]; a view of the weights where they are of one type."""
    gradients: torch.Tensor
    """[plan.stop]."""

    @property
    def n_span_holders(self) -> int:
        """Ranks of the whole world that keep this span of the gradients."""
        return int(self.n_replicas * (self.span.stop - self.span.start) // self.plan.stop)


class NativeParameters:
    """Modules of this rank's stages over flat buckets."""

    def __init__(self, spec: JobSpec, groups: Groups, device: torch.device) -> None:
        """Build the modules with their start weights. Local.

        Args:
            spec: the run; spec.strategy is native.
            groups: this rank's groups.
            device: where everything lives.

        Raises:
            ValueError: the modules and the placement disagree about names or shapes.
        """
        strategy = spec.strategy
        assert isinstance(strategy, NativeStrategy)
        pipeline = strategy.pipeline
        stages = (
            plan_stages(spec.model, strategy.pp, pipeline.schedule, pipeline.stages_per_rank, pipeline.split)
            if strategy.pp > 1
            else plan_stages(spec.model, pp=1)
        )
        self._groups = groups
        self.placements = place_parameters(
            spec.model, groups.mesh, groups.rank, stages, sequence_parallel=strategy.sequence_parallel
        )
        self._spec, self._device = spec, device
        precision = PRECISIONS[spec.train.precision]
        self.buckets = self._plan(strategy, precision)
        self._draw(precision)
        self._views = {
            slot.name: bucket.weights[slot.start : slot.stop].view(slot.shape)
            for bucket in self.buckets
            for slot in bucket.plan.slots
        }
        self.parameters: dict[str, list[torch.nn.Parameter]] = {name: [] for name in self.placements}
        """By logical name: more than one where two stages on this rank hold the same piece of memory."""
        own = [stage for stage in stages if stage.pp_rank == groups.pp.rank]
        self.modules = [(stage, self._module(stage)) for stage in own]

    def publish(self) -> None:
        """Give the weights what the masters hold. Collective over each bucket's ranks under zero_stage 1."""
        gathers = []
        for bucket in self.buckets:
            part = bucket.weights[bucket.span]
            if bucket.masters.dtype != bucket.weights.dtype:
                part.copy_(bucket.masters)
            if len(part) < bucket.plan.stop:
                gathers.append(
                    dist.all_gather_single(bucket.weights, part, group=bucket.axis.group, async_op=True)
                )
        for gather in gathers:
            gather.wait()

    def chunks(self, kind: str, flats: Sequence[torch.Tensor]) -> list[Chunk]:
        """State that is laid out like the masters, one tensor a bucket, as chunks `<kind>/<name>`. Local."""
        found: list[Chunk] = []
        for bucket, flat in zip(self.buckets, flats, strict=True):
            # Of ranks that hold the same pieces without summing them, the first on the tp axis writes.
            is_first_copy = bucket.n_replicas == bucket.axis.size or self._groups.tp.rank == 0
            for name, start, stop, writer in self._parts(bucket):
                placement = self.placements[name]
                is_writer = is_first_copy and writer == bucket.axis.rank
                at = self._slots[name].start + start - bucket.span.start
                for offsets, sizes in boxes_of_flat_range(placement.shape, start, stop):
                    n_elements = prod(sizes)
                    found.append(
                        Chunk(
                            name=f"{kind}/{name}",
                            global_shape=placement.global_shape,
                            offsets=tuple(a + b for a, b in zip(placement.offsets, offsets, strict=True)),
                            tensor=flat[at : at + n_elements].view(sizes),
                            is_writer=is_writer,
                        )
                    )
                    at += n_elements
        return found

    def _parts(self, bucket: FlatBucket) -> list[tuple[str, int, int, int]]:
        """Name, first and last element, and writer of what this rank holds of each piece in the bucket."""
        if len(bucket.masters) < bucket.plan.stop:
            parts = []
            for slot in bucket.plan.slots:
                start, stop = max(slot.start, bucket.span.start), min(slot.stop, bucket.span.stop)
                if start < stop:
                    parts.append((slot.name, start - slot.start, stop - slot.start, bucket.axis.rank))
            return parts
        return [
            (slot.name, rows.start * row, rows.stop * row, rows.writer)
            for slot in bucket.plan.slots
            for row in [prod(slot.shape[1:])]
            for rows in self._writers[slot.name]
        ]

    def _plan(self, strategy: NativeStrategy, precision: Precision) -> list[FlatBucket]:
        """All buckets, in the order in which the backward pass fills them."""
        families: dict[tuple[str, int], dict[str, tuple[int, ...]]] = {}
        for placement in self.placements.values():
            family = families.setdefault((placement.sum_over, placement.n_replicas), {})
            family[placement.name] = placement.shape
        self._writers = {}
        planned: list[tuple[Bucket, Axis, int]] = []
        for (line, n_replicas), shapes in families.items():
            axis = self._groups.sums[line]
            self._writers.update(plan_writers(shapes, axis.size))
            n_parts = axis.size if strategy.zero_stage == 1 else 1
            planned += [
                (plan, axis, n_replicas)
                for plan in plan_buckets(shapes, strategy.bucket_mib * 2**20, n_parts)
            ]
        # Full once its first parameter of the forward pass has its gradient.
        place = {name: number for number, name in enumerate(self.placements)}
        planned.sort(key=lambda item: -min(place[slot.name] for slot in item[0].slots))
        buckets = []
        for plan, axis, n_replicas in planned:
            length = plan.stop // axis.size if strategy.zero_stage == 1 else plan.stop
            first = axis.rank * length if strategy.zero_stage == 1 else 0
            span = slice(first, first + length)
            weights = torch.zeros(plan.stop, dtype=precision.weights, device=self._device)
            if precision.masters == precision.weights:
                masters = weights[span]
            else:
                masters = torch.zeros(length, dtype=precision.masters, device=self._device)
            gradients = torch.zeros(plan.stop, dtype=precision.gradients, device=self._device)
            buckets.append(FlatBucket(plan, axis, n_replicas, span, weights, masters, gradients))
        self._slots = {slot.name: slot for bucket in buckets for slot in bucket.plan.slots}
        return buckets

    def _draw(self, precision: Precision) -> None:
        """Start values: those of the whole parameter, whatever piece of it is held here."""
        seed = self._spec.run.seed
        for bucket in self.buckets:
            for slot in bucket.plan.slots:
                placement = self.placements[slot.name]
                whole = initial_value(slot.name, placement.global_shape, self._spec.model, seed)
                piece = whole[placement.box].to(self._device)
                bucket.weights[slot.start : slot.stop].view(slot.shape).copy_(piece)
                if precision.masters != precision.weights:
                    start, stop = max(slot.start, bucket.span.start), min(slot.stop, bucket.span.stop)
                    if start < stop:
                        part = piece.reshape(-1)[start - slot.start : stop - slot.start]
                        bucket.masters[start - bucket.span.start : stop - bucket.span.start].copy_(part)

    def _module(self, stage: Stage) -> Llama:
        model, groups = self._spec.model, self._groups
        operations = operations_for(self._spec, groups, self._device, stage.index)
        with torch.device("meta"):
            module = Llama(
                model,
                operations,
                stage.layers,
                _own_experts(model, groups),
                is_first=stage.is_first,
                is_last=stage.is_last,
            )
        names = [name for name in self.placements if stage.holds(name, model)]
        for path, parameter in module.named_parameters():
            name = module.logical_name(path)
            placement = self.placements.get(name)
            if placement is not None and tuple(parameter.shape) != placement.global_shape:
                raise ValueError(
                    f"{name} is built with shape {list(parameter.shape)}, "
                    f"the spec says {list(placement.global_shape)}"
                )
        taken = take_parameters(module, {name: self._views[name] for name in names})
        for name, parameter in taken.items():
            self.parameters[name].append(parameter)
        return module


def _own_experts(model: ModelSpec, groups: Groups) -> range | None:
    if model.moe is None:
        return None
    start, length = chunk(model.moe.n_experts, groups.mesh.ep, groups.ep.rank)
    return range(start, start + length)
