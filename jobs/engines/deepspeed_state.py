"""Where DeepSpeed keeps fp32 masters and moments, given out as chunks. Only publish_masters communicates.

A module parameter holds a piece (a box) of a logical parameter: all of it, or what the layout's placement
gives to a tensor-parallel rank or a pipeline stage. A Fragment is the part of one piece inside one of the
flat tensors that a rank updates. With n ranks that hold the same pieces and see other tokens (dp x cp):

    stage 0       no flat tensors: every rank holds its pieces whole, and each of the n writes a share
    stage 1, 2    a parameter group, flattened and padded at the end, is cut into n equal ranges: one a rank
    stage 3       every piece, flattened and padded at its end, is cut into n equal ranges; a rank's
                  ranges of a sub-group lie one after another in one flat tensor

DeepSpeed offers this state only one gathered parameter at a time, so its own attributes are read here; the
tests hold them to the pinned version. Takes no step and reads no file.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from jobs.comm.buckets import plan_writers
from jobs.comm.groups import Axis
from jobs.parallel.placement import Placement
from jobs.state import Chunk, boxes_of_flat_range

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state beside the step counter, under torch's names."""


@dataclass(frozen=True)
class Piece:
    """What one module parameter holds of a logical one, before DeepSpeed cuts it any further."""

    placement: Placement
    is_owned: bool
    """This rank's copy is the one that is saved, and that counts in the gradient norm."""


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + n_elements) of a flattened piece, held by this rank."""

    placement: Placement
    """The piece: its box in the logical parameter."""
    start: int
    n_elements: int
    holder: torch.Tensor
    """The fp32 tensor that the torch optimizer updates and knows the moments by."""
    offset: int
    """Where the fragment begins in the flattened holder."""
    is_writer: bool

    def of(self, laid_out_like_holder: torch.Tensor) -> torch.Tensor:
        """The fragment's elements of the holder or of a moment: [n_elements], a view."""
        return laid_out_like_holder.detach().view(-1)[self.offset : self.offset + self.n_elements]


class EngineState:
    """Masters, moments and step counter of one DeepSpeed engine, at any stage."""

    def __init__(
        self,
        zero_optimizer: Any | None,
        torch_optimizer: torch.optim.Optimizer,
        pieces: Mapping[torch.Tensor, Piece],
        data: Axis,
        start: Mapping[str, torch.Tensor] | None,
    ) -> None:
        """Find this rank's share and give it moments. Local.

        Args:
            zero_optimizer: the optimizer that deepspeed.initialize returned; None at stage 0.
            torch_optimizer: the one that was handed to it.
            pieces: what each module parameter holds.
            data: the ranks that hold the same pieces and see other tokens.
            start: fp32 start weights for masters that DeepSpeed rounded to bf16; None where it did not.
        """
        self._zero_optimizer, self._torch_optimizer = zero_optimizer, torch_optimizer
        if zero_optimizer is None:
            self._fragments = replicated_fragments(pieces, data.rank, data.size)
        else:
            self._fragments = find_fragments(zero_optimizer, pieces)
        create_moments(torch_optimizer, [fragment.holder for fragment in self._fragments])
        if start is not None:
            refine_masters(self._fragments, start)
        self._n_updates = torch.zeros(1, dtype=torch.int64)

    def count_step(self, *, skipped: bool) -> None:
        """A step was taken, or dropped. Local."""
        self._n_updates += not skipped

    def chunks(self, *, is_first_rank: bool) -> list[Chunk]:
        """As in Engine; the first rank of all writes the step counter. Local."""
        found = fragment_chunks(self._fragments, self._torch_optimizer)
        if isinstance(self._torch_optimizer, torch.optim.AdamW):
            found.append(Chunk("optim/step", (1,), (0,), self._n_updates, is_first_rank))
        return found

    def after_load(self) -> None:
        """Make step counters and forward weights agree with what was read. Collective at stages 1 to 3."""
        set_step_counters(self._torch_optimizer, int(self._n_updates))
        if self._zero_optimizer is not None:
            publish_masters(self._zero_optimizer)


