import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailedError, run_ranks


def _sum_of_ranks(groups, start):
    total = torch.tensor([groups.rank + start])
    dist.all_reduce(total, group=groups.dp.group)
    dist.all_reduce(total, group=groups.control)
    return total


def _fail_on_one(groups):
    if groups.rank == 1:
        raise KeyError("broken on purpose")
    dist.barrier(group=groups.dp.group)


def _die_on_one(groups):
    if groups.rank == 1:
        os._exit(7)
    dist.barrier(group=groups.dp.group)


def _hang(groups):
    if groups.rank == 1:
        time.sleep(600)


def test_each_rank_returns_its_result(tmp_path):
    assert run_ranks(_sum_of_ranks, 2, tmp_path, 10) == [torch.tensor([42]), torch.tensor([42])]
    assert run_ranks(_sum_of_ranks, 1, tmp_path, 10) == [torch.tensor([10])]


def test_a_rank_that_raises_shows_its_traceback(tmp_path):
    with pytest.raises(RankFailedError, match="broken on purpose"):
        run_ranks(_fail_on_one, 2, tmp_path)


def test_a_rank_that_dies_is_named(tmp_path):
    with pytest.raises(RankFailedError, match="rank 1 of 2: died with exit code 7"):
        run_ranks(_die_on_one, 2, tmp_path)


def test_ranks_that_hang_are_killed(tmp_path):
    with pytest.raises(RankFailedError, match=r"ranks \[1\] of 2 still running after 1"):
        run_ranks(_hang, 2, tmp_path, timeout_s=1.0)
