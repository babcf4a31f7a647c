"""Token shards: what is written is read, and damage is noticed."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.data import shards as shards_module
from jobs.data.shards import BORDERS_FILE, HEADER_FILE, ShardWriter, TokenShards
from jobs.errors import DataError


def write(
    folder: Path, documents: list[list[int]], end_id: int | None = 7, top: int = 100, file_bytes: int = 16
) -> TokenShards:
    with ShardWriter(folder, top, "fp", file_bytes) as writer:
        for start in range(0, len(documents), 3):
            writer.add((np.array(document) for document in documents[start : start + 3]), end_id)
    return TokenShards(folder)


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=30), max_size=12),
    end_id=st.sampled_from([7, None]),
    portion=st.sampled_from([2, 5, 1 << 22]),
    data=st.data(),
)
def test_round_trip(tmp_path_factory, documents, end_id, portion, data) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "_PORTION_TOKENS", portion)
        patch.setattr(shards_module, "_MAX_OPEN_FILES", 2)
        shards = write(tmp_path_factory.mktemp("s") / "a" / "train", documents, end_id)
        stream = [token for document in documents for token in [*document, *([7] if end_id else [])]]
        assert shards.read(0, shards.header.n_tokens).tolist() == stream
        assert shards.borders.tolist() == np.cumsum([0, *(len(d) + bool(end_id) for d in documents)]).tolist()
        assert shards.header.n_documents == len(documents)
        assert shards.header.max_id == max(stream, default=-1)
        start = data.draw(st.integers(0, len(stream)))
        stop = data.draw(st.integers(start, len(stream)))
        assert shards.read(start, stop).tolist() == stream[start:stop]
        shards.verify_checksums()
        token_files = [file for file in shards.header.files if file.name != BORDERS_FILE]
        assert all(file.n_bytes == 16 for file in token_files[:-1])


@pytest.mark.parametrize(("top", "dtype"), [(65535, "uint16"), (65536, "uint32")])
def test_element_type_follows_the_largest_possible_id(tmp_path: Path, top: int, dtype: str) -> None:
    shards = write(tmp_path / "a" / "train", [[top, 1]], top=top)
    assert shards.header.dtype == dtype
    assert shards.read(0, 3).tolist() == [top, 1, 7]
    assert (tmp_path / "a" / "train" / "tokens-00000.bin").stat().st_size == 3 * np.dtype(dtype).itemsize


def test_a_range_outside_is_refused(tmp_path: Path) -> None:
    shards = write(tmp_path / "a" / "train", [[1, 2, 3]])
    with pytest.raises(IndexError, match="stream of 4"):
        shards.read(2, 5)


@pytest.mark.parametrize("name", ["tokens-00000.bin", "tokens-00001.bin", BORDERS_FILE])
@pytest.mark.parametrize("change", [-2, 2])
def test_a_cut_or_longer_file_is_named_with_both_sizes(tmp_path: Path, name: str, change: int) -> None:
    folder = tmp_path / "key" / "source-00" / "train"
    write(folder, [list(range(12))])
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"xx")
    with pytest.raises(
        DataError, match=rf"{name} has {len(content) + change} bytes .* {len(content)}; delete .*key"
    ):
        TokenShards(folder)


def test_a_missing_file_or_header_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "key" / "source-00" / "train"
    write(folder, [list(range(12))])
    (folder / "tokens-00000.bin").unlink()
    with pytest.raises(DataError, match="has 0 bytes"):
        TokenShards(folder)
    (folder / HEADER_FILE).unlink()
    with pytest.raises(DataError, match="not complete"):
        TokenShards(folder)
    (folder / HEADER_FILE).write_text("{")
    with pytest.raises(DataError, match="not a header"):
        TokenShards(folder)


def test_a_header_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "key" / "source-00" / "train"
    write(folder, [[1, 2]])
    header = json.loads((folder / HEADER_FILE).read_text())
    (folder / HEADER_FILE).write_text(json.dumps({**header, "format_version": 99}))
    with pytest.raises(DataError, match="format 99"):
        TokenShards(folder)


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path: Path) -> None:
    folder = tmp_path / "key" / "source-00" / "train"
    write(folder, [list(range(12))])
    content = bytearray((folder / "tokens-00001.bin").read_bytes())
    content[3] ^= 1
    (folder / "tokens-00001.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"tokens-00001\.bin has sha256"):
        TokenShards(folder).verify_checksums()


def test_an_error_while_writing_leaves_no_header(tmp_path: Path) -> None:
    def documents():
        yield np.array([1, 2])
        raise DataError("bad line")

    with pytest.raises(DataError, match="bad line"), ShardWriter(tmp_path / "t", 100, "fp") as writer:
        writer.add(documents(), 7)
    assert not (tmp_path / "t" / HEADER_FILE).exists()
