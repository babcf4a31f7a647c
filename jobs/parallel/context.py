"""Context parallelism: every rank of the cp axis has another part of each sequence; only attention notices.

Holds the cut of a batch and the choice of a method; the methods are in context_ring.py, context_ulysses.py
and context_gather.py, the cut itself in zigzag.py. The parts of positions travel with those of the tokens, so
rotary angles are right wherever a chunk comes from.

What the methods exchange in a layer's forward pass, values a rank sends (backward: about twice):

    ring         (cp - 1) S/cp 2 K C             in cp - 1 messages behind the computation
    all_gather   (cp - 1) S/cp 2 K C             at once, behind the computation of the own part
    ulysses      (cp - 1)/cp S/cp (2 H + 2 K) C  in front of and after the computation

Shapes: B micro-batch, S sequence, H query heads, K kv heads, C head_dim.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, assert_never

import torch

from jobs.comm.collectives import gather_plain
from jobs.comm.groups import Axis
from jobs.engines.base import MicroBatch
from jobs.models.attention import MaskFn
from jobs.models.operations import Operations
from jobs.parallel.context_gather import gather_attention
from jobs.parallel.context_ring import ring_attention
from jobs.parallel.context_ulysses import ulysses_attention
from jobs.parallel.zigzag import check_divides, in_true_order, part_of

ContextMethod = Literal["ring", "ulysses", "all_gather"]


def split_batch(batch: MicroBatch, cp: Axis) -> MicroBatch:
    """This rank's zig-zag part of whole sequences: [B, S] -> [B, S/cp]. Does not communicate.

    Raises:
        ValueError: the sequences do not divide into 2 cp chunks.
    """
    if cp.size == 1:
        return batch
    check_divides(batch.tokens.shape[1], cp.size)
    cut = partial(part_of, cp=cp.size, rank=cp.rank, dim=1)
    return MicroBatch(
        tokens=cut(batch.tokens),
        labels=cut(batch.labels),
        positions=cut(batch.positions),
        document_ids=None if batch.document_ids is None else cut(batch.document_ids),
    )


def context_operations(base: Operations, method: ContextMethod, cp: Axis, seq_len: int) -> Operations:
    """Operations whose attention works over the cp axis; the others stay as they are.

    Args:
        base: operations without context parallelism; ulysses computes with their attention and mask.
        method: how the ranks exchange.
        cp: the ranks that share each sequence.
        seq_len: S, of whole sequences.

    Raises:
        ValueError: the sequence does not divide into 2 cp chunks.
    """
    if cp.size == 1:
        return base
    check_divides(seq_len, cp.size)
    match method:
        case "ring":
            return replace(base, attention=partial(ring_attention, cp=cp), mask=partial(whole_ids, cp=cp))
        case "all_gather":
            return replace(base, attention=partial(gather_attention, cp=cp), mask=partial(whole_ids, cp=cp))
        case "ulysses":
            attention = partial(ulysses_attention, cp=cp, attention=base.attention)
            return replace(base, attention=attention, mask=partial(_whole_mask, cp=cp, mask=base.mask))
    assert_never(method)


def whole_ids(document_ids: torch.Tensor, *, cp: Axis) -> torch.Tensor:
    """Document ids of the whole sequences in their true order, once a micro-batch. Collective over cp.

    The ring and the all-gather method take these as their mask and compare them block by block in each layer:
    B S values are kept instead of B S^2 / cp, and a comparison is to a block's scores as 1 to 2 H C.

    Args:
        document_ids: [B, S/cp], the zig-zag part of this rank.
        cp: the ranks that share the sequences.

    Returns:
        [B, S].
    """
    return in_true_order(list(gather_plain(document_ids.unsqueeze(0), cp, 0).unbind(0)), 1)


def _whole_mask(document_ids: torch.Tensor, *, cp: Axis, mask: MaskFn) -> torch.Tensor:
    return mask(whole_ids(document_ids, cp=cp))
