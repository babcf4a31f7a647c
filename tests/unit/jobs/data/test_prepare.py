"""From sources to a cache: what is kept, what is refused, what makes another cache, what survives a kill."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.data import prepare as prepare_module
from jobs.data.prepare import (
    PREPARED_FILE,
    PreparedData,
    cache_key,
    check_unchanged,
    check_validation,
    check_vocab,
    load_prepared,
    prepare,
)
from jobs.data.shards import TokenShards
from jobs.data.tokenizer import build_tokenizer
from jobs.errors import DataError
from jobs.spec.data import BytesTokenizer, DataSpec

END = 256


def data_spec(*sources: dict[str, Any], **fields: Any) -> DataSpec:
    return DataSpec.model_validate_json(
        json.dumps({"sources": list(sources), "seq_len": 4, "validation_frac": 0.0, **fields})
    )


def text(path: Path, separator: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"kind": "text", "path": str(path), "separator": separator, **fields}


def stream(folder: Path) -> list[int]:
    shards = TokenShards(folder)
    return shards.read(0, shards.header.n_tokens).tolist()


def documents(folder: Path) -> list[str]:
    shards = TokenShards(folder)
    edges = shards.borders.tolist()
    read = [shards.read(a, b).tolist() for a, b in pairwise(edges)]
    assert all(ids[-1] == END for ids in read)
    return [bytes(ids[:-1]).decode() for ids in read]


# NVIDIA/Megatron-LM#62: the first document was empty and building the index failed.
@pytest.mark.parametrize(
    ("content", "kept", "n_empty"),
    [
        ("\n%\nfirst blank\n%\nlast", ["first blank", "last"], 1),
        ("one\n%\n  \t\n%\nblank between", ["one", "blank between"], 1),
        ("one\n%\nblank last\n%\n\n\n", ["one", "blank last"], 1),
        ("x\n%\na document of one token", ["x", "a document of one token"], 0),
        ("%\nfortune one\n%\n%\nfortune two\n%\n", ["fortune one", "fortune two"], 3),
    ],
)
def test_empty_documents_are_skipped_and_counted(
    tmp_path: Path, content: str, kept: list[str], n_empty: int
) -> None:
    (tmp_path / "f.txt").write_text(content)
    prepared = prepare(data_spec(text(tmp_path / "f.txt", "\n%\n")), tmp_path)
    assert documents(prepared.sources[0].train) == kept
    assert (prepared.n_documents, prepared.n_empty_documents) == (len(kept), n_empty)
    assert prepared.n_tokens == sum(len(document) + 1 for document in kept)
    assert prepared.max_id == END


@pytest.mark.parametrize(("content", "n_empty"), [("", 1), ("\n \t\n\n", 1), ("\n%\n%\n  ", 3)])
def test_no_token_at_all_is_refused_with_counts(tmp_path: Path, content: str, n_empty: int) -> None:
    (tmp_path / "f.txt").write_text(content)
    with pytest.raises(
        DataError, match=rf"no tokens at all: 0 documents, {n_empty} empty .* at least 5 tokens"
    ):
        prepare(data_spec(text(tmp_path / "f.txt", "\n%\n")), tmp_path)


def test_less_than_one_sequence_is_refused_with_counts(tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text("123456789")  # 10 tokens with the end
    spec = data_spec(text(tmp_path / "f.txt"))
    assert prepare(spec.model_copy(update={"seq_len": 9}), tmp_path).n_tokens == 10
    with pytest.raises(DataError, match=r"sources\[0\] has 10 tokens .*fewer than the 11 .*seq_len=10"):
        prepare(spec.model_copy(update={"seq_len": 10}), tmp_path)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"sources\[1\] has 0 tokens"):
        prepare(data_spec(text(tmp_path / "f.txt"), text(tmp_path / "empty.txt")), tmp_path)


def test_tokens_keep_their_borders_and_end_once(tmp_path: Path) -> None:
    ids = np.array([3, 4, 9, 9, 5, 600, 9, 7, 8], np.uint16)
    ids.tofile(tmp_path / "t.bin")
    source = {"kind": "tokens", "path": str(tmp_path / "t.bin")}
    with_end = prepare(data_spec({**source, "end_of_document_id": 9}), tmp_path)
    assert stream(with_end.sources[0].train) == [3, 4, 9, 5, 600, 9, 7, 8, 9]
    assert TokenShards(with_end.sources[0].train).borders.tolist() == [0, 3, 6, 9]
    assert with_end.n_empty_documents == 1
    whole = prepare(data_spec(source), tmp_path)
    assert stream(whole.sources[0].train) == ids.tolist()
    assert whole.max_id == 600
    np.save(tmp_path / "wide.npy", np.array([70_000, 1, 2, 3, 4]))
    wide = prepare(data_spec({"kind": "tokens", "path": str(tmp_path / "wide.npy")}), tmp_path)
    assert stream(wide.sources[0].train) == [70_000, 1, 2, 3, 4]


# BlinkDL/RWKV-LM#346: ids of another tokenizer ended in a device-side assert that named no cause.
def test_ids_beyond_the_models_vocabulary_are_refused(tmp_path: Path) -> None:
    np.arange(601, dtype=np.uint16).tofile(tmp_path / "t.bin")
    prepared = prepare(data_spec({"kind": "tokens", "path": str(tmp_path / "t.bin")}), tmp_path)
    with pytest.raises(DataError, match=r"largest token id is 600 but model\.vocab_size=512 .* at least 601"):
        check_vocab(prepared, 512)
    with pytest.raises(DataError, match="600"):
        check_vocab(prepared, 600)
    check_vocab(prepared, 601)


def test_a_tokenizer_beyond_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "t.bin")
    prepared = prepare(data_spec({"kind": "tokens", "path": str(tmp_path / "t.bin")}), tmp_path)
    with pytest.raises(DataError, match=r"tokenizer has 257 ids but model\.vocab_size=256"):
        check_vocab(prepared, 256)
    check_vocab(prepared, 257)


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "t.bin")
    source = {"kind": "tokens", "path": str(tmp_path / "t.bin")}
    fingerprint = build_tokenizer(BytesTokenizer(), []).fingerprint
    assert prepare(data_spec({**source, "tokenizer_fingerprint": fingerprint}), tmp_path).n_tokens == 10
    with pytest.raises(DataError, match=r"sources\[0\] was made with tokenizer 0123"):
        prepare(data_spec({**source, "tokenizer_fingerprint": "0123" * 16}), tmp_path)
    assert not list((tmp_path / "cache").glob("*.partial-*"))


# NVIDIA-NeMo/Megatron-Bridge#1867: a cache made for one layout was used for another.
def test_the_key_covers_what_changes_the_content(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text of a")
    (tmp_path / "b.txt").write_text("some text of b")
    base = data_spec(text(tmp_path / "a.txt", "\n\n"))
    bpe = {"kind": "bpe", "vocab_size": 300}
    other = [
        data_spec(text(tmp_path / "b.txt", "\n\n")),
        data_spec(text(tmp_path / "a.txt")),
        data_spec(text(tmp_path / "a.txt", "\n\n"), text(tmp_path / "b.txt")),
        data_spec({"kind": "jsonl", "path": str(tmp_path / "a.txt")}),
        data_spec(text(tmp_path / "a.txt", "\n\n"), validation_frac=0.5),
        data_spec(text(tmp_path / "a.txt", "\n\n"), tokenizer=bpe),
        data_spec(text(tmp_path / "a.txt", "\n\n"), tokenizer={**bpe, "vocab_size": 301}),
        data_spec(text(tmp_path / "a.txt", "\n\n"), tokenizer={**bpe, "sample_bytes": 5}),
        data_spec(text(tmp_path / "a.txt", "\n\n"), packing="pad"),
        data_spec(text(tmp_path / "a.txt", "\n\n"), packing="pad", seq_len=8),
    ]
    keys = [cache_key(spec) for spec in [base, *other]]
    assert len(set(keys)) == len(keys)
    # These change the order of samples or how they are cut when read, not the shards.
    for same in (
        data_spec(text(tmp_path / "a.txt", "\n\n"), seq_len=8),
        data_spec(text(tmp_path / "a.txt", "\n\n"), mask_documents=False),
        data_spec(text(tmp_path / "a.txt", "\n\n", weight=2.0)),
    ):
        assert cache_key(same) == keys[0]
    (tmp_path / "a.txt").write_text("another text, a")
    assert cache_key(base) != keys[0]


def test_a_file_tokenizer_is_known_by_content(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text of a")
    path = build_tokenizer(BytesTokenizer(), []).save(tmp_path / "one")
    first = data_spec(text(tmp_path / "a.txt"), tokenizer={"kind": "file", "path": str(path)})
    moved = build_tokenizer(BytesTokenizer(), []).save(tmp_path / "two")
    key = cache_key(first)
    assert (
        cache_key(data_spec(text(tmp_path / "a.txt"), tokenizer={"kind": "file", "path": str(moved)})) == key
    )
    changed = json.loads(path.read_text())
    changed["model"]["vocab"]["A"], changed["model"]["vocab"]["B"] = 66, 65
    path.write_text(json.dumps(changed))
    assert cache_key(first) != key


def test_prepared_twice_is_tokenized_once_and_a_change_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some text of a")
    spec = data_spec(text(tmp_path / "a.txt"))
    said: list[str] = []
    first = prepare(spec, tmp_path, said.append)
    assert load_prepared(first.cache_dir) == first
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_split", None)  # any use would fail
        assert prepare(spec, tmp_path, said.append) == first
    assert "1 documents, 15 tokens, prepared in" in said[-1]
    check_unchanged(first, first.fingerprint)
    (tmp_path / "a.txt").write_text("some text of b")
    second = prepare(spec, tmp_path)
    assert documents(second.sources[0].train) == ["some text of b"]
    with pytest.raises(DataError, match="data has changed since the run began"):
        check_unchanged(second, first.fingerprint)


def test_the_tokenizer_is_saved_and_facts_are_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text of a")
    prepared = prepare(data_spec(text(tmp_path / "a.txt")), tmp_path)
    assert json.loads(prepared.tokenizer_json.read_text())["model"]["type"] == "BPE"
    assert json.loads(json.dumps(prepared.to_json()))["tokens"] == 15
    elsewhere = tmp_path / "elsewhere"
    spec = data_spec(text(tmp_path / "a.txt"), cache_dir=str(elsewhere))
    assert prepare(spec, tmp_path).cache_dir.parent == elsewhere


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text of a")
    spec = data_spec(text(tmp_path / "a.txt"), cache_dir=str(tmp_path / "a.txt" / "cache"))
    with pytest.raises(DataError, match=r"could not be prepared in .*a\.txt/cache: .*Not a directory"):
        prepare(spec, tmp_path)


def test_a_relative_cache_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text of a")
    prepared = prepare(data_spec(text(Path("a.txt")), cache_dir="kept"), Path("runs"))
    assert prepared.cache_dir.parent == tmp_path / "kept"  # ranks have another working folder


def test_shards_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text of a")
    prepared = prepare(data_spec(text(tmp_path / "a.txt")), tmp_path)
    header = prepared.sources[0].train / "header.json"
    header.write_text(header.read_text().replace(prepared.tokenizer_fingerprint, "0123" * 16))
    with pytest.raises(DataError, match=r"made with tokenizer 0123"):
        load_prepared(prepared.cache_dir)


def test_a_damaged_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text of a")
    spec = data_spec(text(tmp_path / "a.txt"))
    prepared = prepare(spec, tmp_path)
    path = prepared.sources[0].train / "tokens-00000.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(
        DataError, match=r"tokens-00000\.bin has 28 bytes but its header says 30; delete .*again"
    ):
        load_prepared(prepared.cache_dir)
    path.write_bytes(content[:-2] + b"xx")
    load_prepared(prepared.cache_dir)
    with pytest.raises(DataError, match="sha256"):
        prepare(spec, tmp_path)
    (prepared.cache_dir / PREPARED_FILE).write_text("{}")
    with pytest.raises(DataError, match="is damaged"):
        load_prepared(prepared.cache_dir)
    with pytest.raises(DataError, match="no data is prepared"):
        load_prepared(tmp_path / "nowhere")


def write_numbered(path: Path, n_documents: int) -> None:
    path.write_text("\n".join(json.dumps({"text": f"document {i}"}) for i in range(n_documents)))


def split_of(prepared: PreparedData) -> tuple[set[str], set[str]]:
    source = prepared.sources[0]
    return set(documents(source.train)), set(documents(source.validation))


def test_the_split_follows_content(tmp_path: Path) -> None:
    jsonl = {"kind": "jsonl", "path": str(tmp_path / "d.jsonl")}
    write_numbered(tmp_path / "d.jsonl", 1000)
    train, validation = split_of(prepare(data_spec(jsonl, validation_frac=0.1), tmp_path))
    assert len(train) + len(validation) == 1000
    assert not train & validation
    assert 70 <= len(validation) <= 130  # 100 expected, 3 standard deviations
    # More documents move none, another order moves none, copies stay together.
    lines = (tmp_path / "d.jsonl").read_text().split("\n")
    more = [json.dumps({"text": f"more {i}"}) for i in range(50)]
    (tmp_path / "d.jsonl").write_text("\n".join([*more, *reversed(lines), *lines]))
    train_again, validation_again = split_of(prepare(data_spec(jsonl, validation_frac=0.1), tmp_path))
    assert train <= train_again
    assert validation <= validation_again
    assert not train_again & validation_again


@pytest.mark.parametrize(
    ("n_documents", "frac", "n_validation"),
    [(1, 0.99, 0), (2, 0.0, 0), (5, 0.01, 0), (5, 0.1, 1), (3, 0.999, 2)],
)
def test_small_sources_leave_no_side_empty_that_is_due(
    tmp_path: Path, n_documents: int, frac: float, n_validation: int
) -> None:
    write_numbered(tmp_path / "d.jsonl", n_documents)
    spec = data_spec({"kind": "jsonl", "path": str(tmp_path / "d.jsonl")}, validation_frac=frac)
    prepared = prepare(spec, tmp_path)
    train, validation = split_of(prepared)
    assert (len(train), len(validation)) == (n_documents - n_validation, n_validation)
    if n_validation == 0:
        with pytest.raises(DataError, match="validation split has 0 tokens"):
            check_validation(prepared)
    else:
        check_validation(prepared)


PREPARE_AND_REPORT = """
import fcntl, sys
from pathlib import Path
from jobs.data.prepare import prepare
from jobs.spec.data import DataSpec

