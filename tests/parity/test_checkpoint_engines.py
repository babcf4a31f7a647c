"""One format for all engines: saved under one, resumed under others through files, moments included."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from jobs.comm.groups import Groups
from jobs.engines.build import build_engine
from jobs.engines.preload import preload_modules
from jobs.events import Progress
from jobs.optim.schedule import lr_at
from jobs.spec.job import JobSpec
from jobs.spec.strategy import DeepspeedZeroStrategy
from ops.checkpoint.manifest import Identity
from ops.checkpoint.reader import find_newest, read_tensor
from ops.checkpoint.writer import AsyncWriter, Peers
from service.checkpoint_hook import restore
from tests.support.checkpoints import Events
from tests.support.ranks import run_ranks
from tests.support.tiny_runs import engine_step, plain_loop, tiny_spec

pytestmark = pytest.mark.parity
RANKS_PRELOAD = preload_modules("deepspeed_zero")
SAVE_AT, UNTIL = 4, 8


def spec_of(kind: str, dp: int) -> JobSpec:
    spec = tiny_spec(dp=dp)
    if kind == "native":
        return spec
    strategy = DeepspeedZeroStrategy(kind="deepspeed_zero", dp=dp, stage=int(kind[-1]))
    return spec.model_copy(update={"strategy": strategy})


def train_and_save(groups: Groups, kind: str, folder: str) -> list[float]:
    spec = spec_of(kind, groups.world_size)
    engine = build_engine(spec, groups, torch.device("cpu"))
    losses = [engine_step(engine, spec, groups.rank, step).loss for step in range(SAVE_AT)]
    peers = Peers(groups.rank, groups.world_size, dist.FileStore(f"{folder}.store", groups.world_size))
    writer = AsyncWriter(Path(folder), Identity("{}", kind, groups.mesh), peers, Events())
    writer.save(engine.chunks(), Progress(SAVE_AT))
    assert writer.wait(30)
    return losses


def resume(groups: Groups, kind: str, folder: str) -> list[float]:
    spec = spec_of(kind, groups.world_size)
    engine = build_engine(spec, groups, torch.device("cpu"))
    progress = restore(
        engine,
        Path(folder),
        groups,
        "{}",
        lambda step: lr_at(spec.optim, spec.train.steps, step),
        Events(),
        torch.device("cpu"),
    )
    assert progress.step == SAVE_AT
    ref = find_newest(Path(folder), lambda *_: None)
    assert ref is not None
    for chunk in engine.chunks():
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.tensor.shape, strict=True))
        assert torch.equal(chunk.tensor, read_tensor(ref, chunk.name)[box]), chunk.name
    return [engine_step(engine, spec, groups.rank, step).loss for step in range(SAVE_AT, UNTIL)]


@pytest.mark.parametrize(
    ("saved_by", "n_saving", "resumed_by"),
    [("zero3", 4, [("zero1", 2), ("native", 1)]), ("native", 2, [("zero3", 3)])],
)
def test_state_is_equal_and_the_losses_go_on(
    tmp_path: Path, saved_by: str, n_saving: int, resumed_by: list[tuple[str, int]]
) -> None:
    # deepspeedai/DeepSpeed#2898
    expected, _, _ = plain_loop(spec_of("native", 1), UNTIL)
    folder = str(tmp_path / "checkpoints")
    first = run_ranks(train_and_save, n_saving, tmp_path, saved_by, folder)
    assert first[0] == pytest.approx(expected[:SAVE_AT], abs=1e-5)
    for kind, n_ranks in resumed_by:
        rest = run_ranks(resume, n_ranks, tmp_path, kind, folder)
        assert rest[0] == pytest.approx(expected[SAVE_AT:], abs=1e-5)
