"""Packing: which tokens, labels, positions and documents a sequence holds. Draws no samples; no torch.

B = sequences asked for, S = seq_len.

concat: the stream of a source is cut every S tokens. Sequence i has tokens [i*S, (i+1)*S) and as labels the
tokens one further on, so the last label of a sequence is the first token of the next and no label is lost.
Fewer than S + 1 tokens at the end are left out when training; validation keeps them as a last sequence with
padding.

pad: whole documents, first-fit: each goes into the first of the OPEN_SEQUENCES youngest unfilled sequences
that has room. Longer documents are cut into pieces of S tokens, each a sequence of its own, and the rest is
placed like a document. The labels of a piece are the document's next tokens.

With mask_documents a document's last token has no label (it would predict the first token of an unrelated
one), and positions restart at each document. A document that goes on from the sequence before is, here, a new
one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jobs.data.shards import TokenShards
from jobs.errors import DataError
from jobs.spec.data import DataSpec

IGNORED = -100
"""Label of a token that no loss is taken at (PyTorch's ignore_index)."""
OPEN_SEQUENCES = 64

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Some sequences, ready to be made tensors."""

    tokens: Int64s
    """[B, S]."""
    labels: Int64s
    """[B, S]: the next token or IGNORED."""
    positions: Int64s
    """[B, S]."""
    document_ids: npt.NDArray[np.int32] | None
    """[B, S], counted from 0 in each row; None where each row is one document, so that a causal mask is
    right."""


@dataclass(frozen=True)
class DocumentPart:
    """A part of a document inside a sequence."""

    document: int
    """Number in the source's split."""
    slot: int
    """Where in the sequence it begins."""
    n_tokens: int


class ConcatPacking:
    """Sequences of one stream under `concat`."""

    def __init__(
        self,
        shards: TokenShards,
        seq_len: int,
        mask_documents: bool,
        padding_id: int,
        keep_tail: bool = False,
    ) -> None:
        """Map nothing new; keep_tail makes the incomplete last sequence one with padding."""
        self._shards, self.seq_len, self._mask, self._padding_id = shards, seq_len, mask_documents, padding_id
        usable = max(0, shards.header.n_tokens - 1)
        self.n_sequences = -(-usable // seq_len) if keep_tail else usable // seq_len

    def count_valid(self, sequences: Int64s) -> int:
        """Labels other than IGNORED in some sequences; reads borders only."""
        starts = sequences * self.seq_len
        stops = np.minimum(starts + self.seq_len, self._shards.header.n_tokens - 1)
        if not self._mask:
            return int((stops - starts).sum())
        # Of the slots [start, stop) those are masked whose next token begins a document.
        first, last = self._find(starts, "right"), self._find(stops, "right")
        return int((stops - starts - (last - first)).sum())

    def parts(self, sequence: int) -> list[DocumentPart]:
        """The documents in a sequence, in order."""
        start = sequence * self.seq_len
        stop = min(start + self.seq_len, self._shards.header.n_tokens)
        first = int(self._find(np.array([start]), "right")[0]) - 1
        last = int(self._find(np.array([stop]), "left")[0])
        edges = [start, *self._shards.borders[first + 1 : last].tolist(), stop]
        return [
            DocumentPart(first + i, edges[i] - start, edges[i + 1] - edges[i]) for i in range(len(edges) - 1)
        ]

    def rows(self, sequences: Int64s) -> Rows:
        """Read some sequences."""
        seq_len, n_tokens = self.seq_len, self._shards.header.n_tokens
        starts = sequences * seq_len
        window = np.full((len(sequences), seq_len + 1), self._padding_id, np.int64)  # [B, S + 1]
        for row, start in enumerate(starts.tolist()):
            part = self._shards.read(start, min(start + seq_len + 1, n_tokens))
            window[row, : len(part)] = part
        tokens, labels = window[:, :-1].copy(), window[:, 1:].copy()
        for row in np.flatnonzero(starts + seq_len >= n_tokens).tolist():
            labels[row, n_tokens - 1 - starts[row] :] = IGNORED
        begins = np.zeros((len(sequences), seq_len), bool)
        if self._mask:
            first, last = self._find(starts, "right"), self._find(starts + seq_len, "right")
            row_of, border = _expand(first, last)
            ends = self._shards.borders[border].astype(np.int64) - starts[row_of]  # 1 .. S
            labels[row_of, ends - 1] = IGNORED
            inside = ends < seq_len
            begins[row_of[inside], ends[inside]] = True
        is_padding = starts[:, None] + np.arange(seq_len) >= n_tokens
        return _with_documents(tokens, labels, begins if self._mask else None, is_padding)

    def _find(self, offsets: Int64s, side: str) -> Int64s:
        # Keys of another type would make numpy convert (and read) all borders at each call.
        keys = offsets.astype(np.uint64)
        return np.searchsorted(self._shards.borders, keys, side="right" if side == "right" else "left")


class PadPacking:
    """Sequences of one stream under `pad`, by the plan that was written beside the shards."""

    def __init__(self, shards: TokenShards, seq_len: int, mask_documents: bool, padding_id: int) -> None:
        """Map the plan.

        Raises:
            DataError: the shards were prepared for another packing or sequence length.
        """
        self._shards, self.seq_len, self._mask, self._padding_id = shards, seq_len, mask_documents, padding_id
        paths = _plan_paths(shards.folder, seq_len)
        if not all(path.is_file() for path in paths):
            raise DataError(
                f"{shards.folder} was not packed for data.packing=pad with seq_len={seq_len}; prepare it so"
            )
        self._pieces, self._first_pieces = (_map_array(path) for path in paths)
        self.n_sequences = len(self._first_pieces) - 1

    def count_valid(self, sequences: Int64s) -> int:
        """Labels other than IGNORED in some sequences; reads the plan only."""
        row_of, piece = _expand(self._first_pieces[sequences], self._first_pieces[sequences + 1])
        n_tokens, n_ends = int(self._pieces[piece, 1].sum()), self._pieces[piece, 2]
        if self._mask:
            return n_tokens - int(n_ends.sum())
        # Unmasked, only the last document of a sequence has no next token to predict.
        return n_tokens - len(np.unique(row_of[n_ends > 0]))

    def parts(self, sequence: int) -> list[DocumentPart]:
        """The documents in a sequence, in order."""
        found, slot = [], 0
        for start, length, _ in self._pieces_of(sequence):
            document = int(np.searchsorted(self._shards.borders, np.uint64(start), side="right")) - 1
            found.append(DocumentPart(document, slot, length))
            slot += length
        return found

    def rows(self, sequences: Int64s) -> Rows:
        """Read some sequences."""
        shape = (len(sequences), self.seq_len)
        tokens = np.full(shape, self._padding_id, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        begins, is_padding = np.zeros(shape, bool), np.zeros(shape, bool)
        for row, sequence in enumerate(sequences.tolist()):
            slot = 0
            for start, length, ends_document in self._pieces_of(sequence):
                part = self._shards.read(start, start + length + (not ends_document))
                if slot and not self._mask:
                    labels[row, slot - 1] = part[0]
                tokens[row, slot : slot + length] = part[:length]
                labels[row, slot : slot + len(part) - 1] = part[1:]
                begins[row, slot] = True
                slot += length
            is_padding[row, slot:] = True
        return _with_documents(tokens, labels, begins if self._mask else None, is_padding)

    def _pieces_of(self, sequence: int) -> list[tuple[int, int, int]]:
        first, last = self._first_pieces[sequence : sequence + 2].tolist()
        return [(start, length, ends) for start, length, ends in self._pieces[first:last].tolist()]


Packing = ConcatPacking | PadPacking


def plan_padding(borders: npt.NDArray[np.uint64], seq_len: int) -> tuple[Int64s, Int64s]:
    """First-fit of documents into sequences of seq_len tokens.

    Args:
        borders: [documents + 1] offsets in the stream.
        seq_len: tokens that fit a sequence.

    Returns:
        pieces: [pieces, 3] start in the stream, length, and 1 where it ends its document; grouped by
        sequence. first_pieces: [sequences + 1] first piece of each sequence, and the number of pieces.
    """
    pieces: list[tuple[int, int, int]] = []
    sequence_of: list[int] = []
    n_sequences = 0
    room: dict[int, int] = {}  # unfilled sequence -> free tokens, oldest first
    edges = borders.tolist()
    for start, stop in pairwise(edges):
        while stop - start > seq_len:
            pieces.append((start, seq_len, 0))
            sequence_of.append(n_sequences)
            n_sequences += 1
            start += seq_len
        length = stop - start
        chosen = next((sequence for sequence, free in room.items() if free >= length), n_sequences)
        if chosen == n_sequences:
            n_sequences += 1
            room[chosen] = seq_len
            if len(room) > OPEN_SEQUENCES:
                del room[next(iter(room))]
        room[chosen] -= length
        if room[chosen] == 0:
            del room[chosen]
        pieces.append((start, length, 1))
        sequence_of.append(chosen)
    order = np.argsort(np.array(sequence_of, np.int64), kind="stable")
    counts = np.bincount(np.array(sequence_of, np.int64), minlength=n_sequences)
    first_pieces = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    return np.array(pieces, np.int64).reshape(-1, 3)[order], first_pieces


def write_padding_plan(shards: TokenShards, seq_len: int) -> None:
    """Write the plan of `pad` for this sequence length beside the shards."""
    for path, array in zip(
        _plan_paths(shards.folder, seq_len), plan_padding(shards.borders, seq_len), strict=True
    ):
        np.save(path, array)


def _plan_paths(folder: Path, seq_len: int) -> tuple[Path, Path]:
    return folder / f"pad-{seq_len}-pieces.npy", folder / f"pad-{seq_len}-first.npy"


def _map_array(path: Path) -> Int64s:
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); delete {path.parents[2]} and prepare the data again"
        ) from error


def _expand(first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
    """All numbers of the ranges [first[i], last[i]), one after another, each with its i."""
    counts = last - first
    owner = np.repeat(np.arange(len(first)), counts)
    ends = np.cumsum(counts)
    return owner, np.arange(len(owner)) - np.repeat(ends - counts, counts) + np.repeat(first, counts)


def _with_documents(
    tokens: Int64s,
    labels: Int64s,
    begins: npt.NDArray[np.bool_] | None,
    is_padding: npt.NDArray[np.bool_],
) -> Rows:
    """Add positions and document ids; begins: slots where documents begin, None where they are not masked."""
    slots = np.arange(tokens.shape[1])
    if begins is None:
        return Rows(tokens, labels, np.broadcast_to(slots, tokens.shape).copy(), None)
    begins[:, 0] = False
    # Padding stands last, so a causal mask alone already keeps it from every label.
    are_several = bool((begins & ~is_padding).any())
    begins[:, 1:] |= is_padding[:, 1:] & ~is_padding[:, :-1]
    positions = slots - np.maximum.accumulate(np.where(begins, slots, 0), axis=1)
    document_ids = np.cumsum(begins, axis=1, dtype=np.int32) if are_several else None
    return Rows(tokens, labels, positions, document_ids)


def open_packings(folders: Sequence[Path], data: DataSpec, padding_id: int, keep_tail: bool) -> list[Packing]:
    """Map the shards of each folder and pack them.

    Raises:
        DataError: a folder is not complete, or was prepared for another packing.
    """
    shards = [TokenShards(folder) for folder in folders]
    if data.packing == "pad":
        return [PadPacking(one, data.seq_len, data.mask_documents, padding_id) for one in shards]
    return [ConcatPacking(one, data.seq_len, data.mask_documents, padding_id, keep_tail) for one in shards]
