"""Token shards on disk: memory-mapped ids with document borders and a header. Knows no text and no packing.

A folder holds one stream of tokens, the documents of one source one after another, each with its
end-of-document token as its last:

    tokens-00000.bin ...   little-endian uint16 or uint32, FILE_BYTES each but the last; documents may cross
    files borders.bin            uint64: where each document begins, and the end of the last (documents + 1
    numbers) header.json            counts, sizes and checksums, written last: a folder without it is not
    complete
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from jobs.errors import DataError

FORMAT_VERSION = 1
FILE_BYTES = 256 << 20
HEADER_FILE = "header.json"
BORDERS_FILE = "borders.bin"

_PORTION_TOKENS = 1 << 22
_MAX_OPEN_FILES = 128
"""Token files mapped at once by one reader: each holds a file descriptor."""


@dataclass(frozen=True)
class ShardFile:
    """One file of the folder."""

    name: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardHeader:
    """What a folder of shards holds."""

    dtype: str
    """uint16 or uint32."""
    n_tokens: int
    """End-of-document tokens included."""
    n_documents: int
    max_id: int
    """Largest id in the stream; -1 where it is empty."""
    tokenizer_fingerprint: str
    file_bytes: int
    """Size of each token file but the last."""
    files: tuple[ShardFile, ...]
    """The token files in order, then the borders."""
    format_version: int = FORMAT_VERSION


class _HashedFile:
    """A file being written, with its size and checksum so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("wb")
        self._digest = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.n_bytes += data.nbytes

    def finish(self) -> ShardFile:
        self._file.close()
        return ShardFile(self._path.name, self.n_bytes, self._digest.hexdigest())

    def abandon(self) -> None:
        self._file.close()


class ShardWriter:
    """Writes one folder of shards. A context manager: the header appears if the block ends without error."""

    def __init__(
        self, folder: Path, max_possible_id: int, tokenizer_fingerprint: str, file_bytes: int = FILE_BYTES
    ) -> None:
        """Make the folder, which must not exist yet.

        Args:
            folder: where to write.
            max_possible_id: largest id that may come; decides between uint16 and uint32.
            tokenizer_fingerprint: of the tokenizer that made the ids, kept in the header.
            file_bytes: size of each token file; a multiple of 4.
        """
        folder.mkdir(parents=True)
        self._folder = folder
        self._dtype = np.dtype("<u2" if max_possible_id < 1 << 16 else "<u4")
        self._fingerprint = tokenizer_fingerprint
        self._file_bytes = file_bytes
        self._finished: list[ShardFile] = []
        self._current: _HashedFile | None = None
        self._borders = _HashedFile(folder / BORDERS_FILE)
        self._borders.write(_bytes_of(np.zeros(1, "<u8")))
        self.n_tokens = 0
        self.n_documents = 0
        self.max_id = -1

    def add(self, documents: Iterable[npt.NDArray[np.integer[Any]]], end_id: int | None) -> None:
        """Append documents, none of them empty, each followed by end_id unless that is None."""
        end = np.array([] if end_id is None else [end_id], self._dtype)
        parts: list[npt.NDArray[np.integer[Any]]] = []
        n_waiting = 0
        ends: list[int] = []
        for document in documents:
            ends.append((ends[-1] if ends else self.n_tokens) + len(document) + len(end))
            # Long documents are views of a map: taken in portions, so that they need not fit in memory.
            for start in range(0, len(document), _PORTION_TOKENS):
                parts.append(document[start : start + _PORTION_TOKENS])
                n_waiting += len(parts[-1])
                if n_waiting >= _PORTION_TOKENS:
                    self._append(parts)
                    parts, n_waiting = [], 0
            parts.append(end)
        self._append(parts)
        self._borders.write(_bytes_of(np.array(ends, "<u8")))
        self.n_tokens = ends[-1] if ends else self.n_tokens
        self.n_documents += len(ends)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._borders.abandon()
            if self._current is not None:
                self._current.abandon()
            return
        if self._current is not None:
            self._finished.append(self._current.finish())
        header = ShardHeader(
            dtype=self._dtype.name,
            n_tokens=self.n_tokens,
            n_documents=self.n_documents,
            max_id=self.max_id,
            tokenizer_fingerprint=self._fingerprint,
            file_bytes=self._file_bytes,
            files=(*self._finished, self._borders.finish()),
        )
        (self._folder / HEADER_FILE).write_text(json.dumps(asdict(header), indent=2) + "\n", encoding="utf-8")

    def _append(self, parts: list[npt.NDArray[np.integer[Any]]]) -> None:
        stream = np.concatenate([np.zeros(0, self._dtype), *parts])
        if len(stream) == 0:
            return
        self.max_id = max(self.max_id, int(stream.max()))
        data = _bytes_of(stream.astype(self._dtype))
        while data:
            if self._current is None:
                self._current = _HashedFile(self._folder / f"tokens-{len(self._finished):05d}.bin")
            room = self._file_bytes - self._current.n_bytes
            self._current.write(data[:room])
            data = data[room:]
            if self._current.n_bytes == self._file_bytes:
                self._finished.append(self._current.finish())
                self._current = None


