"""Reading documents of each kind of source."""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from jobs.data import corpus
from jobs.data.corpus import describe_content, iter_texts, iter_token_documents, largest_token, source_files
from jobs.errors import DataError
from jobs.spec.data import JsonlSource, PythonCorpus, TextSource, TokensSource


def text_source(path: Path | str, separator: str | None = None) -> TextSource:
    return TextSource(kind="text", path=str(path), separator=separator)


def test_python_corpus_is_topics_then_sources_and_never_tests() -> None:
    documents = list(iter_texts(PythonCorpus(max_bytes=2_000_000)))
    assert documents == list(iter_texts(PythonCorpus(max_bytes=2_000_000)))
    sizes = [len(text.encode()) for text in documents]
    assert sum(sizes[:-1]) < 2_000_000 <= sum(sizes)
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in source_files(PythonCorpus())]
    assert files == sorted(files, key=lambda path: path.as_posix())
    assert Path("argparse.py") in files
    assert not any({"test", "tests", "site-packages", "pydoc_data"} & set(path.parts) for path in files)


def test_python_corpus_skips_what_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text("never\n")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _name: str(tmp_path))
    documents = list(iter_texts(PythonCorpus()))
    assert documents[-1] == "x = 1\n"
    assert not any("never" in text or "latin" in text for text in documents if len(text) < 100)


def test_file_folder_and_glob_give_sorted_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", ".hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(iter_texts(text_source(tmp_path))) == ["a.txt", "b.txt", "deep/c.txt"]
    assert list(iter_texts(text_source(f"{tmp_path}/*.txt"))) == ["a.txt", "b.txt"]
    assert list(iter_texts(text_source(f"{tmp_path}/**/c.*"))) == ["deep/c.txt"]
    assert list(iter_texts(text_source(tmp_path / "b.txt"))) == ["b.txt"]


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.txt", "a**b"])
def test_a_missing_path_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(DataError, match=r"nowhere|a\*\*b"):
        list(iter_texts(text_source(tmp_path / path)))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no file"):
        list(iter_texts(text_source(tmp_path)))


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        ("a\nb\n%\nc\n", ["a\nb", "c\n"]),
        ("a\n%\n%\nb", ["a", "", "b"]),  # two in a row
        ("%\na\n%\n", ["", "a", ""]),  # first and last line
        ("100%\n5 % 3\n%\nb", ["100%\n5 % 3", "b"]),  # only whole lines divide
        ("a\r\n%\r\nb", ["a\r", "b"]),
        ("", [""]),
    ],
)
def test_line_separator(tmp_path: Path, content: str, documents: list[str]) -> None:
    (tmp_path / "fortunes").write_bytes(content.encode())
    assert list(iter_texts(text_source(tmp_path / "fortunes", "\n%\n"))) == documents


@pytest.mark.parametrize("read_bytes", [1, 2, 3, 5, 1 << 20])
def test_text_separator_across_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(corpus, "_READ_BYTES", read_bytes)
    content = "<|e|>one<|e|><|e|>tw<|o\u00e9<|e<|e|>three<|e|"
    (tmp_path / "f").write_text(content, encoding="utf-8")
    assert list(iter_texts(text_source(tmp_path / "f", "<|e|>"))) == content.split("<|e|>")


@pytest.mark.parametrize("separator", [None, "%", "\n%\n"])
def test_text_that_is_not_utf8_is_named(tmp_path: Path, separator: str | None) -> None:
    (tmp_path / "f.bin").write_bytes(b"good \xff bad")
    with pytest.raises(DataError, match=r"f\.bin: not UTF-8"):
        list(iter_texts(text_source(tmp_path / "f.bin", separator)))


def test_jsonl_reads_the_key(tmp_path: Path) -> None:
    lines = [
        json.dumps({"body": "one"}),
        "",
        json.dumps({"body": ""}),
        json.dumps({"body": "z\u00fc\n", "x": 1}),
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = JsonlSource(kind="jsonl", path=str(tmp_path / "d.jsonl"), text_key="body")
    assert list(iter_texts(source)) == ["one", "", "", "z\u00fc\n"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"body": "x"}', r"no key 'text', the line has keys \['body'\]"),
        (b'["text"]', "no key 'text', the line has a list"),
        (b'{"text": 3}', "'text' is 3"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_bad_json_line_is_named_with_its_number(tmp_path: Path, line: bytes, says: str) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"d\.jsonl:2: .*{says}"):
        list(iter_texts(JsonlSource(kind="jsonl", path=str(tmp_path / "d.jsonl"))))


def tokens_source(path: Path, **fields: object) -> TokensSource:
    return TokensSource.model_validate({"kind": "tokens", "path": str(path), **fields})


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_raw_and_npy_tokens_are_cut_at_the_end_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(corpus, "_READ_BYTES", 4)
    ids = np.array([9, 1, 2, 9, 9, 3, 4, 5, 6, 7, 9, 8], dtype)
    np.save(tmp_path / "t.npy", ids)
    ids.tofile(tmp_path / "t.bin")
    expected = [[], [1, 2], [], [3, 4, 5, 6, 7], [8]]
    for name in ("t.npy", "t.bin"):
        source = tokens_source(tmp_path / name, dtype=dtype, end_of_document_id=9)
        assert [document.tolist() for document in iter_token_documents(source)] == expected
        assert largest_token(source) == 9
        whole = tokens_source(tmp_path / name, dtype=dtype)
        assert [document.tolist() for document in iter_token_documents(whole)] == [ids.tolist()]


def test_bad_token_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "flat.npy", np.zeros((2, 2), np.int64))
    (tmp_path / "not.npy").write_bytes(b"no header")
    np.array([5, -1], np.int32).tofile(tmp_path / "negative.bin")
    for name, says in (
        ("odd.bin", "3 bytes are not a whole number of uint16"),
        ("float.npy", "float64"),
        ("flat.npy", r"shape \(2, 2\)"),
        ("not.npy", "not a .npy file"),
    ):
        with pytest.raises(DataError, match=says):
            list(iter_token_documents(tokens_source(tmp_path / name)))
    with pytest.raises(DataError, match="token 1 is -1"):
        largest_token(tokens_source(tmp_path / "negative.bin", dtype="int32"))
    (tmp_path / "empty.bin").write_bytes(b"")
    assert largest_token(tokens_source(tmp_path / "empty.bin")) == -1


def test_description_follows_content_and_not_weight(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = describe_content(text_source(path))
    assert describe_content(TextSource(kind="text", path=str(path), weight=3.0)) == before
    assert describe_content(text_source(path, "%")) != before
    path.write_text("two!")
    assert describe_content(text_source(path)) != before
    small, large = PythonCorpus(max_bytes=1000), PythonCorpus(max_bytes=500_000)
    assert describe_content(small) != describe_content(large)