def refuse(*_args):
    raise OSError("no locks here")

if sys.argv[3] == "no-locks":
    fcntl.flock = refuse
prepared = prepare(DataSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
print(prepared.cache_dir, prepared.fingerprint)
"""

PREPARE_AND_HANG = """
import sys, time
from pathlib import Path
from jobs.data.prepare import prepare
from jobs.spec.data import DataSpec

# The first line is said when the first source is written, before the folder is complete.
prepare(DataSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2]), lambda line: time.sleep(60))
"""


def start(code: str, *args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code, *args], env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("locks", ["locks", "no-locks"])
def test_two_processes_at_once_agree(tmp_path: Path, locks: str) -> None:
    write_numbered(tmp_path / "d.jsonl", 20_000)
    spec = data_spec({"kind": "jsonl", "path": str(tmp_path / "d.jsonl")})
    processes = [start(PREPARE_AND_REPORT, spec.model_dump_json(), str(tmp_path), locks) for _ in range(3)]
    found = {process.communicate(timeout=40)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(found) == 1
    assert not list((tmp_path / "cache").glob("*.partial-*"))
    assert load_prepared(Path(found.pop().split()[0])).n_documents == 20_000


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_prepare_leaves_no_cache_and_no_lock(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text of a")
    spec = data_spec(text(tmp_path / "a.txt"))
    process = start(PREPARE_AND_HANG, spec.model_dump_json(), str(tmp_path))
    cache = tmp_path / "cache"
    wait_for(lambda: bool(list(cache.glob("*.partial-*/source-00/validation/header.json"))))
    process.kill()
    process.communicate()
    assert not (cache / cache_key(spec)).exists()
    [left] = cache.glob("*.partial-*")
    assert prepare(spec, tmp_path).n_documents == 1
    assert left.exists()  # young: where locks do not work, its writer might be alive
    old = time.time() - 10_000
    for path in [left, *left.rglob("*")]:
        os.utime(path, (old, old))
    (tmp_path / "cache" / cache_key(spec) / PREPARED_FILE).unlink()
    (tmp_path / "cache" / cache_key(spec)).rename(tmp_path / "away")
    prepare(spec, tmp_path)
    assert not left.exists()
