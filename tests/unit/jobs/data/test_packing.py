"""Packing: every token once, no label across a document border, counts that agree with the rows."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.data.packing import (
    IGNORED,
    ConcatPacking,
    Packing,
    PadPacking,
    plan_padding,
    write_padding_plan,
)
from jobs.data.shards import ShardWriter, TokenShards
from jobs.errors import DataError

END, PAD = 999, 998


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Fresh folders, one a call."""
    root = tmp_path_factory.mktemp("packing")
    numbers = iter(range(10**9))
    return lambda: root / str(next(numbers)) / "source-00" / "train"


def write_documents(folder: Path, lengths: list[int], file_bytes: int = 32) -> TokenShards:
    """Documents of the given lengths, end token included; the other ids count up: each is known by its id."""
    with ShardWriter(folder, 1000, "fp", file_bytes) as writer:
        start = 0
        for length in lengths:
            writer.add([np.arange(start, start + length - 1) % 900], END)
            start += length - 1
    return TokenShards(folder)


def build(shards: TokenShards, kind: str, seq_len: int, mask: bool) -> Packing:
    if kind == "pad":
        write_padding_plan(shards, seq_len)
        return PadPacking(shards, seq_len, mask, PAD)
    return ConcatPacking(shards, seq_len, mask, PAD, keep_tail=kind == "tail")


LENGTHS = st.lists(st.integers(2, 25), min_size=1, max_size=15)


@settings(max_examples=120, deadline=None)
@given(
    lengths=LENGTHS,
    seq_len=st.integers(2, 12),
    kind=st.sampled_from(["concat", "tail", "pad"]),
    mask=st.booleans(),
)
def test_invariants(folders, lengths: list[int], seq_len: int, kind: str, mask: bool) -> None:
    shards = write_documents(folders(), lengths)
    packing = build(shards, kind, seq_len, mask)
    stream = shards.read(0, sum(lengths)).tolist()
    document_of = np.repeat(np.arange(len(lengths)), lengths).tolist()
    all_sequences = np.arange(packing.n_sequences)
    rows = packing.rows(all_sequences)
    seen: list[int] = []  # offsets in the stream, by rows
    for row in range(packing.n_sequences):
        offsets: list[int] = []
        for part in packing.parts(row):
            start = shards.borders[part.document]
            inside = [int(o) for o in range(int(start), len(stream)) if document_of[o] == part.document]
            # A part of a split document: the piece is found by what is in the row.
            tokens = rows.tokens[row, part.slot : part.slot + part.n_tokens].tolist()
            at = next(
                i for i in range(len(inside)) if [stream[o] for o in inside[i : i + len(tokens)]] == tokens
            )
            assert part.slot == len(offsets)
            offsets += inside[at : at + part.n_tokens]
        n_real = len(offsets)
        seen += offsets
        assert (rows.tokens[row, n_real:] == PAD).all()
        assert (rows.labels[row, n_real:] == IGNORED).all()
        for slot, offset in enumerate(offsets):
            is_end = offset + 1 == len(stream) or document_of[offset + 1] != document_of[offset]
            label = rows.labels[row, slot]
            if not is_end:
                assert label == stream[offset + 1]  # also over the end of the row
            elif mask or offset + 1 == len(stream):
                assert label == IGNORED
            elif kind == "pad":
                assert label == (stream[offsets[slot + 1]] if slot + 1 < n_real else IGNORED)
            else:
                assert label == stream[offset + 1]
        check_documents(rows, row, [document_of[o] for o in offsets], mask)
        assert packing.count_valid(np.array([row])) == (rows.labels[row] != IGNORED).sum()
    assert packing.count_valid(all_sequences) == (rows.labels != IGNORED).sum()
    left_out = set(range(len(stream))) - set(seen)
    assert len(seen) == len(set(seen))
    if kind == "pad":
        assert not left_out
    elif kind == "concat":
        assert left_out == set(range(packing.n_sequences * seq_len, len(stream)))
        assert len(left_out) <= seq_len
    else:
        assert left_out <= {len(stream) - 1}  # kept only as a label


