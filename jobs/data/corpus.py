"""Documents of each source, one at a time, in a fixed order. Does not tokenize, split or count."""

import importlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from jobs.errors import DataError
from jobs.spec.data import JsonlSource, PythonCorpus, Source, TextSource, TokensSource

TextKind = PythonCorpus | TextSource | JsonlSource
"""Sources whose documents are text."""

_NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
"""Folders left out of the Python corpus; pydoc_data holds the topics, which are documents of their own."""
_READ_BYTES = 1 << 20


def source_files(source: Source) -> list[Path]:
    """Files of a source, sorted by path; of the Python corpus those of the standard library.

    Raises:
        DataError: the path names no file.
    """
    if isinstance(source, PythonCorpus):
        return _standard_library_files()
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        below = (found for found in path.rglob("*") if found.is_file())
        files = [found for found in below if not _is_hidden(found.relative_to(path))]
        if not files:
            raise DataError(f"data.sources: the folder {source.path} holds no file")
        return sorted(files, key=lambda found: found.as_posix())
    root = Path(path.anchor)
    try:
        files = sorted(found for found in root.glob(path.relative_to(root).as_posix()) if found.is_file())
    except ValueError as error:
        raise DataError(f"data.sources: {source.path} is not a glob ({error})") from error
    if not files:
        raise DataError(f"data.sources: {source.path} names no file, folder or glob that exists here")
    return files


def iter_texts(source: TextKind) -> Iterator[str]:
    """Yield the documents of a text source as they stand, empty ones included.

    Raises:
        DataError: a file is missing, is not UTF-8, or a JSON line is not what the spec says (with file:line).
    """
    match source:
        case PythonCorpus():
            yield from _iter_python_corpus(source.max_bytes)
        case TextSource():
            for path in source_files(source):
                yield from _iter_text_file(path, source.separator)
        case JsonlSource():
            for path in source_files(source):
                yield from _iter_jsonl_file(path, source.text_key)


