"""Micro-batches of each step as tensors, from the ordinal alone; validation batches; a prefetch thread.

Every rank can say what any rank trains on, since order (sampler.py) and document borders (the memory map) are
known to all: the number of valid labels of a global batch needs no communication. Does not move tensors to a
device.

B = micro-batch, S = sequence.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from jobs.data.packing import IGNORED, Int64s, Packing, Rows, open_packings
from jobs.data.prepare import PreparedData
from jobs.data.sampler import GlobalSampler, Samples, ordinals_for, step_ordinals
from jobs.engines.base import MicroBatch
from jobs.errors import DataError
from jobs.events import Ranges
from jobs.spec.job import JobSpec


@dataclass(frozen=True)
class StepBatches:
    """What one rank trains on in one step."""

    sample_ordinal: int
    """The sampler's state before the step: ordinal of its first sample, unless that is skipped."""
    next_ordinal: int
    """That of the next step: the sampler's state once this step is done."""
    batches: list[MicroBatch]
    """This rank's micro-batches, [micro_batch_size, S] each."""
    n_valid_tokens: int
    """Labels other than -100 in the global batch, all ranks."""
    n_padding_tokens: int
    """The other slots of the global batch: padding and masked labels."""


class BatchSource:
    """Batches of one data-parallel rank: the same ordinal always gives the same batches."""

    def __init__(
        self, prepared: PreparedData, spec: JobSpec, dp: int, dp_rank: int, skipped: Ranges = ()
    ) -> None:
        """Map the shards.

        Args:
            prepared: the run's data.
            spec: the run.
            dp: data-parallel ranks.
            dp_rank: this one's coordinate on the dp axis.
            skipped: ordinals that no step trains on.

        Raises:
            DataError: the data was prepared otherwise than the spec says, or is damaged.
            ValueError: the global batch does not divide over dp ranks.
        """
        self._spec, self._dp, self._dp_rank = spec, dp, dp_rank
        self._global_batch, self._micro_batch = spec.train.global_batch_size, spec.train.micro_batch_size
        self._accum = self._global_batch // (self._micro_batch * dp)
        self._skipped = skipped
        ordinals_for(self._ordinals(0), self._micro_batch, self._accum, dp, dp_rank)
        if len(prepared.sources) != len(spec.data.sources):
            raise DataError(
                f"{prepared.cache_dir} holds {len(prepared.sources)} sources but the spec has "
                f"{len(spec.data.sources)}; prepare the data again"
            )
        end = prepared.end_of_document_id
        self._train = open_packings([s.train for s in prepared.sources], spec.data, end, keep_tail=False)
        self._validation = open_packings(
            [s.validation for s in prepared.sources], spec.data, end, keep_tail=True
        )
        weights = [source.weight for source in spec.data.sources]
        self._sampler = GlobalSampler([one.n_sequences for one in self._train], weights, spec.run.seed)

    def step_at(self, ordinal: int) -> StepBatches:
        """Everything of the step whose first sample is `ordinal`.

        Raises:
            DataError: no label of the global batch is valid.
        """
        n_valid_tokens = self.n_valid_tokens(ordinal)
        if n_valid_tokens == 0:
            raise DataError(
                f"samples {ordinal} to {self._ordinals(ordinal)[-1]} hold no token to train on: all "
                "are padding or end a document; the documents are too short"
            )
        return StepBatches(
            sample_ordinal=ordinal,
            next_ordinal=int(self._ordinals(ordinal)[-1]) + 1,
            batches=self.batches_at(ordinal),
            n_valid_tokens=n_valid_tokens,
            n_padding_tokens=self._global_batch * self._spec.data.seq_len - n_valid_tokens,
        )

    def batches_at(self, ordinal: int) -> list[MicroBatch]:
        """This rank's micro-batches of the step whose first sample is `ordinal`."""
        whole = self._ordinals(ordinal)
        own = ordinals_for(whole, self._micro_batch, self._accum, self._dp, self._dp_rank)  # [accum, B]
        samples = self._sampler.locate(own.reshape(-1))
        batches = []
        for micro_step in range(self._accum):
            rows = slice(micro_step * self._micro_batch, (micro_step + 1) * self._micro_batch)
            batches.append(_read(self._train, samples.sources[rows], samples.sequences[rows]))
        return batches

    def n_valid_tokens(self, ordinal: int) -> int:
        """Labels other than -100 in the global batch (all ranks), counted from document borders alone."""
        samples = self._global_samples(ordinal)
        return sum(
            self._train[source].count_valid(samples.sequences[samples.sources == source])
            for source in np.unique(samples.sources).tolist()
        )

    def validation_batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's validation batches; as many on each rank, so that evaluation may be collective.

        Over all ranks they are train.evaluate_batches global batches, or as many as there is data for, of
        sequences spread evenly over the validation split: the same ones under every layout, none twice. The
        last global batch is filled up with sequences without labels.

        Raises:
            DataError: there is no validation data.
        """
        counts = [one.n_sequences for one in self._validation]
        total = sum(counts)
        if total == 0:
            raise DataError(
                "the validation split holds no sequence; raise data.validation_frac or leave evaluation out"
            )
        n_chosen = min(total, self._spec.train.evaluate_batches * self._global_batch)
        chosen = (2 * np.arange(n_chosen, dtype=np.int64) + 1) * total // (2 * n_chosen)
        first_of_source = np.array([0, *accumulate(counts)], np.int64)
        sources = np.searchsorted(first_of_source, chosen, side="right") - 1
        per_round = self._micro_batch * self._dp
        n_global_batches = -(-n_chosen // self._global_batch)
        for start in range(0, n_global_batches * self._global_batch, per_round):
            own = np.arange(self._micro_batch) + start + self._dp_rank * self._micro_batch
            filled = np.minimum(own, n_chosen - 1)
            batch = _read(self._validation, sources[filled], (chosen - first_of_source[sources])[filled])
            batch.labels[torch.from_numpy(own >= n_chosen)] = IGNORED
            yield batch

    def peek(self, ordinal: int) -> dict[str, Any]:
        """The global batch whose first sample is `ordinal`, as JSON values, its sequences in order.

        Returns:
            sample_ids: number of each sequence, counted over all sources one after another; tokens, labels:
            [[S ids]]; documents: for each sequence its documents as {source, document, slot, n_tokens}, with
            `document` counted in the training split of its source.
        """
        samples = self._global_samples(ordinal)
        first_of_source = [0, *accumulate(one.n_sequences for one in self._train)]
        batch = _read(self._train, samples.sources, samples.sequences)
        places = list(zip(samples.sources.tolist(), samples.sequences.tolist(), strict=True))
        return {
            "sample_ids": [first_of_source[source] + sequence for source, sequence in places],
            "tokens": batch.tokens.tolist(),
            "labels": batch.labels.tolist(),
            "documents": [
                [
                    {
                        "source": source,
                        "document": part.document,
                        "slot": part.slot,
                        "n_tokens": part.n_tokens,
                    }
                    for part in self._train[source].parts(sequence)
                ]
                for source, sequence in places
            ],
        }

    def _global_samples(self, ordinal: int) -> Samples:
        return self._sampler.locate(self._ordinals(ordinal))

    def _ordinals(self, ordinal: int) -> Int64s:
        """The global batch of the step that begins at `ordinal`, or behind what is skipped there."""
        return step_ordinals(ordinal, self._global_batch, self._skipped)


def peek_step(prepared: PreparedData, spec: JobSpec, step: int) -> dict[str, Any]:
    """What a step trains on over all ranks: BatchSource.peek of its global batch, and the step's number.

    Args:
        prepared: the run's data.
        spec: the run.
        step: 1 for the first step of a run.

    Raises:
        ValueError: there is no such step.
        DataError: ordinals of its samples would be beyond 63 bits.
    """
    if step < 1:
        raise ValueError(f"step={step}: the first step of a run is 1")
    if step * spec.train.global_batch_size >= 1 << 63:
        raise DataError(
            f"step {step} x train.global_batch_size={spec.train.global_batch_size} is beyond the last sample "
            "that can be counted (2^63)"
        )
    source = BatchSource(prepared, spec, dp=spec.strategy.dp, dp_rank=0)
    return {"step": step, **source.peek((step - 1) * spec.train.global_batch_size)}


class Prefetcher:
    """Builds the next step's batches in a thread while the current step runs. A context manager.

    What is built ahead and never taken is lost to nobody: the sampler's state is the ordinal of the step last
    taken.
    """

    def __init__(self, source: BatchSource, ordinal: int) -> None:
        """Begin to build the step whose first sample is `ordinal`."""
        self._source = source
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._next: Future[StepBatches] = self._pool.submit(source.step_at, ordinal)

    def take(self) -> StepBatches:
        """The next step's batches; blocks until they are built.

        Raises:
            DataError: they could not be built; the next call tries again.
        """
        try:
            step = self._next.result()
        except Exception:
            self.close()
            raise
        self._next = self._pool.submit(self._source.step_at, step.next_ordinal)
        return step

    def close(self) -> None:
        """Wait for what is being built and end the thread. May be called twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read(packings: Sequence[Packing], sources: Int64s, sequences: Int64s) -> MicroBatch:
    """One micro-batch whose rows may come from several sources."""
    own_sources = np.unique(sources).tolist()
    if len(own_sources) == 1:
        return _to_tensors(packings[own_sources[0]].rows(sequences))
    shape = (len(sources), packings[0].seq_len)
    tokens, labels, positions = (np.empty(shape, np.int64) for _ in range(3))
    document_ids = np.zeros(shape, np.int32)
    is_causal = True
    for source in own_sources:
        own = np.flatnonzero(sources == source)
        rows = packings[source].rows(sequences[own])
        tokens[own], labels[own], positions[own] = rows.tokens, rows.labels, rows.positions
        if rows.document_ids is not None:
            document_ids[own] = rows.document_ids
            is_causal = False
    return _to_tensors(Rows(tokens, labels, positions, None if is_causal else document_ids))


def _to_tensors(rows: Rows) -> MicroBatch:
    return MicroBatch(
        tokens=torch.from_numpy(rows.tokens),
        labels=torch.from_numpy(rows.labels),
        positions=torch.from_numpy(rows.positions),
        document_ids=None if rows.document_ids is None else torch.from_numpy(rows.document_ids),
    )
