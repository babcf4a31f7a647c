"""A fork server, its rank, and what the shell hears: real processes, real signals."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.env import environment
from service.fork_client import ForkServer, RankMessage
from service.rank_process import RankRequest
from service.warm_servers import Warm, warm_key

ROOT = Path(__file__).resolve().parents[3]


def request_for(tmp_path: Path, rank: int) -> RankRequest:
    return RankRequest(
        run_dir=str(tmp_path / "no-such-run"),
        data_dir="",
        attempt=0,
        generation=0,
        rank=rank,
        local_rank=rank,
        node_rank=0,
        world_size=2,
        local_world_size=2,
        node="127.0.0.1",
        log_path=str(tmp_path / f"rank-{rank}.log"),
    )


def wait_for(server: ForkServer, event: str, limit_s: float = 40.0) -> tuple[RankMessage, list[RankMessage]]:
    seen: list[RankMessage] = []
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for message in server.wait(1.0):
            seen.append(message)
            if message.event == event:
                return message, seen
    raise AssertionError(f"no {event!r} within {limit_s} s; heard {[m.event for m in seen]}")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    made = ForkServer(("torch", "no_such_module"), environment(), ROOT, tmp_path / "server.log")
    yield made
    made.close()
    assert_gone(made.pid, within_s=0.0)


def test_a_rank_gets_the_priority_that_its_server_was_told(tmp_path: Path) -> None:
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + 3
    server = ForkServer((), environment(), ROOT, tmp_path / "server.log", niceness)
    try:
        wait_for(server, "ready")
        os.mkfifo(tmp_path / "spec.json")  # the rank waits here
        server.fork(dataclasses.replace(request_for(tmp_path, 0), run_dir=str(tmp_path)))
        forked, _ = wait_for(server, "forked")
        pids = (server.pid, forked.fields["pid"])
        assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids] == [niceness, niceness]
    finally:
        server.close()


def test_a_missing_module_is_skipped_and_an_error_is_told_with_its_traceback(
    server: ForkServer, tmp_path: Path
) -> None:
    ready, _ = wait_for(server, "ready")
    assert ready.fields["missing"] == ["no_such_module"]
    started = time.monotonic()
    server.fork(request_for(tmp_path, 0))
    exited, seen = wait_for(server, "exited")
    assert exited.fields["exit_code"] == 1
    error = next(m for m in seen if m.event == "error")
    assert "no-such-run" in error.fields["traceback"]
    assert "no-such-run" in (tmp_path / "rank-0.log").read_text()
    assert time.monotonic() - started < 20
    server.fork(request_for(tmp_path, 0))  # the server is warm for the next
    assert wait_for(server, "exited")[0].fields["exit_code"] == 1


def test_a_killed_server_takes_its_rank_with_it(server: ForkServer, tmp_path: Path) -> None:
    wait_for(server, "ready")
    server.fork(hanging(tmp_path))
    forked, _ = wait_for(server, "forked")
    os.kill(server.pid, signal.SIGKILL)
    wait_for(server, "lost", 5.0)
    assert_gone(forked.fields["pid"])


def test_closing_the_shell_side_ends_server_and_rank(tmp_path: Path) -> None:
    server = ForkServer((), environment(), ROOT, tmp_path / "server.log")
    server.fork(hanging(tmp_path))
    forked, _ = wait_for(server, "forked")
    server.close()
    assert_gone(forked.fields["pid"], within_s=0.0)  # close waits for it


def test_a_killed_rank_is_reported_with_its_signal(server: ForkServer, tmp_path: Path) -> None:
    server.fork(hanging(tmp_path))
    forked, _ = wait_for(server, "forked")
    os.kill(forked.fields["pid"], signal.SIGKILL)
    assert wait_for(server, "exited")[0].fields["exit_code"] == -signal.SIGKILL


def test_a_module_that_breaks_while_it_is_imported_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "broken_driver.py").write_text(
        "raise OSError('libcuda.so.1: cannot open shared object file')"
    )
    path = f"{ROOT}:{tmp_path}"
    server = ForkServer(("broken_driver",), environment(PYTHONPATH=path), ROOT, tmp_path / "server.log")
    try:
        ready, _ = wait_for(server, "ready")
        assert ready.fields["missing"] == ["broken_driver"]
    finally:
        server.close()


def test_a_rank_whose_log_cannot_be_made_says_so(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server.fork(dataclasses.replace(request_for(tmp_path, 0), log_path=str(tmp_path / "file" / "rank.log")))
    _, seen = wait_for(server, "exited")
    error = next(m for m in seen if m.event == "error")
    assert str(tmp_path / "file") in error.fields["error_text"]


def test_a_shell_that_dies_in_the_middle_of_a_request_ends_the_server() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "service.forkserver", str(theirs.fileno()), "null"],
            cwd=ROOT,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        with ours.makefile("rb") as lines:
            started, ready = (json.loads(lines.readline()) for _ in range(2))
        assert (started["event"], ready["event"]) == ("started", "ready")
        ours.sendall(b'{"run_dir": "half a req')
        ours.close()
        try:
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait()
        assert_gone(started["pid"], within_s=0.0)


def warm_server(tmp_path: Path, key: str = "key", owner_pid: int | None = None) -> ForkServer:
    """As a shell makes it: the rank's process id and all else is of this process."""
    warm = Warm(str(tmp_path / "warm"), key, owner_pid or os.getpid())
    return ForkServer(("decimal",), environment(), ROOT, tmp_path / "server.log", warm=warm)


