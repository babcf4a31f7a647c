"""A stopped run goes on at another size, ZeRO stage and engine, through the parts that a rank is made of.

deepspeedai/DeepSpeed#2898: with optimizer moments, the losses of the run that never stopped.
mosaicml/streaming#880: with every sample once an epoch, in the order of the run that never stopped.
"""

import logging
import shutil
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from jobs.comm.groups import Groups
from jobs.data.batches import BatchSource
from jobs.data.prepare import load_prepared, prepare
from jobs.engines.base import Engine
from jobs.engines.build import build_engine
from jobs.engines.preload import preload_modules
from jobs.events import EvalRecord, Progress, StepRecord
from jobs.optim.schedule import lr_at
from jobs.spec.compare import model_fingerprint
from jobs.spec.job import JobSpec
from jobs.trainer import train
from ops.checkpoint.manifest import Identity
from ops.checkpoint.writer import Peers
from service.checkpoint_hook import CheckpointHook, restore
from tests.support.checkpoints import Events
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.parity
RANKS_PRELOAD = (*preload_modules("deepspeed_zero"), "service.checkpoint_hook", "ops.checkpoint.writer")

N_SAMPLES, SEQ_LEN, GLOBAL_BATCH = 99, 12, 12
STOP_AT, STEPS = 5, 10  # an epoch is 8.25 steps: its end lies behind the stop
CPU = torch.device("cpu")

ENGINES = ("zero1", "zero2", "zero3", "native")
RESUMED_AT = {
    2: {"zero1": "zero3", "zero2": "native", "zero3": "zero1", "native": "zero2"},
    3: {"zero1": "native", "zero2": "zero2", "zero3": "zero3", "native": "zero1"},
    6: {"zero3": "zero2", "native": "native"},
}
"""Number of ranks -> engine that saved (on 4 ranks) -> engine that goes on."""