def iter_token_documents(source: TokensSource) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Yield each document of a tokenised source without its end-of-document token, empty ones too.

    What follows the last end-of-document token of a file is a document of its own.

    Raises:
        DataError: a file is missing, not one-dimensional, not of integers, or cut inside a token.
    """
    for path in source_files(source):
        tokens = _map_tokens(path, source.dtype)
        if source.end_of_document_id is None:
            yield tokens
            continue
        start = 0
        # Searched in portions: a comparison over the whole map would hold a byte a token in memory.
        for portion in range(0, len(tokens), _READ_BYTES):
            ends = np.flatnonzero(tokens[portion : portion + _READ_BYTES] == source.end_of_document_id)
            for end in (ends + portion).tolist():
                yield tokens[start:end]
                start = end + 1
        if start < len(tokens):
            yield tokens[start:]


def largest_token(source: TokensSource) -> int:
    """Largest id in an already tokenised source; -1 where it holds none.

    Raises:
        DataError: as iter_token_documents, or an id is negative.
    """
    largest = -1
    for path in source_files(source):
        tokens = _map_tokens(path, source.dtype)
        for portion in range(0, len(tokens), _READ_BYTES):
            part = tokens[portion : portion + _READ_BYTES]
            if part.min() < 0:
                at = portion + int(np.argmax(part < 0))
                raise DataError(
                    f"{path}: token {at} is {int(tokens[at])}; ids are 0 or more, is the dtype right?"
                )
            largest = max(largest, int(part.max()))
    return largest


def describe_content(source: Source) -> dict[str, Any]:
    """What decides the documents of a source, as JSON values: two equal descriptions give equal documents.

    Files are known by path, size and modification time. The source's weight is left out: it decides how
    often, not what.
    """
    described = source.model_dump(mode="json", exclude={"weight"})
    files = source_files(source)
    if isinstance(source, PythonCorpus):
        files.append(Path(str(_topics_module().__file__)))
    stats = [(path.resolve().as_posix(), path.stat()) for path in files]
    return {**described, "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]}


def count_bytes(source: Source) -> int:
    """Bytes on disk of a source: what progress is measured against."""
    n_bytes = sum(path.stat().st_size for path in source_files(source))
    if isinstance(source, PythonCorpus):
        n_bytes += sum(len(text.encode()) for text in _documentation_topics())
        return n_bytes if source.max_bytes is None else min(n_bytes, source.max_bytes)
    return n_bytes


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _standard_library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        path for path in root.rglob("*.py") if not _NOT_CORPUS.intersection(path.relative_to(root).parts)
    ]
    # _sysconfigdata holds the paths of the machine that built the interpreter: no text to learn.
    found = [path for path in found if not path.name.startswith("_sysconfigdata")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _topics_module() -> ModuleType:
    return importlib.import_module("pydoc_data.topics")


def _documentation_topics() -> list[str]:
    topics: dict[str, str] = _topics_module().topics
    return [topics[name] for name in sorted(topics)]


def _iter_python_corpus(max_bytes: int | None) -> Iterator[str]:
    n_bytes = 0
    for text in _iter_whole_python_corpus():
        yield text
        n_bytes += len(text.encode())
        if max_bytes is not None and n_bytes >= max_bytes:
            return


def _iter_whole_python_corpus() -> Iterator[str]:
    yield from _documentation_topics()
    for path in _standard_library_files():
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        yield text


def _iter_text_file(path: Path, separator: str | None) -> Iterator[str]:
    if separator is None:
        try:
            yield path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text (byte {error.start}: {error.reason})") from error
        return
    if not separator:
        raise DataError("data.sources: separator is empty; give a text that divides documents, or null")
    line = separator[1:-1]
    if len(separator) > 1 and separator[0] == separator[-1] == "\n" and "\n" not in line:
        yield from _iter_divided_by_line(path, line)
    else:
        yield from _iter_divided_by_text(path, separator)


def _iter_divided_by_line(path: Path, line: str) -> Iterator[str]:
    r"""Documents between lines that equal `line`.

    A separator "\n%\n" means this and not the literal text: the newline that ends one separator also begins
    the next, so two in a row enclose an empty document, and one may stand in the first or last line of the
    file.
    """
    lines: list[str] = []
    for text in _iter_lines(path):
        if text.rstrip("\r\n") == line:
            yield "".join(lines).removesuffix("\n")
            lines = []
        else:
            lines.append(text)
    yield "".join(lines)


def _iter_divided_by_text(path: Path, separator: str) -> Iterator[str]:
    parts: list[str] = []
    tail = ""
    for portion in _iter_portions(path):
        *whole, rest = (tail + portion).split(separator)
        for text in whole:
            yield "".join(parts) + text
            parts = []
        # The last characters may begin a separator; what stands before them is searched only once.
        cut = max(0, len(rest) - len(separator) + 1)
        parts.append(rest[:cut])
        tail = rest[cut:]
    yield "".join(parts) + tail


def _iter_lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason})") from error


def _iter_portions(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while portion := file.read(_READ_BYTES):
                yield portion
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason})") from error


def _iter_jsonl_file(path: Path, text_key: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield _text_of_record(line, text_key, f"{path}:{number}") if line.strip() else ""


def _text_of_record(line: bytes, text_key: str, where: str) -> str:
    try:
        record = json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 text (byte {error.start} of the line: {error.reason})"
        ) from error
    if not isinstance(record, dict) or text_key not in record:
        has = f"keys {sorted(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise DataError(f"{where}: no key {text_key!r}, the line has {has}; set text_key to the right one")
    text = record[text_key]
    if not isinstance(text, str):
        raise DataError(f"{where}: {text_key!r} is {json.dumps(text)[:60]}, it must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {text_key!r} holds half of a surrogate pair at character {error.start}"
        ) from error
    return text


def _map_tokens(path: Path, dtype: str) -> npt.NDArray[np.integer[Any]]:
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataError(f"{path}: not a .npy file that can be read ({error})") from error
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(
                f"{path}: holds {tokens.dtype} of shape {tokens.shape}; token ids are whole numbers in one "
                "dimension"
            )
        return np.asarray(tokens)
    element = np.dtype(dtype).newbyteorder("<")
    n_bytes = path.stat().st_size
    if n_bytes % element.itemsize:
        raise DataError(
            f"{path}: {n_bytes} bytes are not a whole number of {dtype} tokens; is the dtype right?"
        )
    if n_bytes == 0:
        return np.zeros(0, element)
    return np.asarray(np.memmap(path, element, mode="r"))
