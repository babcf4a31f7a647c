"""Batches for comparing layouts: uneven documents, from unmasked to nearly all masked. Reads no data.

Shapes: B sequences of the global batch, S sequence.
"""

import torch

from jobs.engines.base import MicroBatch
from jobs.models.losses import IGNORED_LABEL
from jobs.seeds import derive_seed
from jobs.spec.job import JobSpec

BORDER_FRAC = 0.15
"""Share of the positions at which a document begins."""
MOST_MASKED_FRAC = 0.9
"""Share of the labels that are masked in the last sequence; the first has all of its labels."""


def global_batch(spec: JobSpec, step: int) -> MicroBatch:
    """All sequences of one step, [B, S]: a function of the spec's seed and the step alone.

    No two ranks get equally many valid labels, so that a mean of means is another number than the mean.
    Documents are masked where the spec masks them; of several micro-batches the first is one document a
    sequence, which training hands over without ids.
    """
    n, seq_len = spec.train.global_batch_size, spec.data.seq_len
    generator = torch.Generator().manual_seed(derive_seed(spec.run.seed, "parity", str(step)))
    tokens = torch.randint(0, spec.model.vocab_size, (n, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    masked_frac = torch.linspace(0.0, MOST_MASKED_FRAC, n)[:, None]
    labels[torch.rand(labels.shape, generator=generator) < masked_frac] = IGNORED_LABEL
    labels[:, 0] = tokens[:, 1]  # no micro-batch is without a label
    where = torch.arange(seq_len).expand(n, seq_len)
    if not spec.data.mask_documents:
        return MicroBatch(tokens[:, :-1].contiguous(), labels, where.clone(), None)
    borders = torch.rand((n, seq_len), generator=generator) < BORDER_FRAC
    if spec.grad_accum_steps > 1:
        borders[: spec.train.micro_batch_size] = False
    first = torch.where(borders, where, 0).cummax(1).values
    return MicroBatch(tokens[:, :-1].contiguous(), labels, where - first, borders.cumsum(1).int())


def n_valid_tokens(batch: MicroBatch) -> int:
    """Labels that enter the loss."""
    return int((batch.labels != IGNORED_LABEL).sum())


def share(batch: MicroBatch, spec: JobSpec, dp_rank: int) -> list[MicroBatch]:
    """The micro-batches of one data-parallel coordinate, whole sequences, as training deals them."""
    accum, micro = spec.grad_accum_steps, spec.train.micro_batch_size

    def cut(whole: torch.Tensor) -> torch.Tensor:
        return whole.view(accum, spec.strategy.dp, micro, -1)[:, dp_rank]

    tokens, labels, positions = cut(batch.tokens), cut(batch.labels), cut(batch.positions)
    document_ids = [None] * accum if batch.document_ids is None else cut(batch.document_ids).unbind()
    return [
        MicroBatch(tokens[index], labels[index], positions[index], None if _is_causal(ids) else ids)
        for index, ids in enumerate(document_ids)
    ]


def _is_causal(document_ids: torch.Tensor | None) -> bool:
    """No sequence has a border."""
    return document_ids is None or bool((document_ids == document_ids[:, :1]).all())
