"""Storage that cannot hold a run, through the command line in a process of its own, on real file systems.

Root may write where permission bits forbid it, so folders are made unwritable by what holds for everybody:
a file in the way, a read-only mount, a small one. Mounts live in a namespace of the command's process.
"""

import asyncio
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.spec.load import load_spec
from service.coordinator import Coordinator
from service.orders import ShellInfo
from service.preflight import estimate_checkpoint
from tests.support.live_runs import command_environment

SPEC = """\
model: {preset: tiny}
data: {seq_len: 64, sources: [{kind: text, path: corpus.txt}]}
optim: {lr: 3e-4}
train: {steps: 10, global_batch_size: 4, micro_batch_size: 2}
run: {name: one, storage: storage}
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-ec")


def has_mounts() -> bool:
    told = subprocess.run([*NAMESPACE, "mount -t tmpfs none /mnt"], capture_output=True, check=False)
    return told.returncode == 0


needs_mounts = pytest.mark.skipif(not has_mounts(), reason="this machine lets no user make mount namespaces")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "corpus.txt").write_text("hello world. " * 2000)
    (tmp_path / "storage").mkdir()
    return tmp_path


def run_in(folder: Path, prepare: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command below `folder` in a mount namespace where `prepare` was done first."""
    script = f"{prepare}\nexec {shlex.join(command)}"
    return subprocess.run(
        [*NAMESPACE, script],
        cwd=folder,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def refused(folder: Path, prepare: str, *more: str) -> str:
    told = run_in(folder, prepare, sys.executable, "-m", "service", "run", "spec.yaml", *more)
    assert told.returncode == 2, told
    assert told.stdout == ""
    assert "Traceback" not in told.stderr
    (line,) = told.stderr.splitlines()
    assert list((folder / "storage").iterdir()) == []
    return line.removeprefix("error: ")


@needs_mounts
def test_a_read_only_storage(folder: Path) -> None:
    line = refused(folder, "mount -t tmpfs -o ro none storage")
    assert line == f"run.storage: {folder}/storage is on a file system that is mounted read-only"


@needs_mounts
def test_a_storage_too_small_for_one_checkpoint(folder: Path) -> None:
    """mlfoundations/open_lm#154: told before step 1, with the arithmetic."""
    n_bytes = estimate_checkpoint(load_spec(folder / "spec.yaml")).n_bytes
    assert n_bytes > 8 << 20
    line = refused(folder, "mount -t tmpfs -o size=8m none storage")
    assert line == (
        "run.storage: one checkpoint is 918,656 parameters x 12 bytes (4 weights + 4 + 4 moments) = "
        f"{n_bytes / 2**20:.2f} MiB, but {folder}/storage/one has only 8.00 MiB free: not even one fits"
    )


@needs_mounts
def test_a_full_storage(folder: Path) -> None:
    """open-mmlab/mmdetection#12069, bghira/SimpleTuner#2613: full, and said so."""
    fill = "mount -t tmpfs -o size=2m none storage; dd if=/dev/zero of=storage/x bs=1M 2>/dev/null || true"
    line = refused(folder, fill)
    assert line.startswith(
        f"run.storage: {folder}/storage: no space left on the volume (errno 28; 0.00 GiB free)"
    )


def test_a_file_in_the_place_of_the_storage(folder: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "service", "run", "spec.yaml", "--set", "run.storage=corpus.txt/below"],
        cwd=folder,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert told.returncode == 2
    assert told.stderr == (
        f"error: run.storage: {folder}/corpus.txt/below cannot be made: {folder}/corpus.txt is a file\n"
    )


SEES = """
from service.worker import ShellConfig, sees_storage
import sys
print(sees_storage(ShellConfig(sys.argv[1], "", 0, "", "", (), "", "token-of-the-driver"), tries=2))
"""


@needs_mounts
def test_a_node_with_another_disk_at_the_same_path_is_noticed(folder: Path) -> None:
    """ray-project/ray#37177: the same string, and not the same disk."""
    run_dir = folder / "storage" / "one"
    (run_dir / "control").mkdir(parents=True)
    (run_dir / "control" / "token").write_text("token-of-the-driver")
    look = (sys.executable, "-c", SEES, str(run_dir))
    shared = run_in(folder, "true", *look)
    assert shared.stdout == "True\n", shared.stderr
    other_disk = f"mount -t tmpfs none {folder}/storage"
    stale = f"{other_disk}; mkdir -p {run_dir}/control; printf token-of-another > {run_dir}/control/token"
    assert run_in(folder, other_disk, *look).stdout == "False\n"
    assert run_in(folder, stale, *look).stdout == "False\n"


async def join(coordinator: Coordinator, seeing: dict[str, bool]) -> None:
    await coordinator.begin_attempt(0, len(seeing))
    for rank, (node, sees) in enumerate(seeing.items()):
        await coordinator.join(0, ShellInfo(rank, node, f"id-{node}", 1, sees_storage=sees))


def test_nodes_that_do_not_see_the_storage_are_named_and_no_rank_starts(tmp_path: Path) -> None:
    """ray-project/ray#41832: refused at the start, not when a restore looks at the wrong node."""
    (tmp_path / "ledger").mkdir()
    coordinator = Coordinator(str(tmp_path), "{}")
    asyncio.run(join(coordinator, {"10.0.0.1": True, "10.0.0.2": False, "10.0.0.3": False}))
    outcome = asyncio.run(coordinator.outcome())
    assert outcome.kind == "failed"
    assert outcome.error == (
        f"run.storage is not shared: {tmp_path} as the driver writes it is not seen by node 10.0.0.2, "
        "10.0.0.3; mount the same storage on every node"
    )
    assert [order.kind for order in asyncio.run(coordinator.orders(0, 0))] == ["end"]
    asyncio.run(join(coordinator, {"10.0.0.1": True, "10.0.0.2": True}))
    assert [order.kind for order in asyncio.run(coordinator.orders(0, 0))] == ["start"]