def check_documents(rows, row: int, documents: list[int], mask: bool) -> None:
    """Ids and positions of one row against the document that each real slot belongs to."""
    if not mask:
        assert rows.document_ids is None
    ids = np.zeros(rows.tokens.shape[1]) if rows.document_ids is None else rows.document_ids[row]
    if rows.document_ids is None:
        n_positions = len(documents) if mask else rows.tokens.shape[1]
        assert rows.positions[row, :n_positions].tolist() == list(range(n_positions))
    for a in range(len(documents)):
        for b in range(len(documents)):
            if mask:
                assert (ids[a] == ids[b]) == (documents[a] == documents[b])
        if rows.document_ids is not None:
            assert rows.positions[row, a] == a - documents.index(documents[a])
            assert ids[a] not in ids[len(documents) :]  # padding is a document of its own


def test_concat_by_hand(folders) -> None:
    shards = write_documents(folders(), [3, 2, 6, 4])  # 0 1 E | 2 E | 3 4 5 6 7 E | 8 9 10 E
    rows = build(shards, "concat", 4, mask=True).rows(np.array([0, 1, 2]))
    assert rows.tokens.tolist() == [[0, 1, END, 2], [END, 3, 4, 5], [6, 7, END, 8]]
    assert rows.labels.tolist() == [[1, END, IGNORED, END], [IGNORED, 4, 5, 6], [7, END, IGNORED, 9]]
    assert rows.positions.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 2, 0]]
    assert rows.document_ids is not None
    assert rows.document_ids.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1]]
    plain = build(shards, "concat", 4, mask=False).rows(np.array([0, 1]))
    assert plain.labels.tolist() == [[1, END, 2, END], [3, 4, 5, 6]]
    assert plain.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert plain.document_ids is None


def test_pad_by_hand(folders) -> None:
    shards = write_documents(folders(), [3, 6, 2, 1 + 1])  # 0 1 E | 2 3 4 5 6 E | 7 E | 8 E
    packing = build(shards, "pad", 4, mask=True)
    rows = packing.rows(np.arange(packing.n_sequences))
    # The first document leaves one slot; the second is cut, its rest is joined by the third, first-fit.
    assert rows.tokens.tolist() == [[0, 1, END, PAD], [2, 3, 4, 5], [6, END, 7, END], [8, END, PAD, PAD]]
    assert rows.labels.tolist() == [
        [1, END, IGNORED, IGNORED],
        [3, 4, 5, 6],
        [END, IGNORED, END, IGNORED],
        [END, IGNORED, IGNORED, IGNORED],
    ]
    assert rows.document_ids is not None
    assert rows.document_ids.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert rows.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 0, 1]]
    alone = packing.rows(np.array([0, 1, 3]))
    assert alone.document_ids is None  # one document a row, then padding: causal attention is right
    plain = build(shards, "pad", 4, mask=False).rows(np.array([2]))
    assert plain.labels.tolist() == [[END, 7, END, IGNORED]]


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 40), max_size=200), seq_len=st.integers(1, 20))
def test_padding_plan_is_a_first_fit_partition(lengths: list[int], seq_len: int) -> None:
    borders = np.cumsum([0, *lengths]).astype(np.uint64)
    pieces, first_pieces = plan_padding(borders, seq_len)
    assert sorted(o for start, n, _ in pieces.tolist() for o in range(start, start + n)) == list(
        range(sum(lengths))
    )
    fill = [int(pieces[a:b, 1].sum()) for a, b in pairwise(first_pieces)]
    assert all(0 < filled <= seq_len for filled in fill)
    # Below the limit of open sequences first-fit never leaves two that would fit into one.
    if len(fill) <= 64:
        assert sum(filled * 2 <= seq_len for filled in fill) <= 1
    ends = {int(start + n) for start, n, is_end in pieces.tolist() if is_end}
    assert ends == set(borders[1:].tolist())


def test_pad_for_another_seq_len_is_refused(folders) -> None:
    shards = write_documents(folders(), [3, 6])
    write_padding_plan(shards, 4)
    with pytest.raises(DataError, match="seq_len=8"):
        PadPacking(shards, 8, True, PAD)


def test_searching_borders_does_not_copy_them(folders) -> None:
    # 2,000,000 borders: a search that converts them to another type takes 16 MB, a real one next to nothing.
    import tracemalloc

    folder = folders()
    shards = write_documents(folder, [2])
    shards.borders = np.arange(0, 4_000_000, 2, dtype=np.uint64)
    packing = ConcatPacking(shards, 4, True, PAD)
    tracemalloc.start()
    packing.count_valid(np.arange(0, 1000, 10))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