def sockets(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "warm").glob("*"))


def when_it_waits(tmp_path: Path) -> None:
    deadline = time.monotonic() + 10
    while not sockets(tmp_path):
        assert time.monotonic() < deadline, "no server waits"
        time.sleep(0.02)


def test_the_next_shell_takes_over_the_server_of_one_that_is_gone(tmp_path: Path) -> None:
    first = warm_server(tmp_path)
    wait_for(first, "ready")
    first.fork(hanging(tmp_path))
    forked, _ = wait_for(first, "forked")
    first.close(keep_warm=True)
    assert_gone(forked.fields["pid"], within_s=0.0)
    when_it_waits(tmp_path)
    other = warm_server(tmp_path, "another key")
    second = warm_server(tmp_path)
    try:
        assert second.pid == first.pid
        assert other.pid != first.pid
        assert sockets(tmp_path) == []
        assert wait_for(second, "ready")[0].fields["missing"] == []
        second.fork(dataclasses.replace(request_for(tmp_path, 0), run_dir=str(tmp_path / "nowhere")))
        assert wait_for(second, "exited")[0].fields["exit_code"] == 1
    finally:
        second.close()
        other.close()
    assert_gone(second.pid, within_s=0.0)


def test_a_server_whose_node_has_ended_waits_for_nobody(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as node:
        pass
    server = warm_server(tmp_path, owner_pid=node.pid)
    wait_for(server, "ready")
    server.close(keep_warm=True)
    assert_gone(server.pid)
    assert sockets(tmp_path) == []


def test_the_socket_of_a_killed_server_is_passed_over(tmp_path: Path) -> None:
    first = warm_server(tmp_path)
    wait_for(first, "ready")
    first.close(keep_warm=True)
    when_it_waits(tmp_path)
    os.kill(first.pid, signal.SIGKILL)
    assert_gone(first.pid)
    second = warm_server(tmp_path)
    second.close()
    assert second.pid != first.pid
    assert sockets(tmp_path) == []


def test_what_makes_a_server_another_one() -> None:
    plain = warm_key("run", "node", {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0"}, ("torch",))
    others = {
        warm_key("other", "node", {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0"}, ("torch",)),
        warm_key("run", "other", {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0"}, ("torch",)),
        warm_key("run", "node", {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}, ("torch",)),
        warm_key("run", "node", {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0"}, ("deepspeed",)),
    }
    assert len(others - {plain}) == 4
    assert plain == warm_key("run", "node", {"CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "0"}, ("torch",))


def hanging(tmp_path: Path) -> RankRequest:
    """A rank that waits for a store which nobody opens: its run folder holds a spec that cannot be read to
    the end."""
    run_dir = tmp_path / "no-such-run"
    run_dir.mkdir(exist_ok=True)
    os.mkfifo(run_dir / "spec.json")
    return request_for(tmp_path, 1)


def assert_gone(pid: int, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} still lives"
        time.sleep(0.02)
