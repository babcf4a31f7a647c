"""Axis order and rank arithmetic: which coordinates a rank has. Pure values: makes no process group."""

from dataclasses import dataclass

AXES = ("dp", "pp", "cp", "tp")
"""Mesh axes, outermost first: tp neighbours are adjacent ranks, dp crosses the farthest links."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes; world_size = dp * pp * cp * tp."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of a global rank on each axis.

        Raises:
            ValueError: the rank is outside the mesh.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside a mesh of {self.world_size} ranks")
        found: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def peers(self, axis: str, rank: int) -> list[int]:
        """Global ranks that differ from `rank` on one axis only (itself included), in the axis' order."""
        own = self.coordinates(rank)
        return [
            r
            for r in range(self.world_size)
            if all(self.coordinates(r)[a] == own[a] for a in AXES if a != axis)
        ]
