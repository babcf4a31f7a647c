"""Process groups: the only room that makes them. Holds no collective of its own and keeps no global state.

Everything that communicates is handed an `Axis` of `Groups`; nobody asks torch.distributed for "the" group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from jobs.mesh import SUMS, Mesh, sum_line


@dataclass(frozen=True)
class Axis:
    """The ranks of one line of the mesh that this rank is on."""

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    rank: int
    """This rank's place in the line, 0 .. size - 1."""
    group: dist.ProcessGroup | None
    """None where the line is this rank alone."""

    @property
    def size(self) -> int:
        """Ranks on the line."""
        return len(self.ranks)

    def neighbour(self, distance: int) -> int:
        """Global rank of the rank so many places further, around the end."""
        return self.ranks[(self.rank + distance) % self.size]


@dataclass(frozen=True)
class Groups:
    """One rank's place in the mesh and the lines it communicates on."""

    mesh: Mesh
    rank: int
    """Global rank, 0 .. world_size - 1."""
    world: Axis
    dp: Axis
    """Same parameters, other samples."""
    pp: Axis
    """The pipeline's stages, first to last."""
    cp: Axis
    """Same samples, other parts of each sequence."""
    tp: Axis
    """Same tokens, other parts of each matrix."""
    kv: Axis
    """Neighbours on tp that hold the same kv head (one rank, unless there are fewer heads than tp ranks)."""
    ep: Axis
    """Other experts, of the same stage."""
    etp: Axis
    """Other parts of the same experts."""
    sums: dict[str, Axis]
    """By the names in jobs.mesh.SUMS: the ranks that a gradient is summed over."""
    control: dist.ProcessGroup
    """All ranks, always gloo: values on the host (stop requests, agreements), never on the step's path."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mesh.world_size


def init_groups(
    mesh: Mesh, rank: int, store: Store, backend: str, timeout_s: float, kv_replicas: int = 1
) -> Groups:
    """Join the run: initialise torch.distributed and make every group. Collective over all ranks.

    Args:
        mesh: the whole mesh.
        rank: this process' global rank.
        store: a store that all ranks of this generation share and no other generation has written to.
        backend: "gloo" or "nccl": what tensors of the step are exchanged with.
        timeout_s: limit of each collective; a rank that waits longer for its peers raises.
        kv_replicas: neighbouring tp ranks that hold the same kv head (jobs.parallel.placement).

    Raises:
        ValueError: the rank is outside the mesh.
    """
    mesh.coordinates(rank)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=mesh.world_size, timeout=limit)
    maker = _AxisMaker(mesh, rank, limit)
    control = dist.new_group(list(range(mesh.world_size)), timeout=limit, backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    groups = Groups(
        mesh=mesh,
        rank=rank,
        world=maker.axis(range(mesh.world_size)),
        dp=maker.axis(mesh.peers("dp", rank)),
        pp=maker.axis(mesh.peers("pp", rank)),
        cp=maker.axis(mesh.peers("cp", rank)),
        tp=maker.axis(mesh.peers("tp", rank)),
        kv=maker.axis([r for r in mesh.peers("tp", rank) if r // kv_replicas == rank // kv_replicas]),
        ep=maker.axis(mesh.peers("ep", rank)),
        etp=maker.axis(mesh.peers("etp", rank)),
        sums={name: maker.axis(sum_line(mesh, rank, name, kv_replicas)) for name in SUMS},
        control=control,
    )
    dist.barrier(group=control)  # gloo: no rank may leave while another still connects to it
    return groups


def make_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """One more group, for a library that wants groups of its own, even of one rank. Collective over `ranks`.

    Args:
        ranks: its members, this rank among them.
        timeout_s: limit of each of its collectives.
    """
    limit = timedelta(seconds=timeout_s)
    group = dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def destroy_groups(groups: Groups) -> None:
    """Leave the run. Local: waits for nobody, so a rank whose peers are gone leaves as well."""
    del groups
    dist.destroy_process_group()


class _AxisMaker:
    """Makes each group once: equal lines share one, and the whole world is the default group.

    A second group over the same ranks would cost each rank another full set of connections, and DeepSpeed
    reduces over the default group. All ranks ask for the same kinds of lines in the same order.
    """

    def __init__(self, mesh: Mesh, rank: int, limit: timedelta) -> None:
        self._rank, self._limit = rank, limit
        whole = dist.group.WORLD
        assert whole is not None
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(mesh.world_size)): whole}

    def axis(self, line: Sequence[int]) -> Axis:
        """This rank's line. Collective over the line."""
        own = tuple(line)
        if len(own) == 1:
            return Axis(own, 0, None)
        if own not in self._made:
            # Only the members meet: a world of many lines need not wait for one another.
            group = dist.new_group(list(own), timeout=self._limit, use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            self._made[own] = group
        return Axis(own, own.index(self._rank), self._made[own])