def find_fragments(zero_optimizer: Any, pieces: Mapping[torch.Tensor, Piece]) -> list[Fragment]:
    """This rank's fragments under stages 1 to 3. Local.

    Args:
        zero_optimizer: the optimizer that deepspeed.initialize returned.
        pieces: what each module parameter holds.

    Raises:
        TypeError: an optimizer class whose layout is not known here.
    """
    match type(zero_optimizer).__name__:
        case "BF16_Optimizer":
            return list(_bf16_stage_1_fragments(zero_optimizer, pieces))
        case "DeepSpeedZeroOptimizer":
            return list(_stage_1_and_2_fragments(zero_optimizer, pieces))
        case "DeepSpeedZeroOptimizer_Stage3":
            return list(_stage_3_fragments(zero_optimizer, pieces))
        case other:
            raise TypeError(f"no layout is known for DeepSpeed's {other}")


def replicated_fragments(
    pieces: Mapping[torch.Tensor, Piece], data_rank: int, data_size: int
) -> list[Fragment]:
    """Stage 0: everything, in the shares that the ranks with equal pieces write. Local.

    Args:
        pieces: what each module parameter holds, in the same order on those ranks.
        data_rank: this rank's place among them.
        data_size: how many there are.
    """
    by_name = {piece.placement.name: (holder, piece) for holder, piece in pieces.items()}
    shapes = {name: piece.placement.shape for name, (_, piece) in by_name.items()}
    fragments = []
    for name, shares in plan_writers(shapes, data_size).items():
        holder, piece = by_name[name]
        row = prod(shapes[name][1:])
        for rows in shares:
            start, n_elements = rows.start * row, (rows.stop - rows.start) * row
            is_writer = piece.is_owned and rows.writer == data_rank
            fragments.append(Fragment(piece.placement, start, n_elements, holder, start, is_writer))
    return fragments


def create_moments(torch_optimizer: torch.optim.Optimizer, holders: Iterable[torch.Tensor]) -> None:
    """Zero moments and step counter 0 for fused AdamW, as its first step would make them. Local.

    A checkpoint can then be read into a fresh engine without a throw-away training step. SGD has no state.
    """
    if not isinstance(torch_optimizer, torch.optim.AdamW):
        return
    for holder in holders:
        state = torch_optimizer.state[holder]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=holder.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(
                    holder, memory_format=torch.preserve_format, requires_grad=False
                )


def set_step_counters(torch_optimizer: torch.optim.Optimizer, n_updates: int) -> None:
    """Adam's bias correction goes on from `n_updates` steps taken. Local."""
    for state in torch_optimizer.state.values():
        if "step" in state:
            state["step"].fill_(n_updates)


def fragment_chunks(fragments: Iterable[Fragment], torch_optimizer: torch.optim.Optimizer) -> list[Chunk]:
    """Masters and moments of the fragments as live views. Local."""
    chunks = []
    for fragment in fragments:
        at = fragment.placement
        state = torch_optimizer.state.get(fragment.holder, {})
        views = {f"model/{at.name}": fragment.of(fragment.holder)}
        views |= {f"optim/{m}/{at.name}": fragment.of(state[m]) for m in MOMENTS if m in state}
        boxes = boxes_of_flat_range(at.shape, fragment.start, fragment.start + fragment.n_elements)
        for name, elements in views.items():
            position = 0
            for inner, sizes in boxes:
                n_elements = prod(sizes)
                tensor = elements[position : position + n_elements].view(sizes)
                position += n_elements
                offsets = tuple(a + b for a, b in zip(at.offsets, inner, strict=True))
                chunks.append(Chunk(name, at.global_shape, offsets, tensor, fragment.is_writer))
    return chunks


