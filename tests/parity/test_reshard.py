"""Saved under one layout, resumed under another: all state is equal and the losses go on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.comm.groups import Groups
from jobs.engines.build import build_engine
from jobs.engines.preload import preload_modules
from jobs.optim.schedule import lr_at
from jobs.parity.rank import train_step
from jobs.spec.compare import model_fingerprint
from jobs.spec.job import JobSpec
from ops.checkpoint.reader import find_newest, read_tensor
from service.checkpoint_hook import restore
from tests.support.checkpoints import Events
from tests.support.parity_runs import MOE, launch, layout_spec, save

pytestmark = [pytest.mark.parity, pytest.mark.timeout(240)]
RANKS_PRELOAD = preload_modules("deepspeed_zero")
CPU = torch.device("cpu")
SAVE_AT, UNTIL = 3, 6
TIED = {"tie_embeddings": True}
BIASED = MOE | {"moe": MOE["moe"] | {"router": "sigmoid", "bias_update_rate": 0.01}}
ZERO3 = {"kind": "deepspeed_zero", "stage": 3}
ZERO1 = {"kind": "deepspeed_zero", "stage": 1}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}}
Layout = Mapping[str, Any]
PAIRS: dict[str, tuple[Layout, Layout, Layout]] = {
    "tp2 pp2 -> dp4": ({"tp": 2, "pp": 2}, {"dp": 4}, TIED),
    "dp4 -> tp2 pp2": ({"dp": 4}, {"tp": 2, "pp": 2}, {}),
    "ep4 -> ep1": ({"dp": 4, "ep": 4}, {"dp": 1}, MOE),
    "ep2 etp2 -> ep2 tp2 with biases": ({"dp": 4, "ep": 2, "etp": 2}, {"tp": 2, "dp": 2, "ep": 2}, BIASED),
    "ZeRO-3 dp4 -> native tp2 cp2": (ZERO3 | {"dp": 4}, {"tp": 2, "cp": 2}, {}),
    "native cp2 tp2 -> ZeRO-1 dp2 tp2": ({"cp": 2, "tp": 2}, ZERO1 | {"dp": 2, "tp": 2}, {}),
    "zero1 dp2 tp2 -> tp4": ({"dp": 2, "tp": 2, "zero_stage": 1}, {"tp": 4}, {"vocab_size": 511}),
    "pp2 interleaved -> pp4": ({"pp": 2} | INTERLEAVED, {"pp": 4}, {"n_layers": 10, "tie_embeddings": True}),
}


def spec_of(strategy: Layout, model: Layout) -> JobSpec:
    """The same eight sequences a step under every layout."""
    return layout_spec(strategy, model, accum=8 // strategy.get("dp", 1), n_sequences=8)


def train_and_save(groups: Groups, spec: JobSpec, folder: str) -> list[float]:
    """Losses of the unbroken run; a checkpoint is left on the way."""
    engine = build_engine(spec, groups, CPU)
    losses = [train_step(engine, spec, groups, number).loss for number in range(SAVE_AT)]
    save(groups, engine, spec, folder, SAVE_AT)
    return losses + [train_step(engine, spec, groups, number).loss for number in range(SAVE_AT, UNTIL)]


def resume(groups: Groups, spec: JobSpec, folder: str) -> tuple[list[float], set[str]]:
    """Losses of the resumed run, and the names of all state that it took over."""
    engine = build_engine(spec, groups, CPU)

    def lr_of_step(number: int) -> float:
        return lr_at(spec.optim, spec.train.steps, number)

    progress = restore(engine, Path(folder), groups, model_fingerprint(spec.model), lr_of_step, Events(), CPU)
    assert progress.step == SAVE_AT
    ref = find_newest(Path(folder), lambda *_: None)
    assert ref is not None
    chunks = engine.chunks()
    for chunk in chunks:
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.tensor.shape, strict=True))
        assert torch.equal(chunk.tensor, read_tensor(ref, chunk.name)[box]), chunk.name
    return [train_step(engine, spec, groups, number).loss for number in range(SAVE_AT, UNTIL)], {
        c.name for c in chunks
    }


@pytest.mark.parametrize("name", PAIRS)
def test_the_losses_go_on_as_without_a_stop(name: str, tmp_path: Path) -> None:
    before, after, model = PAIRS[name]
    folder = str(tmp_path / "checkpoints")
    first, second = spec_of(before, model), spec_of(after, model)
    unbroken = launch(train_and_save, first, tmp_path, folder)
    resumed = launch(resume, second, tmp_path, folder)
    taken_over = set().union(*(names for _, names in resumed))
    ref = find_newest(Path(folder), lambda *_: None)
    assert ref is not None
    assert taken_over == {name for name in ref.manifest.tensors if not name.startswith("rng/")}
    assert any(name.startswith("optim/exp_avg_sq/") for name in taken_over)
    for losses, _ in resumed:
        assert losses == pytest.approx(unbroken[0][SAVE_AT:], abs=1e-5)
