"""Where each parameter lies: the one declaration that init, gradient sums, norm, checkpoints and export read.

    suffix of the name               cut over tp      gradient summed over
    embed_tokens, lm_head            rows (vocab)     data; data_ends where tied over two stages
    q_proj                           rows (heads)     data
    k_proj, v_proj                   rows (kv heads)  data; data_kv where kv heads < tp
    o_proj, down_proj                columns          data
    gate_proj, up_proj               rows             data
    norms                            not              data; data_tp with sequence parallelism
    mlp.gate (router)                not              data; data_tp with sequence parallelism
    mlp.experts.*                    the same rows and columns over etp; whole experts over ep; edp

Rows that do not divide are cut like torch.chunk: all ranks but the last few hold ceil(n / size), so a
vocabulary of 511 over 2 is 256 + 255 and nothing is ever padded. Pure: no torch, no communication.
"""

from dataclasses import dataclass

from jobs.mesh import Mesh, sum_line
from jobs.planner.stages import Stage
from jobs.spec.model import ModelSpec, parameter_shapes

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Column-parallel in the sense of arXiv 1909.08053 (outputs are cut): rows of torch's [out, in] weight."""
COLUMNS = ("o_proj", "down_proj")
"""Row-parallel (inputs are cut): columns of torch's [out, in] weight."""


@dataclass(frozen=True)
class Placement:
    """One rank's piece of one parameter."""

    name: str
    """Logical name."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Sizes of the box that this rank holds."""
    sum_over: str
    """One of jobs.mesh.SUMS: the line over which the gradients of this piece are summed."""
    n_replicas: int
    """Ranks of the whole world that hold this very box."""

    @property
    def box(self) -> tuple[slice, ...]:
        """The box as an index into the whole parameter."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.shape, strict=True))


def kv_replicas(model: ModelSpec, mesh: Mesh) -> int:
    """Neighbouring tp ranks that hold the same kv head: above one where there are fewer heads than ranks."""
    return max(1, mesh.tp // model.n_kv_heads)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of part `index` of `size` rows, as torch.chunk cuts them; the last may be shorter."""
    length = -(-size // parts)
    start = min(size, index * length)
    return start, min(size, start + length) - start


def place_parameters(
    model: ModelSpec, mesh: Mesh, rank: int, stages: tuple[Stage, ...], *, sequence_parallel: bool
) -> dict[str, Placement]:
    """Every parameter that `rank` holds, in the order in which the forward pass uses them.

    Args:
        model: the model.
        mesh: the layout.
        rank: a global rank.
        stages: all pipeline stages (jobs.planner.stages).
        sequence_parallel: norms and routers see only this rank's part of the sequence (no effect at tp=1).
    """
    pp_rank = mesh.coordinates(rank)["pp"]
    own = [stage for stage in stages if stage.pp_rank == pp_rank]
    ends_apart = stages[0].pp_rank != stages[-1].pp_rank
    found: dict[str, Placement] = {}
    for name, shape in parameter_shapes(model).items():
        part = name.split(".")
        is_here = any(stage.holds(name, model) for stage in own)
        if not is_here or not _is_own_expert(part, model, mesh, rank):
            continue
        box = _box(part, shape, model, mesh, rank)
        line = _sum_line(part, model, mesh, sequence_parallel=sequence_parallel, ends_apart=ends_apart)
        n_replicas = len(sum_line(mesh, rank, line, kv_replicas(model, mesh)))
        if line == "data" and part[-2] not in (*ROWS, *COLUMNS):
            n_replicas *= mesh.tp
        found[name] = Placement(name, shape, *box, line, n_replicas)
    return found


def _is_own_expert(part: list[str], model: ModelSpec, mesh: Mesh, rank: int) -> bool:
    if "experts" not in part:
        return True
    assert model.moe is not None
    start, length = chunk(model.moe.n_experts, mesh.ep, mesh.coordinates(rank)["ep"])
    return start <= int(part[part.index("experts") + 1]) < start + length


def _box(
    part: list[str], shape: tuple[int, ...], model: ModelSpec, mesh: Mesh, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of this rank's piece."""
    at = mesh.coordinates(rank)
    leaf = part[-2]
    n_parts, index = (mesh.etp, at["etp"]) if "experts" in part else (mesh.tp, at["tp"])
    if leaf in ("k_proj", "v_proj"):
        replicas = kv_replicas(model, mesh)
        n_parts, index = n_parts // replicas, index // replicas
    offsets, sizes = [0] * len(shape), list(shape)
    if leaf in ROWS:
        offsets[0], sizes[0] = chunk(shape[0], n_parts, index)
    elif leaf in COLUMNS:
        offsets[1], sizes[1] = chunk(shape[1], n_parts, index)
    return tuple(offsets), tuple(sizes)


def _sum_line(
    part: list[str], model: ModelSpec, mesh: Mesh, *, sequence_parallel: bool, ends_apart: bool
) -> str:
    leaf = part[-2]
    if "experts" in part:
        return "edp"
    if leaf in ("k_proj", "v_proj") and kv_replicas(model, mesh) > 1:
        return "data_kv"
    if leaf not in (*ROWS, *COLUMNS) and sequence_parallel and mesh.tp > 1:
        return "data_tp"
    if leaf == "embed_tokens" and model.tie_embeddings and ends_apart:
        return "data_ends"
    return "data"
