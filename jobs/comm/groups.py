"""Process groups: the only room that makes them. Holds no collective of its own and keeps no global state.

Everything that communicates is handed a `Groups`; nobody asks torch.distributed for "the" group.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from jobs.mesh import Mesh


@dataclass(frozen=True)
class Groups:
    """One rank's place in the mesh and the groups it communicates in."""

    mesh: Mesh
    rank: int
    """Global rank, 0 .. world_size - 1."""
    dp: dist.ProcessGroup
    """The ranks that share this rank's parameters and see other samples: gradients are summed over it."""
    control: dist.ProcessGroup
    """All ranks, always gloo: values on the host (stop requests, agreements), never on the step's path."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mesh.world_size

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self.mesh.dp

    @property
    def dp_rank(self) -> int:
        """This rank's coordinate on the dp axis."""
        return self.mesh.coordinates(self.rank)["dp"]


def init_groups(mesh: Mesh, rank: int, store: Store, backend: str, timeout_s: float) -> Groups:
    """Join the run: initialise torch.distributed and make every group. Collective over all ranks.

    Args:
        mesh: the whole mesh.
        rank: this process' global rank.
        store: a store that all ranks of this generation share and no other generation has written to.
        backend: "gloo" or "nccl": what gradients are reduced with.
        timeout_s: limit of each collective; a rank that waits longer for its peers raises.

    Raises:
        ValueError: the rank is outside the mesh, or the mesh has an axis besides dp.
    """
    mesh.coordinates(rank)
    if mesh.world_size != mesh.dp:
        raise ValueError(f"{mesh} has axes besides dp; groups are made for dp={mesh.world_size} only")
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=mesh.world_size, timeout=limit)
    world = list(range(mesh.world_size))
    # The default group is handed out as dp: a second group over the same ranks would cost each rank another
    # full set of connections, and DeepSpeed reduces over the default group.
    whole = dist.group.WORLD
    assert whole is not None
    control = dist.new_group(world, timeout=limit, backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    return Groups(mesh=mesh, rank=rank, dp=whole, control=control)


def destroy_groups(groups: Groups) -> None:
    """Leave the run. Local: waits for nobody, so a rank whose peers are gone leaves as well."""
    del groups
    dist.destroy_process_group()
