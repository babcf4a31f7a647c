"""Who is to blame when ranks end: the first abort that explains itself, not the loudest victim."""

import itertools

import pytest

from ops.diagnosis.rank_exits import RankExit, diagnose
from ops.incident import FailureClass

VICTIM = RankExit(
    rank=0,
    node="10.0.0.1",
    at=100.2,
    exit_code=1,
    error_type="builtins.RuntimeError",
    error_text="[third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:43211",
    traceback="RuntimeError: Connection closed by peer",
)
KILLED = RankExit(rank=1, node="10.0.0.2", at=100.3, exit_code=-9)
USER_ERROR = RankExit(
    rank=2,
    node="10.0.0.2",
    at=100.4,
    exit_code=1,
    error_type="builtins.KeyError",
    error_text="'attention_mask'",
    traceback="Traceback ...\nKeyError: 'attention_mask'",
)
CLEAN = RankExit(rank=3, node="10.0.0.3", at=99.0, exit_code=0)


@pytest.mark.parametrize("exits", list(itertools.permutations([VICTIM, KILLED, CLEAN])))
def test_the_killed_rank_is_blamed_though_the_victim_spoke_first(exits: tuple[RankExit, ...]) -> None:
    found = diagnose(exits, step=7, now=101.0)
    assert found.failure_class is FailureClass.WORKER_KILLED
    assert found.culprit == "rank 1 (node 10.0.0.2)"
    assert "SIGKILL" in found.evidence
    assert (found.step, found.failed_at, found.detected_at) == (7, 100.2, 101.0)


def test_an_exception_of_the_users_is_user_code_with_its_traceback() -> None:
    found = diagnose([VICTIM, USER_ERROR], step=0, now=101.0)
    assert found.failure_class is FailureClass.USER_CODE
    assert "attention_mask" in found.evidence
    assert found.culprit.startswith("rank 2")


def test_only_victims_means_the_network() -> None:
    assert diagnose([VICTIM], step=3, now=101.0).failure_class is FailureClass.NETWORK


def test_the_class_that_the_rank_gave_is_taken() -> None:
    numeric = RankExit(
        0, "n", 5.0, 1, "jobs.errors.NumericError", "4 skipped", "...", failure_class="numerics"
    )
    assert diagnose([numeric], step=9, now=6.0).failure_class is FailureClass.NUMERICS


def test_a_user_error_that_mentions_a_time_out_is_not_taken_for_a_lost_peer() -> None:
    error = RankExit(0, "n", 5.0, 1, "builtins.ValueError", "Connection closed by peer", "ValueError")
    assert diagnose([error], step=0, now=6.0).failure_class is FailureClass.USER_CODE


def test_a_silent_exit_is_unknown() -> None:
    assert diagnose([RankExit(0, "n", 5.0, 7)], step=0, now=6.0).failure_class is FailureClass.UNKNOWN


def test_no_failure_is_no_incident() -> None:
    with pytest.raises(ValueError, match="no exit of this generation"):
        diagnose([CLEAN], step=0, now=1.0)
