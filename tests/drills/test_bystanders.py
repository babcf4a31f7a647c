"""What only watches or tells may fail in every way: the weights are those of the undisturbed run, bit by bit.

First part: a monitor that raises and one that hangs, an address for metrics that is taken, a target of
messages that hangs and one that is dead. Second part, the same run gone on with: its ledger on a full disk
besides, and a rank killed meanwhile.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_target import dead_port, target
from tests.support.live_runs import live_run, resumed_run, shard_checksums

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]
STEPS = 60
SPEC = (f"train.steps={STEPS}", "checkpoint.every_steps=10", "train.evaluate_every_steps=20")


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """What is in the folder, on a tmpfs without a byte left."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    kept = folder.with_name("ledger-before")
    shutil.copytree(folder, kept)
    n_bytes = sum(path.stat().st_size for path in kept.iterdir()) + 65536
    mount = ["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        for path in kept.iterdir():
            shutil.copy(path, folder / path.name)
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(b"x" * 4096):
                pass
        # The last page of a file has room for some more lines: that is used up as well.
        for path in folder.glob("*.jsonl"):
            with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
                while file.write(b"\n"):
                    pass
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_what_only_watches_or_tells_may_fail(tmp_path: Path) -> None:
    with live_run(tmp_path, "calm", *SPEC) as run:
        assert run.wait() == 0, run.text()
        expected = shard_checksums(run.run_dir, STEPS)

    hanging = tmp_path / "health.fifo"
    os.mkfifo(hanging)  # whoever opens it waits for a writer that never comes
    with (
        target() as (good, got),
        target(answer_after_s=600) as (slow, _),
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        env = {
            "PACKTRAIN_KERNEL_LOG": str(tmp_path),  # a folder: reading it raises
            "PACKTRAIN_HEALTH_LINES": str(hanging),
            "OPS_SLOW": f"json://127.0.0.1:{slow}/",
            "OPS_DEAD": f"json://127.0.0.1:{dead_port()}/",
            "OPS_GOOD": f"json://127.0.0.1:{good}/",
        }
        more = (
            "tracking.notify=['${OPS_SLOW}', '${OPS_DEAD}', '${OPS_GOOD}']",
            f"tracking.metrics_port={taken.getsockname()[1]}",
        )
        with live_run(tmp_path, "beset", *SPEC, *more, env=env) as run:
            run.until_step(12)
            run.process.send_signal(signal.SIGINT)
            assert run.wait() == 3, run.text()
            assert "metrics cannot be served" in run.text()
            assert run.events("incident") == []
        at = run.last_step()
        assert at < STEPS
        with full_disk(run.run_dir / "ledger"):
            before = {path.name: path.read_bytes() for path in (run.run_dir / "ledger").glob("*.jsonl")}
            with resumed_run(tmp_path, "beset", env=env) as again:
                again.until_step(at + 5)
                os.kill(again.pid_of("packtrain[beset] rank 0:"), signal.SIGKILL)
                assert again.wait() == 0, again.text()
            after = {path.name: path.read_bytes() for path in (run.run_dir / "ledger").glob("*.jsonl")}
            assert {name: after[name] for name in before} == before  # nothing could be written down
        assert got[-1]["title"] == "beset: FINISHED"
    assert shard_checksums(run.run_dir, STEPS) == expected
