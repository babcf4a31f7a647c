"""One rank's part of a model under any layout, and the way back to whole tensors: against one process.

Builds with the product's own placements and start weights, but with no engine around: the gradient sums are
written out here, plainly, one collective a tensor.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from jobs.comm.collectives import sum_in_place
from jobs.comm.groups import Groups
from jobs.mesh import Mesh
from jobs.models.init import build_llama, initial_value, take_parameters
from jobs.models.llama import Llama
from jobs.models.losses import cross_entropy_sum
from jobs.models.operations import Operations
from jobs.parallel.placement import Placement, chunk, place_parameters
from jobs.planner.stages import Stage, plan_stages
from jobs.spec.model import ModelSpec

SEED = 5


def own_piece(whole: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The box of a whole tensor that the placement's rank holds (a copy)."""
    return whole[placement.box].clone()


def local_model(
    spec: ModelSpec,
    mesh: Mesh,
    groups: Groups,
    operations: Operations,
    *,
    stages: tuple[Stage, ...] | None = None,
    stage: Stage | None = None,
    sequence_parallel: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = SEED,
) -> tuple[Llama, dict[str, Placement]]:
    """This rank's part of the model with its start weights, and the placements of its parameters.

    Args:
        spec: the whole model.
        mesh: the layout.
        groups: this rank's place in it.
        operations: how the layout computes.
        stages: all pipeline stages; None is the plain split over pp.
        stage: the one to build; None is this rank's first.
        sequence_parallel: as in place_parameters.
        dtype: of the parameters.
        seed: of the start weights.
    """
    stages = plan_stages(spec, mesh.pp) if stages is None else stages
    if stage is None:
        stage = next(s for s in stages if s.pp_rank == groups.pp.rank)
    experts = None
    if spec.moe is not None:
        start, length = chunk(spec.moe.n_experts, mesh.ep, groups.ep.rank)
        experts = range(start, start + length)
    with torch.device("meta"):
        model = Llama(spec, operations, stage.layers, experts, is_first=stage.is_first, is_last=stage.is_last)
    held = {model.logical_name(path) for path, _ in model.named_parameters()}
    placed = place_parameters(spec, mesh, groups.rank, stages, sequence_parallel=sequence_parallel)
    placements = {name: placement for name, placement in placed.items() if name in held}
    take_parameters(
        model,
        {
            name: own_piece(initial_value(name, placement.global_shape, spec, seed), placement).to(dtype)
            for name, placement in placements.items()
        },
    )
    return model, placements


def gradients(model: Llama) -> dict[str, torch.Tensor]:
    """Each parameter's gradient by logical name; every parameter must have one."""
    found = {}
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{path} has no gradient"
        found[model.logical_name(path)] = parameter.grad
    return found


def sum_gradients(
    model: Llama, placements: Mapping[str, Placement], groups: Groups
) -> dict[str, torch.Tensor]:
    """Sum every gradient in place over its line, and return them. Collective over the world."""
    grads = gradients(model)
    for name, placement in placements.items():
        sum_in_place(grads[name], groups.sums[placement.sum_over])
    return grads


def gathered(
    tensors: Mapping[str, torch.Tensor], placements: Mapping[str, Placement], groups: Groups
) -> dict[str, torch.Tensor]:
    """Whole tensors by name on rank 0 (empty elsewhere). Collective over the world.

    Raises:
        AssertionError: copies of one box differ, or the boxes leave a hole.
    """
    pieces = [(placements[name], tensor.detach().clone()) for name, tensor in tensors.items()]
    everyone: list | None = [None] * groups.world_size if groups.rank == 0 else None
    dist.gather_object(pieces, everyone, group=groups.control)
    whole: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for placement, piece in [entry for held in everyone or [] for entry in held]:
        name = placement.name
        if name not in whole:
            whole[name] = piece.new_zeros(placement.global_shape)
            filled[name] = torch.zeros(placement.global_shape, dtype=torch.bool)
        assert piece.shape == placement.shape, f"{name}: {tuple(piece.shape)} is not {placement.shape}"
        box = tuple(slice(o, o + n) for o, n in zip(placement.offsets, placement.shape, strict=True))
        if piece.numel() and filled[name][box].all():
            torch.testing.assert_close(piece, whole[name][box], msg=lambda text, n=name: f"{n}: {text}")
        whole[name][box] = piece
        filled[name][box] = True
    for name, mask in filled.items():
        assert mask.all(), f"no rank holds part of {name}"
    return whole


def plain_gradients(
    spec: ModelSpec,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor,
    document_ids: torch.Tensor | None,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = SEED,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of cross entropies and each parameter's gradient of it: one process, one backward pass."""
    model = build_llama(spec, seed, torch.device("cpu"), dtype)
    loss = cross_entropy_sum(model(tokens, positions, document_ids), labels)
    loss.backward()
    return loss.detach(), gradients(model)
