import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.mesh import AXES, EXPERT_AXES, SUMS, Mesh, sum_line

MESHES = st.builds(
    Mesh, dp=st.integers(1, 4), pp=st.integers(1, 3), cp=st.integers(1, 3), tp=st.integers(1, 4)
)


def test_the_innermost_axis_is_adjacent():
    mesh = Mesh(dp=2, pp=2, cp=1, tp=2)
    assert mesh.peers("tp", 5) == [4, 5]
    assert mesh.peers("pp", 5) == [5, 7]
    assert mesh.peers("dp", 5) == [1, 5]
    assert {axis: mesh.coordinates(5)[axis] for axis in AXES} == {"dp": 1, "pp": 0, "cp": 0, "tp": 1}


def test_experts_are_folded_into_the_other_axes_of_one_stage():
    mesh = Mesh(dp=2, pp=2, tp=2, ep=2, etp=2)
    assert mesh.world_size == 8
    assert mesh.edp == 1
    assert [mesh.peers("etp", rank) for rank in (0, 2, 5)] == [[0, 1], [2, 3], [4, 5]]
    assert [mesh.peers("ep", rank) for rank in (0, 2, 5)] == [[0, 4], [2, 6], [1, 5]]


def test_lines_of_gradient_sums():
    mesh = Mesh(dp=2, pp=2, tp=2)
    lines = {name: sum_line(mesh, 2, name) for name in SUMS}
    assert lines == {
        "data": [2, 6],
        "data_tp": [2, 3, 6, 7],
        "data_kv": [2, 6],
        "data_ends": [0, 2, 4, 6],
        "edp": [2, 3, 6, 7],
    }
    assert sum_line(mesh, 2, "data_kv", kv_replicas=2) == [2, 3, 6, 7]
    assert sum_line(Mesh(pp=3), 1, "data_ends") == [1]


@given(MESHES)
def test_coordinates_are_unique_and_peers_partition_the_world(mesh):
    seen = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.world_size)]
    assert len(set(seen)) == mesh.world_size
    for axis in (*AXES, *EXPERT_AXES):
        groups = {tuple(mesh.peers(axis, rank)) for rank in range(mesh.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert all(len(group) == getattr(mesh, axis) for group in groups)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_is_refused(rank):
    with pytest.raises(ValueError, match="outside a mesh of 8 ranks"):
        Mesh(dp=8).coordinates(rank)


def test_the_axes_longer_than_one_are_told_as_a_user_writes_them() -> None:
    assert Mesh(dp=2, pp=1, cp=4, tp=1, ep=2).factors == "dp=2 x cp=4 x ep=2"
    assert Mesh().factors == "dp=1"