def make_spec(dp: int, engine: str) -> JobSpec:
    zero = {"kind": "deepspeed_zero", "dp": dp, "stage": int(engine[-1])} if engine != "native" else None
    return JobSpec.model_validate(
        {
            "run": {"seed": 11},
            "model": {
                "vocab_size": 257,
                "n_layers": 2,
                "d_model": 20,
                "n_heads": 4,
                "n_kv_heads": 2,
                "head_dim": 6,
                "d_ff": 27,
                "max_seq_len": 32,
                "init_std": 0.1,
            },
            "data": {
                "sources": ({"kind": "tokens", "path": "samples.npy"},),
                "seq_len": SEQ_LEN,
                "validation_frac": 0.0,
            },
            "optim": {"lr": 1e-2, "schedule": {"kind": "cosine", "warmup_steps": 3}, "grad_clip_norm": 0.5},
            "train": {"steps": STEPS, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": 1},
            "strategy": zero or {"kind": "native", "dp": dp},
            "checkpoint": {"keep_last": 2},
        }
    )


def numbered_samples(folder: Path) -> Path:
    """A stream whose sequence i begins with the two digits of i; every id occurs from the first step on."""
    generator = np.random.default_rng(5)
    samples = generator.integers(0, 10, (N_SAMPLES + 1, SEQ_LEN))
    samples[:, 0], samples[:, 1] = np.arange(N_SAMPLES + 1) // 10, np.arange(N_SAMPLES + 1) % 10
    path = folder / "samples.npy"
    np.save(path, samples.reshape(-1).astype(np.uint16))
    return path


class Recorder:
    """What a rank trained on, and what came of it."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.samples: list[list[int]] = []

    def on_start(self, engine: Engine, progress: Progress) -> None:
        step = engine.train_step

        def watched(batches: Any, n_valid_tokens: int, lr: float) -> Any:
            rows = torch.cat([batch.tokens for batch in batches])
            self.samples.append((rows[:, 0] * 10 + rows[:, 1]).tolist())
            return step(batches, n_valid_tokens, lr)

        engine.train_step = watched  # type: ignore[method-assign]

    def after_step(self, record: StepRecord, engine: Engine) -> None:
        self.records.append(record)

    def after_evaluate(self, record: EvalRecord) -> None:
        pass

    def on_end(self, outcome: str, engine: Engine, progress: Progress) -> None:
        pass


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def leg(groups: Groups, engine_name: str, data_dir: str, folder: str, stop_at: int) -> dict[str, Any]:
    """Restore, train to the end or a stop after `stop_at` steps, save: as service.rank_training does it."""
    spec = make_spec(groups.world_size, engine_name)
    prepared = load_prepared(Path(data_dir))
    fingerprint = model_fingerprint(spec.model)
    engine = build_engine(spec, groups, CPU)
    source = BatchSource(prepared, spec, groups.dp.size, groups.dp.rank)
    events, messages, recorder = Events(), Messages(), Recorder()
    logging.getLogger("service.checkpoint_hook").addHandler(messages)

    def lr_of_step(step: int) -> float:
        return lr_at(spec.optim, spec.train.steps, step)

    progress = restore(engine, Path(folder), groups, fingerprint, lr_of_step, events, CPU)
    store = dist.FileStore(f"{folder}.store-{groups.world_size}-{engine_name}-{stop_at}", groups.world_size)
    identity = Identity(fingerprint, spec.strategy.kind, groups.mesh, attempt=0)
    peers = Peers(groups.rank, groups.world_size, store)
    saving = CheckpointHook(spec.checkpoint, Path(folder), identity, peers, events, CPU)
    outcome = train(
        spec,
        engine,
        source,
        progress,
        [recorder, saving],
        groups,
        lambda: groups.rank == 0 and len(recorder.records) + 1 == stop_at,
    )
    logging.getLogger("service.checkpoint_hook").removeHandler(messages)
    return {
        "began_at": progress.step,
        "outcome": (outcome.kind, outcome.progress.step),
        "losses": [record.loss for record in recorder.records],
        "lrs": [record.lr for record in recorder.records],
        "ordinals": [record.sample_ordinal for record in recorder.records],
        "tokens_seen": [record.tokens_seen for record in recorder.records],
        "samples": recorder.samples,
        "saved": [event["step"] for event in events.of("checkpoint_committed")],
        "messages": messages.texts,
    }


def stopped_and_whole(groups: Groups, data_dir: str, folder: str) -> dict[str, Any]:
    found = {}
    for engine in ENGINES:
        found[f"{engine} stopped"] = leg(groups, engine, data_dir, f"{folder}/{engine}", STOP_AT)
        found[f"{engine} whole"] = leg(groups, engine, data_dir, f"{folder}/{engine}-whole", 0)
    return found


def resumed(groups: Groups, data_dir: str, folder: str) -> dict[str, Any]:
    engines = RESUMED_AT[groups.world_size]
    return {
        saved_by: leg(groups, engine, data_dir, f"{folder}/{saved_by}", 0)
        for saved_by, engine in engines.items()
    }


def samples_of_steps(ranks: list[dict[str, Any]], name: str) -> list[list[int]]:
    """The samples of each step over all ranks, sorted."""
    per_rank = [rank[name]["samples"] for rank in ranks]
    return [sorted(chain(*step)) for step in zip(*per_rank, strict=True)]


class Saved(NamedTuple):
    """What 4 ranks did under each engine: a run that stopped and saved, and one that did not stop."""

    data_dir: str
    folder: Path
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    data = make_spec(1, "native").data
    source = data.sources[0].model_copy(update={"path": str(numbered_samples(folder))})
    data_dir = str(prepare(data.model_copy(update={"sources": (source,)}), folder).cache_dir)
    return Saved(data_dir, folder, run_ranks(stopped_and_whole, 4, folder, data_dir, str(folder)))


def test_each_engine_stops_where_it_is_told_to_and_saves_once(saved: Saved) -> None:
    whole = saved.ranks[0]["native whole"]
    assert whole["outcome"] == ("finished", STEPS)
    for engine in ENGINES:
        stopped, unstopped = saved.ranks[0][f"{engine} stopped"], saved.ranks[0][f"{engine} whole"]
        assert (stopped["outcome"], stopped["saved"]) == (("stopped", STOP_AT), [STOP_AT]), engine
        assert unstopped["losses"] == pytest.approx(whole["losses"], abs=1e-5), engine
        assert stopped["losses"] == unstopped["losses"][:STOP_AT], engine
    epoch = list(chain(*samples_of_steps(saved.ranks, "native whole")[:8]))
    assert len(set(epoch)) == len(epoch) == 96, "no sample comes twice in an epoch"


@pytest.mark.parametrize("world_size", RESUMED_AT)
def test_another_size_stage_and_engine_goes_on_as_if_it_had_never_stopped(
    world_size: int, saved: Saved, tmp_path: Path
) -> None:
    whole, expected_samples = saved.ranks[0]["native whole"], samples_of_steps(saved.ranks, "native whole")
    engines = RESUMED_AT[world_size]
    for saved_by in engines:
        shutil.copytree(saved.folder / saved_by, tmp_path / saved_by)
    results = run_ranks(resumed, world_size, tmp_path, saved.data_dir, str(tmp_path))
    for saved_by, engine in engines.items():
        case = f"{saved_by} on 4, {engine} on {world_size}"
        rest = results[0][saved_by]
        assert (rest["began_at"], rest["outcome"]) == (STOP_AT, ("finished", STEPS)), case
        assert rest["losses"] == pytest.approx(whole["losses"][STOP_AT:], abs=1e-5), case
        for exactly in ("lrs", "ordinals", "tokens_seen"):
            assert rest[exactly] == whole[exactly][STOP_AT:], case
        assert samples_of_steps(results, saved_by) == expected_samples[STOP_AT:], case
        assert rest["saved"] == [STEPS], case
        lines = [text for text in rest["messages"] if "random states are not restored" in text]
        assert len(lines) == 1, case
        assert f"was written by 4 ranks, these are {world_size}" in lines[0], case


@pytest.mark.parametrize("dp", [5, 7, 24])
def test_a_size_that_the_batch_does_not_divide_by_is_refused_with_sizes_that_do(dp: int) -> None:
    with pytest.raises(ValidationError) as refused:
        make_spec(dp, "native")
    text = str(refused.value)
    assert f"train.global_batch_size={GLOBAL_BATCH} is not micro_batch_size x dp x a whole number" in text
    sizes = [int(word) for word in text.split("strategy.dp=")[1].split(" as it is")[0].split(" or ")]
    assert sizes
    for size in sizes:
        assert make_spec(size, "native").world_size == size
