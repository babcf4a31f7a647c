import time

import pytest
import torch
import torch.distributed as dist

from jobs.comm.groups import init_groups
from jobs.mesh import Mesh
from tests.support.ranks import run_ranks


def _places(groups):
    total = torch.tensor([groups.dp_rank])
    dist.all_reduce(total, group=groups.dp)
    return groups.rank, groups.dp_rank, groups.dp_size, groups.world_size, total.item()


def test_each_rank_knows_its_place(tmp_path):
    assert run_ranks(_places, 3, tmp_path) == [(rank, rank, 3, 3, 3) for rank in range(3)]


def _wait_for_a_late_rank(groups):
    if groups.rank == 1:
        time.sleep(3.0)
        return 3.0
    began_at_mono_s = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.zeros(1), group=groups.dp)
    return time.monotonic() - began_at_mono_s


def test_a_rank_that_waits_too_long_raises_by_itself(tmp_path):
    waited_s, late_s = run_ranks(_wait_for_a_late_rank, 2, tmp_path, collective_timeout_s=1.0)
    assert 0.5 < waited_s < late_s


def test_a_mesh_with_other_axes_is_refused():
    with pytest.raises(ValueError, match="axes besides dp"):
        init_groups(Mesh(dp=2, tp=2), 0, dist.HashStore(), "gloo", 1.0)