@torch.no_grad()
def refine_masters(fragments: Iterable[Fragment], start: Mapping[str, torch.Tensor]) -> None:
    """Give bf16 training the fp32 start weights as masters; DeepSpeed's were rounded to bf16 before. Local.

    Args:
        fragments: this rank's.
        start: this rank's pieces by logical name, fp32.
    """
    for fragment in fragments:
        piece = start[fragment.placement.name].view(-1)
        fragment.of(fragment.holder).copy_(piece[fragment.start : fragment.start + fragment.n_elements])


def publish_masters(zero_optimizer: Any) -> None:
    """Make the weights of the forward pass equal to the masters, as the end of a step does. Collective."""
    if not hasattr(zero_optimizer, "fp32_partitioned_groups_flat"):
        zero_optimizer.update_lp_params()
        return
    zero_optimizer._partition_all_parameters()
    for sub_group in range(len(zero_optimizer.fp16_groups)):
        zero_optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
    persistent = zero_optimizer.persistent_parameters
    if persistent:
        persistent[0].all_gather(persistent)


def _bf16_stage_1_fragments(zero_optimizer: Any, pieces: Mapping[torch.Tensor, Piece]) -> Iterator[Fragment]:
    """BF16_Optimizer: what DeepSpeed takes for stage 1 in bf16 with fp32 gradient accumulation."""
    groups = zip(zero_optimizer.bf16_groups, zero_optimizer.fp32_groups_flat_partition, strict=True)
    for parameters, partition in groups:
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += parameter.numel()
        yield from _fragments_in_range(parameters, offsets, partition, zero_optimizer.dp_rank, pieces)


def _stage_1_and_2_fragments(zero_optimizer: Any, pieces: Mapping[torch.Tensor, Piece]) -> Iterator[Fragment]:
    groups = zip(
        zero_optimizer.round_robin_bit16_groups,
        zero_optimizer.round_robin_bit16_offsets,
        zero_optimizer.single_partition_of_fp32_groups,
        zero_optimizer.real_dp_process_group,
        strict=True,
    )
    for parameters, offsets, partition, group in groups:
        rank = torch.distributed.get_rank(group)
        yield from _fragments_in_range(parameters, offsets, partition, rank, pieces)


def _fragments_in_range(
    parameters: Iterable[torch.nn.Parameter],
    offsets: Iterable[int],
    partition: torch.Tensor,
    dp_rank: int,
    pieces: Mapping[torch.Tensor, Piece],
) -> Iterator[Fragment]:
    """Parts of parameters laid out at `offsets` that fall into the rank's range of the flattened group."""
    begin = dp_rank * partition.numel()
    end = begin + partition.numel()
    for parameter, offset in zip(parameters, offsets, strict=True):
        first, last = max(begin, offset), min(end, offset + parameter.numel())
        if first < last:
            yield _fragment(pieces[parameter], first - offset, last - first, partition, first - begin)


def _stage_3_fragments(zero_optimizer: Any, pieces: Mapping[torch.Tensor, Piece]) -> Iterator[Fragment]:
    sub_groups = zip(zero_optimizer.fp16_groups, zero_optimizer.fp32_partitioned_groups_flat, strict=True)
    for index, (parameters, flat) in enumerate(sub_groups):
        rank = zero_optimizer._get_sub_group_partition_rank(index)
        offset = 0
        for parameter in parameters:
            size = parameter.partition_numel()
            first, last = rank * size, min((rank + 1) * size, parameter.ds_numel)
            if first < last:  # else all of it is padding
                yield _fragment(pieces[parameter], first, last - first, flat, offset)
            offset += size


def _fragment(piece: Piece, start: int, n_elements: int, holder: torch.Tensor, offset: int) -> Fragment:
    """A fragment that no other rank with this piece holds."""
    return Fragment(piece.placement, start, n_elements, holder, offset, piece.is_owned)
