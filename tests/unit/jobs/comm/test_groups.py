import time

import pytest
import torch
import torch.distributed as dist

from jobs.comm.collectives import sum_in_place
from jobs.mesh import Mesh, sum_line
from tests.support.ranks import run_ranks


def _places(groups):
    total = torch.tensor([groups.dp.rank])
    dist.all_reduce(total, group=groups.dp.group)
    return groups.rank, groups.dp.rank, groups.dp.size, groups.world_size, total.item()


def test_each_rank_knows_its_place(tmp_path):
    assert run_ranks(_places, 3, tmp_path) == [(rank, rank, 3, 3, 3) for rank in range(3)]


def _wait_for_a_late_rank(groups):
    if groups.rank == 1:
        time.sleep(3.0)
        return 3.0
    began_at_mono_s = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.zeros(1), group=groups.dp.group)
    return time.monotonic() - began_at_mono_s


def test_a_rank_that_waits_too_long_raises_by_itself(tmp_path):
    waited_s, late_s = run_ranks(_wait_for_a_late_rank, 2, tmp_path, collective_timeout_s=1.0)
    assert 0.5 < waited_s < late_s


def _sums_of_ranks(groups):
    rank = torch.tensor([float(groups.rank)])
    lines = {"tp": groups.tp, "pp": groups.pp, "kv": groups.kv, **groups.sums}
    return {name: (axis.ranks, sum_in_place(rank.clone(), axis).item()) for name, axis in lines.items()}


def test_each_line_sums_over_its_own_ranks(tmp_path):
    mesh = Mesh(dp=2, pp=2, tp=2)
    for rank, lines in enumerate(run_ranks(_sums_of_ranks, mesh, tmp_path, kv_replicas=2)):
        assert all(total == sum(ranks) and rank in ranks for ranks, total in lines.values())
        assert lines["tp"][0] == tuple(mesh.peers("tp", rank))
        assert lines["kv"][0] == (rank // 2 * 2, rank // 2 * 2 + 1)
        assert lines["data_ends"][0] == tuple(sum_line(mesh, rank, "data_ends"))
        assert lines["data_kv"][0] == tuple(sum_line(mesh, rank, "data_kv", 2))
