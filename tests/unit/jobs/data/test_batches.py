"""Batches of each rank, the global count of valid labels, validation, peek and prefetching."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.data.batches import BatchSource, Prefetcher, StepBatches, peek_step
from jobs.data.prepare import PreparedData, prepare
from jobs.data.shards import TokenShards
from jobs.engines.base import MicroBatch
from jobs.errors import DataError
from jobs.spec.job import JobSpec

MODEL = {
    "vocab_size": 70_000,
    "n_layers": 1,
    "d_model": 8,
    "n_heads": 1,
    "n_kv_heads": 1,
    "head_dim": 8,
    "d_ff": 8,
    "max_seq_len": 4096,
}


def job(global_batch: int, micro_batch: int = 1, *, seed: int = 0, evaluate: int = 8, **data: Any) -> JobSpec:
    train = {
        "steps": 1,
        "global_batch_size": global_batch,
        "micro_batch_size": micro_batch,
        "evaluate_batches": evaluate,
    }
    content = {"model": MODEL, "data": data, "train": train, "optim": {"lr": 1}, "run": {"seed": seed}}
    return JobSpec.model_validate_json(json.dumps(content))


def numbered_data(tmp_path: Path, n_samples: int, seq_len: int = 4) -> dict[str, Any]:
    """A data section of n_samples sequences; sequence i consists of the token i."""
    ids = np.append(np.repeat(np.arange(n_samples), seq_len), 0)
    np.save(tmp_path / "numbered.npy", ids)
    source = {"kind": "tokens", "path": str(tmp_path / "numbered.npy")}
    return {"sources": [source], "seq_len": seq_len, "mask_documents": False, "validation_frac": 0.0}


def mixed_data(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    """Two sources of short documents."""
    rng = np.random.default_rng(0)
    sources = []
    for name, n_documents, weight in (("a", 300, 0.75), ("b", 80, 0.25)):
        lines = [{"text": name + rng.bytes(int(rng.integers(1, 20))).hex()} for _ in range(n_documents)]
        (tmp_path / name).write_text("\n".join(json.dumps(line) for line in lines))
        sources.append({"kind": "jsonl", "path": str(tmp_path / name), "weight": weight})
    return {"sources": sources, "seq_len": 32, "validation_frac": 0.2, **fields}


def sample_ids(batches: list[MicroBatch]) -> list[int]:
    return [row[0] for batch in batches for row in batch.tokens.tolist()]


# mosaicml/streaming#880: a resume in the middle of an epoch began the epoch again.
@pytest.mark.parametrize(("global_batch", "dp"), [(1, 1), (7, 7), (9, 3), (21, 1), (63, 9)])
def test_resume_at_37_of_100_goes_on_with_the_unbroken_order(
    tmp_path: Path, global_batch: int, dp: int
) -> None:
    data = numbered_data(tmp_path, 100)
    spec = job(1, **data)
    prepared = prepare(spec.data, tmp_path)
    unbroken = [sample_ids(BatchSource(prepared, spec, 1, 0).batches_at(i))[0] for i in range(200)]
    assert sorted(unbroken[:100]) == sorted(unbroken[100:]) == list(range(100))
    trained: list[int] = []
    with Prefetcher(BatchSource(prepared, spec, 1, 0), 0) as prefetcher:
        for _ in range(37):  # the 38th is built ahead and never taken
            step = prefetcher.take()
            trained += sample_ids(step.batches)
    resumed = job(global_batch, **data)
    ranks = [Prefetcher(BatchSource(prepared, resumed, dp, rank), step.next_ordinal) for rank in range(dp)]
    while len(trained) < 100:
        steps = [rank.take() for rank in ranks]
        assert {step.sample_ordinal for step in steps} == {len(trained)}
        rows = np.array([sample_ids(step.batches) for step in steps])  # [dp, accum]
        trained += rows.T.reshape(-1).tolist()  # the documented order: micro-step, rank, row
    for rank in ranks:
        rank.close()
    assert trained == unbroken[:100]


@pytest.mark.parametrize("packing", ["concat", "pad"])
@pytest.mark.parametrize("mask", [True, False])
def test_every_layout_has_the_same_global_batch_and_counts_it_alone(
    tmp_path: Path, packing: str, mask: bool
) -> None:
    data = mixed_data(tmp_path, packing=packing, mask_documents=mask)
    prepared = prepare(job(12, **data).data, tmp_path)
    whole = BatchSource(prepared, job(12, 12, **data), 1, 0)
    for ordinal in (0, 12, 3000):  # 3000 is epochs later
        [batch] = whole.batches_at(ordinal)
        n_valid = int((batch.labels != -100).sum())
        n_padding = batch.labels.numel() - n_valid
        for micro, dp in ((1, 1), (3, 2), (2, 3), (1, 12), (6, 2)):
            spec = job(12, micro, **data)
            steps = [BatchSource(prepared, spec, dp, rank).step_at(ordinal) for rank in range(dp)]
            assert {(s.n_valid_tokens, s.n_padding_tokens) for s in steps} == {(n_valid, n_padding)}
            in_order = [s.batches[a] for a in range(12 // micro // dp) for s in steps]
            for field in ("tokens", "labels", "positions"):
                assert torch.equal(torch.cat([getattr(b, field) for b in in_order]), getattr(batch, field))


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_tensors_are_what_engines_expect(tmp_path: Path, packing: str) -> None:
    data = mixed_data(tmp_path, packing=packing)
    spec = job(8, 8, **data)
    [batch] = BatchSource(prepare(spec.data, tmp_path), spec, 1, 0).batches_at(0)
    for tensor in (batch.tokens, batch.labels, batch.positions):
        assert (tensor.dtype, tensor.shape) == (torch.int64, (8, 32))
        assert tensor.is_contiguous()
    assert batch.document_ids is not None
    assert (batch.document_ids.dtype, batch.document_ids.shape) == (torch.int32, (8, 32))
    same = batch.document_ids[:, 1:] == batch.document_ids[:, :-1]
    assert torch.equal(batch.positions[:, 1:] == batch.positions[:, :-1] + 1, same)
    valid = batch.labels[:, :-1] != -100
    assert torch.equal(batch.labels[:, :-1][valid], batch.tokens[:, 1:][valid])
    assert (valid & ~same).sum() == 0  # no label crosses a border


def test_documents_are_masked_only_where_a_row_has_several(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 100)
    source = {"kind": "text", "path": str(tmp_path / "long.txt")}
    spec = job(1, sources=[source], seq_len=16, validation_frac=0.0)
    prepared = prepare(spec.data, tmp_path)
    assert BatchSource(prepared, spec, 1, 0).batches_at(0)[0].document_ids is None


def test_mixture_follows_the_weights(tmp_path: Path) -> None:
    spec = job(40, **mixed_data(tmp_path))
    prepared = prepare(spec.data, tmp_path)
    for step in range(1, 6):
        documents = peek_step(prepared, spec, step)["documents"]
        assert [row[0]["source"] for row in documents].count(0) == 30


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_peek_shows_what_the_step_trains_on(tmp_path: Path, packing: str) -> None:
    spec = job(6, 3, **mixed_data(tmp_path, packing=packing))
    prepared = prepare(spec.data, tmp_path)
    seen = json.loads(json.dumps(peek_step(prepared, spec, 3)))
    assert seen["step"] == 3
    batches = BatchSource(prepared, spec, 1, 0).batches_at(12)
    assert seen["tokens"] == torch.cat([batch.tokens for batch in batches]).tolist()
    assert seen["labels"] == torch.cat([batch.labels for batch in batches]).tolist()
    assert len(set(seen["sample_ids"])) == 6
    whole = BatchSource(prepared, job(6, 6, **mixed_data(tmp_path, packing=packing)), 1, 0)
    document_ids = whole.batches_at(12)[0].document_ids
    assert document_ids is not None
    for row, parts in enumerate(seen["documents"]):
        starts = [0, *((document_ids[row].diff() != 0).nonzero().flatten() + 1).tolist()]
        filled = parts[-1]["slot"] + parts[-1]["n_tokens"]
        assert [part["slot"] for part in parts] == [start for start in starts if start < filled]
        assert filled == 32 or packing == "pad"
    with pytest.raises(ValueError, match="step=0"):
        peek_step(prepared, spec, 0)


def test_sample_ids_count_over_all_sources(tmp_path: Path) -> None:
    spec = job(40, **mixed_data(tmp_path))
    prepared = prepare(spec.data, tmp_path)
    n_first = (prepared.sources[0].n_train_tokens - 1) // 32
    seen = peek_step(prepared, spec, 1)
    for sample, parts in zip(seen["sample_ids"], seen["documents"], strict=True):
        assert (sample >= n_first) == (parts[0]["source"] == 1)


def validation_rows(prepared: PreparedData, spec: JobSpec, dp: int) -> list[list[int]]:
    ranks = [list(BatchSource(prepared, spec, dp, rank).validation_batches()) for rank in range(dp)]
    assert len({len(rank) for rank in ranks}) == 1  # evaluation is collective
    rows: list[list[int]] = []
    for batches in zip(*ranks, strict=True):
        for batch in batches:
            keep = (batch.labels != -100).any(dim=1)
            rows += torch.cat([batch.tokens, batch.labels], dim=1)[keep].tolist()
    return rows


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_validation_is_the_same_under_every_layout(tmp_path: Path, packing: str) -> None:
    data = mixed_data(tmp_path, packing=packing)
    for evaluate in (2, 100):
        prepared = prepare(job(6, **data).data, tmp_path)
        expected = validation_rows(prepared, job(6, 6, evaluate=evaluate, **data), 1)
        for micro, dp in ((1, 1), (3, 2), (1, 6), (2, 3)):
            assert validation_rows(prepared, job(6, micro, evaluate=evaluate, **data), dp) == expected
        assert len({tuple(row) for row in expected}) == len(expected)  # none twice
        if evaluate == 2:
            assert len(expected) == 12
    n_labels = sum(label != -100 for row in expected for label in row[32:])
    headers = [TokenShards(source.validation).header for source in prepared.sources]
    # Every token of the split has its label, but those that end a document.
    assert n_labels == sum(header.n_tokens - header.n_documents for header in headers)


def test_validation_without_data_is_refused(tmp_path: Path) -> None:
    spec = job(1, **numbered_data(tmp_path, 10))
    prepared = prepare(spec.data, tmp_path)
    with pytest.raises(DataError, match="validation split holds no sequence"):
        list(BatchSource(prepared, spec, 1, 0).validation_batches())


def test_a_step_without_a_label_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(9) % 2)
    source = {"kind": "tokens", "path": str(tmp_path / "t.npy"), "end_of_document_id": 7}
    spec = job(1, sources=[source], seq_len=4, validation_frac=0.0)
    prepared = prepare(spec.data, tmp_path)
    shards = BatchSource(prepared, spec, 1, 0)
    assert shards.step_at(0).n_valid_tokens == 4
    shards._train[0]._shards.borders = np.arange(11, dtype=np.uint64)  # each document is one token
    with pytest.raises(DataError, match="no token to train on"):
        shards.step_at(0)


def test_data_prepared_for_another_spec_is_refused(tmp_path: Path) -> None:
    data = mixed_data(tmp_path)
    prepared = prepare(job(1, **data).data, tmp_path)
    with pytest.raises(DataError, match="packing=pad"):
        BatchSource(prepared, job(1, **{**data, "packing": "pad"}), 1, 0)
    with pytest.raises(DataError, match="holds 2 sources but the spec has 1"):
        BatchSource(prepared, job(1, **{**data, "sources": data["sources"][:1]}), 1, 0)
    with pytest.raises(ValueError, match="global_batch=4"):
        BatchSource(prepared, job(4, **data), 3, 0)


def test_prefetcher_is_one_step_ahead_and_in_order(tmp_path: Path) -> None:
    spec = job(5, **numbered_data(tmp_path, 20))
    source = BatchSource(prepare(spec.data, tmp_path), spec, 1, 0)
    built: list[int] = []
    step_at = source.step_at

    def recorded(ordinal: int) -> StepBatches:
        built.append(ordinal)
        return step_at(ordinal)

    source.step_at = recorded  # type: ignore[method-assign]
    n_threads = threading.active_count()
    with Prefetcher(source, 10) as prefetcher:
        for ordinal in range(10, 60, 5):
            step = prefetcher.take()
            assert (step.sample_ordinal, step.next_ordinal) == (ordinal, ordinal + 5)
            assert sample_ids(step.batches) == sample_ids(source.batches_at(ordinal))
            deadline = time.monotonic() + 10
            while built[-1] != ordinal + 5 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.005)
            assert built == list(range(10, ordinal + 10, 5))
    assert threading.active_count() == n_threads
    prefetcher.close()


def test_prefetcher_raises_what_building_raised_and_ends(tmp_path: Path) -> None:
    spec = job(5, **numbered_data(tmp_path, 20))
    source = BatchSource(prepare(spec.data, tmp_path), spec, 1, 0)
    step_at = source.step_at

    def failing(ordinal: int) -> StepBatches:
        if ordinal == 10:
            raise DataError("shard lost")
        return step_at(ordinal)

    source.step_at = failing  # type: ignore[method-assign]
    n_threads = threading.active_count()
    with Prefetcher(source, 0) as prefetcher:
        assert prefetcher.take().sample_ordinal == 0
        assert prefetcher.take().sample_ordinal == 5
        for _ in range(2):  # never skipped
            with pytest.raises(DataError, match="shard lost"):
                prefetcher.take()
    assert threading.active_count() == n_threads


def test_a_batch_of_65536_tokens_takes_milliseconds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 60_000, 2_000_000)
    ids[rng.integers(0, len(ids), 10_000)] = 0
    np.save(tmp_path / "t.npy", ids)
    source = {"kind": "tokens", "path": str(tmp_path / "t.npy"), "end_of_document_id": 0}
    spec = job(32, 32, sources=[source], seq_len=2048, validation_frac=0.0)
    built = BatchSource(prepare(spec.data, tmp_path), spec, 1, 0)
    took_s = []
    for step in range(20):
        started = time.perf_counter()
        built.step_at(step * 32)
        took_s.append(time.perf_counter() - started)
    assert min(took_s) < 0.02  # about 2 ms on a free core
