import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.mesh import AXES, Mesh

MESHES = st.builds(
    Mesh, dp=st.integers(1, 4), pp=st.integers(1, 3), cp=st.integers(1, 3), tp=st.integers(1, 4)
)


def test_the_innermost_axis_is_adjacent():
    mesh = Mesh(dp=2, pp=2, cp=1, tp=2)
    assert mesh.peers("tp", 5) == [4, 5]
    assert mesh.peers("pp", 5) == [5, 7]
    assert mesh.peers("dp", 5) == [1, 5]
    assert mesh.coordinates(5) == {"dp": 1, "pp": 0, "cp": 0, "tp": 1}


@given(MESHES)
def test_coordinates_are_unique_and_peers_partition_the_world(mesh):
    seen = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.world_size)]
    assert len(set(seen)) == mesh.world_size
    for axis in AXES:
        groups = {tuple(mesh.peers(axis, rank)) for rank in range(mesh.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert all(len(group) == getattr(mesh, axis) for group in groups)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_is_refused(rank):
    with pytest.raises(ValueError, match="outside a mesh of 8 ranks"):
        Mesh(dp=8).coordinates(rank)
