"""One source tokenized into train and validation shards. Does not decide what is cached or where."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import numpy.typing as npt

from jobs.data.corpus import iter_texts, iter_token_documents, largest_token
from jobs.data.shards import ShardWriter
from jobs.data.tokenizer import Tokenizer
from jobs.spec.data import Source, TokensSource

_BATCH_BYTES = 4 << 20
_BATCH_DOCUMENTS = 4096
_HASH_VALUES = 1 << 64

Document = npt.NDArray[np.integer[Any]]
Batch = list[tuple[int, Document]]
"""Hash of the content (64 bits) and ids without the end of document, of some documents."""


@dataclass(frozen=True)
class SplitCounts:
    """What was written of one source."""

    n_documents: int
    n_empty_documents: int
    n_train_tokens: int
    n_validation_tokens: int
    max_id: int


class _Seen:
    """Counts of one pass over a source."""

    def __init__(self) -> None:
        self.n_empty = 0
        self.least_hash = _HASH_VALUES
        self.greatest_hash = -1


def write_split(
    source: Source, folder: Path, tokenizer: Tokenizer, validation_frac: float, advance: Callable[[int], None]
) -> SplitCounts:
    """Tokenize a source into folder/train and folder/validation.

    A document is kept for validation where the hash of its content, as a fraction of all hashes, is below
    validation_frac: copies of a document are on the same side, and more documents move none. Where chance
    leaves a side empty although half a document or more is due there, the document with the nearest hash is
    moved to it.

    Args:
        source: what to read.
        folder: where to write; must not exist.
        tokenizer: gives ids to text and ends documents.
        validation_frac: expected share of documents for validation.
        advance: called with the bytes of each batch that is done.

    Raises:
        DataError: the source cannot be read.
    """
    threshold = int(validation_frac * _HASH_VALUES)
    counts, seen = _write_pass(source, folder, tokenizer, threshold, advance)
    are_several = seen.least_hash < seen.greatest_hash
    if counts.n_documents and counts.n_train_tokens == 0:
        # A lone document, however often it comes, is there to be trained on.
        threshold = seen.greatest_hash if are_several else 0
    elif are_several and counts.n_validation_tokens == 0 and validation_frac * counts.n_documents >= 0.5:
        threshold = seen.least_hash + 1
    else:
        return counts
    rmtree(folder)
    return _write_pass(source, folder, tokenizer, threshold, advance)[0]


def _write_pass(
    source: Source, folder: Path, tokenizer: Tokenizer, threshold: int, advance: Callable[[int], None]
) -> tuple[SplitCounts, _Seen]:
    seen = _Seen()
    top_id = tokenizer.vocab_size - 1
    end_id: int | None = tokenizer.end_of_document_id
    if isinstance(source, TokensSource):
        end_id = source.end_of_document_id
        top_id = max(top_id, largest_token(source), end_id or 0)
    with (
        ShardWriter(folder / "train", top_id, tokenizer.fingerprint) as train,
        ShardWriter(folder / "validation", top_id, tokenizer.fingerprint) as validation,
    ):
        for batch in _iter_batches(source, tokenizer, seen, advance):
            train.add((ids for value, ids in batch if value >= threshold), end_id)
            validation.add((ids for value, ids in batch if value < threshold), end_id)
            hashes = [value for value, _ in batch]
            seen.least_hash = min(seen.least_hash, *hashes)
            seen.greatest_hash = max(seen.greatest_hash, *hashes)
    counts = SplitCounts(
        n_documents=train.n_documents + validation.n_documents,
        n_empty_documents=seen.n_empty,
        n_train_tokens=train.n_tokens,
        n_validation_tokens=validation.n_tokens,
        max_id=max(train.max_id, validation.max_id),
    )
    return counts, seen


def _iter_batches(
    source: Source, tokenizer: Tokenizer, seen: _Seen, advance: Callable[[int], None]
) -> Iterator[Batch]:
    if isinstance(source, TokensSource):
        yield from _iter_token_batches(source, seen, advance)
        return
    texts: list[str] = []
    n_bytes = 0
    for text in iter_texts(source):
        if not text or text.isspace():
            seen.n_empty += 1
            continue
        texts.append(text)
        n_bytes += len(text)
        if n_bytes >= _BATCH_BYTES or len(texts) >= _BATCH_DOCUMENTS:
            yield from _encode(texts, tokenizer, seen)
            advance(n_bytes)
            texts, n_bytes = [], 0
    yield from _encode(texts, tokenizer, seen)
    advance(n_bytes)


def _encode(texts: list[str], tokenizer: Tokenizer, seen: _Seen) -> Iterator[Batch]:
    batch: Batch = []
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        # A tokenizer's normalizer may leave nothing of a text that is not blank.
        if len(ids) == 0:
            seen.n_empty += 1
            continue
        batch.append((_hash([text.encode()]), ids))
    if batch:
        yield batch


def _iter_token_batches(source: TokensSource, seen: _Seen, advance: Callable[[int], None]) -> Iterator[Batch]:
    batch: Batch = []
    n_bytes = 0
    for tokens in iter_token_documents(source):
        if len(tokens) == 0:
            seen.n_empty += 1
            continue
        portions = (tokens[start : start + _BATCH_BYTES] for start in range(0, len(tokens), _BATCH_BYTES))
        batch.append((_hash(portion.astype("<u4").tobytes() for portion in portions), tokens))
        n_bytes += tokens.nbytes
        if n_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            advance(n_bytes)
            batch, n_bytes = [], 0
    if batch:
        yield batch
        advance(n_bytes)


def _hash(content: Iterable[bytes]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in content:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")