class TokenShards:
    """Reads one folder of shards through memory maps."""

    def __init__(self, folder: Path) -> None:
        """Read the header and compare the sizes of all files with it; reads no token.

        Raises:
            DataError: the folder is not complete, or a file is shorter or longer than the header says.
        """
        self.folder = folder
        self.header = _read_header(folder)
        for file in self.header.files:
            path = folder / file.name
            n_bytes = path.stat().st_size if path.is_file() else 0
            if n_bytes != file.n_bytes:
                raise DataError(
                    f"{path} has {n_bytes} bytes but its header says {file.n_bytes}; {_again(folder)}"
                )
        self._dtype = np.dtype(self.header.dtype).newbyteorder("<")
        self._tokens_per_file = self.header.file_bytes // self._dtype.itemsize
        self._maps: OrderedDict[int, npt.NDArray[np.unsignedinteger[Any]]] = OrderedDict()
        self.borders: npt.NDArray[np.uint64] = np.asarray(np.memmap(folder / BORDERS_FILE, "<u8", mode="r"))
        """[documents + 1]: where each document begins, and the end of the last."""
        counted = (len(self.borders) - 1, int(self.borders[-1]))
        if counted != (self.header.n_documents, self.header.n_tokens):
            raise DataError(
                f"{folder / BORDERS_FILE} ends after {counted[0]} documents and {counted[1]} tokens but the "
                f"header says {self.header.n_documents} and {self.header.n_tokens}; {_again(folder)}"
            )

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Tokens [start, stop) of the stream; a view of the map where they lie in one file.

        Raises:
            IndexError: the range is not inside the stream.
        """
        if not 0 <= start <= stop <= self.header.n_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of a stream of {self.header.n_tokens}")
        parts = []
        while start < stop:
            number, offset = divmod(start, self._tokens_per_file)
            part = self._map(number)[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, self._dtype)

    def verify_checksums(self) -> None:
        """Read every byte and compare it with the header.

        Raises:
            DataError: a file's content is not what was written.
        """
        for file in self.header.files:
            with (self.folder / file.name).open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if found != file.sha256:
                raise DataError(
                    f"{self.folder / file.name} has sha256 {found[:12]} but its header says "
                    f"{file.sha256[:12]}; {_again(self.folder)}"
                )

    def _map(self, number: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        found = self._maps.pop(number, None)
        if found is None:
            path = self.folder / self.header.files[number].name
            found = np.asarray(np.memmap(path, self._dtype, mode="r"))
            if len(self._maps) >= _MAX_OPEN_FILES:
                self._maps.popitem(last=False)
        self._maps[number] = found
        return found


def _read_header(folder: Path) -> ShardHeader:
    path = folder / HEADER_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(ShardFile(**file) for file in fields.pop("files"))
        header = ShardHeader(**fields, files=files)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: the shards are not complete; {_again(folder)}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is not a header of token shards ({error}); {_again(folder)}") from error
    if header.format_version != FORMAT_VERSION:
        raise DataError(
            f"{path} has format {header.format_version}, this version reads {FORMAT_VERSION}; "
            f"{_again(folder)}"
        )
    return header


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return array.view(np.uint8).data


def _again(folder: Path) -> str:
    return f"delete {folder.parent.parent} and prepare the data again"
