"""A layout in DeepSpeed's terms: its mpu, what each parameter holds, gradients made whole before it sums.

ZeRO sums a gradient over the ranks that hold the same piece and see other tokens (dp x cp). Two kinds of
pieces want one more sum, over ranks that ZeRO does not know of:

    norms, routers    with sequence parallelism   every tp rank sees its part of the sequence     over tp
    k_proj, v_proj    fewer kv heads than tp      the head's neighbours serve other query heads   over kv

It is taken by a hook on the gradient, before autograd stores it, so that ZeRO only ever sees whole ones.
Takes no step.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from jobs.comm.collectives import sum_in_place
from jobs.comm.groups import Axis, Groups
from jobs.engines.deepspeed_start import GroupBook
from jobs.engines.deepspeed_state import Piece
from jobs.models.init import initial_value
from jobs.optim.grad_norm import clip_factor, squared_norm
from jobs.parallel.placement import Placement
from jobs.spec.model import ModelSpec


class ModelParallelUnit:
    """DeepSpeed's `mpu`: model parallel is tp, data parallel is dp x cp."""

    def __init__(self, groups: Groups, book: GroupBook) -> None:
        self._tp, self._data = groups.tp, groups.sums["data"]
        self._tp_group, self._data_group = book.of(self._tp), book.of(self._data)

    def get_model_parallel_rank(self) -> int:
        """Place on tp."""
        return self._tp.rank

    def get_model_parallel_world_size(self) -> int:
        """Ranks on tp."""
        return self._tp.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The tp line."""
        return self._tp_group

    def get_data_parallel_rank(self) -> int:
        """Place on dp x cp."""
        return self._data.rank

    def get_data_parallel_world_size(self) -> int:
        """Ranks on dp x cp."""
        return self._data.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The dp x cp line."""
        return self._data_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of the dp x cp line."""
        return list(self._data.ranks)


def start_pieces(spec: ModelSpec, placements: Mapping[str, Placement], seed: int) -> dict[str, torch.Tensor]:
    """Start values of this rank's pieces by logical name, fp32 on the host. Local."""
    return {
        name: initial_value(name, at.global_shape, spec, seed)[at.box].clone()
        for name, at in placements.items()
    }


def own_pieces(
    parameters: Mapping[str, torch.nn.Parameter], placements: Mapping[str, Placement], groups: Groups
) -> dict[torch.Tensor, Piece]:
    """What each parameter holds, and who of the ranks with the same box counts and saves it. Local."""
    return {
        parameter: Piece(placements[name], _is_owned(placements[name], groups))
        for name, parameter in parameters.items()
    }


def mark_counted(pieces: Mapping[torch.Tensor, Piece]) -> None:
    """Tell DeepSpeed on which tp rank a parameter counts in the gradient norm. Local.

    It counts all parameters of tp rank 0, and on other ranks those with this attribute.
    """
    for parameter, piece in pieces.items():
        parameter.tensor_model_parallel = piece.is_owned  # type: ignore[attr-defined]


def sum_partial_gradients(pieces: Mapping[torch.Tensor, Piece], groups: Groups) -> None:
    """From now on the backward pass sums gradients that would be parts. Local; the hooks are collective."""
    lines = {"data_tp": groups.tp, "data_kv": groups.kv}
    for parameter, piece in pieces.items():
        line = lines.get(piece.placement.sum_over)
        if line is not None and line.size > 1:
            parameter.register_hook(_Sum(line))  # type: ignore[no-untyped-call]


def clip_whole_gradients(
    pieces: Mapping[torch.Tensor, Piece], line: Axis, max_norm: float | None, device: torch.device
) -> float:
    """Scale this rank's gradients to the norm of all of them: stage 0, where DeepSpeed would tell none.

    Collective over `line`, on which every rank sees the same sums, so all decide alike. Gradients that are
    not finite are left as they are.

    Args:
        pieces: what each parameter holds; the gradients are theirs, summed over dp x cp already.
        line: ranks that hold the other parts of the model.
        max_norm: None scales nothing.
        device: of this rank.

    Returns:
        The norm before.
    """
    gradients = {parameter: parameter.grad for parameter in pieces if parameter.grad is not None}
    squares = [squared_norm(g.view(-1)) for parameter, g in gradients.items() if pieces[parameter].is_owned]
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    squared = torch.stack(squares).sum() if squares else nothing
    grad_norm = math.sqrt(sum_in_place(squared, line).item())
    factor = clip_factor(grad_norm, max_norm) if math.isfinite(grad_norm) else 1.0
    if factor < 1.0:
        torch._foreach_mul_(list(gradients.values()), factor)
    return grad_norm


class _Sum:
    def __init__(self, line: Axis) -> None:
        self._line = line

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        # In fp32: a sum in bf16 would round once more on every rank.
        whole = sum_in_place(gradient.to(torch.float32, copy=True), self._line)
        return whole.to(gradient.dtype)


def _is_owned(placement: Placement, groups: Groups) -> bool:
    match placement.sum_over:
        case "data_kv":
            return groups.kv.rank == 0
        case "data_ends":
            return groups.pp.rank == 0
    is_cut = placement.n_replicas == groups.sums["data"].size
    return is_cut or groups.tp.rank == 0
