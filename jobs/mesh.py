"""Axis order and rank arithmetic: which coordinates a rank has, on the dense mesh and on the experts'.

    dense      world = dp x pp x cp x tp      attention, dense feed-forward, embeddings
    experts    world = edp x ep x etp, for each pp coordinate

The expert axes are folded into the dense ones: the ranks of one pipeline stage, numbered by (dp, cp, tp),
are cut again into etp neighbours, then ep, then edp. So ep never multiplies the world. Pure values: makes no
process group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

AXES = ("dp", "pp", "cp", "tp")
"""Dense axes, outermost first: tp neighbours are adjacent ranks, dp crosses the farthest links."""
EXPERT_AXES = ("edp", "ep", "etp")
"""Axes of the routed experts inside one pipeline stage, outermost first."""
SIZES = (*AXES, "ep", "etp")
"""The axes that a layout is given by; edp follows from them."""
SUMS = ("data", "data_tp", "data_kv", "data_ends", "edp")
"""Lines over which gradients are summed:

data       dp x cp: the ranks that hold the same piece and see other tokens
data_tp    dp x cp x tp: whole on each tp rank, which sees its own part of the sequence (norms, routers)
data_kv    dp x cp x the tp neighbours that hold the same kv head and serve other query heads
data_ends  dp x cp x the first and last stage: tied embeddings
edp        the copies of an expert
"""


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes; world_size = dp * pp * cp * tp = edp * ep * etp * pp."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Copies of each expert: what is left of a stage's ranks after ep and etp."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def factors(self) -> str:
        """The axes longer than one, as a user writes them: "dp=2 x tp=4"; "dp=1" for one rank."""
        sizes = {axis: getattr(self, axis) for axis in SIZES}
        return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "dp=1"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of a global rank on each axis, dense and expert.

        Raises:
            ValueError: the rank is outside the mesh.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside a mesh of {self.world_size} ranks")
        found: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        in_stage = (found["dp"] * self.cp + found["cp"]) * self.tp + found["tp"]
        for axis in reversed(EXPERT_AXES):
            in_stage, found[axis] = divmod(in_stage, getattr(self, axis))
        return {axis: found[axis] for axis in (*AXES, *EXPERT_AXES)}

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """Global rank of coordinates on pp and either the other dense axes or all expert axes."""
        at = dict(coordinates)
        if "edp" in at:
            in_stage = (at["edp"] * self.ep + at["ep"]) * self.etp + at["etp"]
            in_stage, at["tp"] = divmod(in_stage, self.tp)
            at["dp"], at["cp"] = divmod(in_stage, self.cp)
        return ((at["dp"] * self.pp + at["pp"]) * self.cp + at["cp"]) * self.tp + at["tp"]

    def peers(self, axes: str | Sequence[str], rank: int) -> list[int]:
        """Global ranks that differ from `rank` on these axes only (itself included), ascending.

        Args:
            axes: one or several of AXES, or of EXPERT_AXES; never of both.
            rank: a global rank.
        """
        varying = [axes] if isinstance(axes, str) else list(axes)
        known = AXES if set(varying) <= set(AXES) else ("pp", *EXPERT_AXES)
        own = self.coordinates(rank)
        fixed = {axis: own[axis] for axis in known if axis not in varying}
        places = product(*(range(getattr(self, axis)) for axis in varying))
        return sorted(self.rank_at(fixed | dict(zip(varying, place, strict=True))) for place in places)


def sum_line(mesh: Mesh, rank: int, name: str, kv_replicas: int = 1) -> list[int]:
    """Global ranks of the line of SUMS that `rank` is on, ascending.

    Args:
        mesh: the mesh.
        rank: a global rank.
        name: one of SUMS.
        kv_replicas: neighbouring tp ranks that hold the same kv head.
    """
    own = mesh.coordinates(rank)
    match name:
        case "data":
            return mesh.peers(("dp", "cp"), rank)
        case "data_tp":
            return mesh.peers(("dp", "cp", "tp"), rank)
        case "data_kv":
            head = own["tp"] // kv_replicas
            line = mesh.peers(("dp", "cp", "tp"), rank)
            return [r for r in line if mesh.coordinates(r)["tp"] // kv_replicas == head]
        case "data_ends":
            ends = (0, mesh.pp - 1)
            if own["pp"] not in ends:
                return [rank]
            return [r for r in mesh.peers(("dp", "cp", "pp"), rank) if mesh.coordinates(r)["pp"] in ends]
        case "edp":
            return mesh.peers("edp", rank)
    raise ValueError(f"no line is called {name!r}; there are {SUMS}")
