import pytest
import torch

from jobs.comm.groups import Axis
from jobs.comm.p2p import pass_on
from jobs.mesh import Mesh
from tests.support.ranks import run_ranks


def _passed(groups):
    """Two tensors under way at once, one of them not contiguous, around both lines of cp."""
    ring = groups.cp
    first = pass_on(torch.full((2, 3), float(groups.rank)), ring)
    second = pass_on(torch.arange(6).view(2, 3).t() + 100 * groups.rank, ring)
    return second.wait().tolist(), first.wait().tolist(), ring.neighbour(-1)


def test_each_rank_gets_what_the_previous_one_sent(tmp_path):
    for rank, (second, first, previous) in enumerate(run_ranks(_passed, Mesh(dp=2, cp=2), tmp_path)):
        assert previous == rank ^ 1
        assert first == [[float(previous)] * 3] * 2
        assert second == (torch.arange(6).view(2, 3).t() + 100 * previous).tolist()


def test_one_rank_passes_nothing_on():
    """Without a group torch would send to the whole world."""
    with pytest.raises(ValueError, match="a ring of one rank has nobody to pass"):
        pass_on(torch.zeros(1), Axis((0,), 0, None))
