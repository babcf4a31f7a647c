"""From sources to a cache folder of token shards: `prepare` writes it, `load_prepared` reads it on each rank.

    <cache>/<key>/
      prepared.json             what is there, with the counts
      tokenizer/tokenizer.json  also for bytes and trained tokenizers
      source-00/train/  source-00/validation/  source-01/...    token shards

The key is a hash of everything that changes the content, so another tokenizer, file, split or (where
documents are packed whole) sequence length has another folder. Weights and seed decide the order of samples,
not the shards, and are no part of it. The folder is renamed into place when it is complete: a killed prepare
leaves nothing that looks like a cache. Does not draw samples or build batches.
"""

import fcntl
import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.data.corpus import count_bytes, describe_content, iter_texts
from jobs.data.packing import open_packings, write_padding_plan
from jobs.data.sampler import GlobalSampler
from jobs.data.shards import FORMAT_VERSION, TokenShards
from jobs.data.split import SplitCounts, write_split
from jobs.data.tokenizer import Tokenizer, build_tokenizer, describe_tokenizer
from jobs.errors import DataError
from jobs.spec.data import DataSpec, TokensSource

PREPARED_FILE = "prepared.json"
VERIFY_BELOW_BYTES = 1 << 30
"""A cache of less is read whole and compared with its checksums when it is used again (about a second)."""

_LEFTOVER_AGE_S = 3600.0
_PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True)
class PreparedSource:
    """The shards of one source, in the order of the spec."""

    train: Path
    validation: Path
    n_documents: int
    """Documents kept, of both splits."""
    n_empty_documents: int
    """Documents without a token, or of blanks only, that were skipped."""
    n_train_tokens: int
    """End-of-document tokens included."""
    n_validation_tokens: int
    max_id: int


@dataclass(frozen=True)
class PreparedData:
    """A complete cache folder."""

    cache_dir: Path
    sources: tuple[PreparedSource, ...]
    tokenizer_json: Path
    tokenizer_fingerprint: str
    vocab_size: int
    """Of the tokenizer: largest id that it can give, + 1."""
    end_of_document_id: int
    fingerprint: str
    """Hash of all token files and the tokenizer: equal fingerprints are equal data, wherever it lies."""

    @property
    def n_documents(self) -> int:
        """Documents kept, over all sources and both splits."""
        return sum(source.n_documents for source in self.sources)

    @property
    def n_empty_documents(self) -> int:
        """Documents skipped because they hold nothing."""
        return sum(source.n_empty_documents for source in self.sources)

    @property
    def n_tokens(self) -> int:
        """Tokens over all sources and both splits."""
        return sum(source.n_train_tokens + source.n_validation_tokens for source in self.sources)

    @property
    def max_id(self) -> int:
        """Largest token id in the data."""
        return max(source.max_id for source in self.sources)

    def to_json(self) -> dict[str, Any]:
        """The facts of the whole as plain JSON values."""
        return {
            "cache_dir": str(self.cache_dir),
            "documents": self.n_documents,
            "empty_documents_skipped": self.n_empty_documents,
            "tokens": self.n_tokens,
            "train_tokens": sum(source.n_train_tokens for source in self.sources),
            "validation_tokens": sum(source.n_validation_tokens for source in self.sources),
            "max_id": self.max_id,
            "vocab_size": self.vocab_size,
            "tokenizer_json": str(self.tokenizer_json),
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "fingerprint": self.fingerprint,
        }


def prepare(data: DataSpec, storage: Path, progress: Callable[[str], None] | None = None) -> PreparedData:
    """Make the shards of a run, or find those that an earlier run made.

    Several processes may prepare the same data at once: one writes, the others wait for it (or, on a file
    system without locks, throw their own copy away).

    Args:
        data: the spec's data section.
        storage: run.storage, where data.cache_dir is None.
        progress: called with a line of text now and then.

    Raises:
        DataError: a source cannot be read, holds no token or less than one sequence, was tokenized by another
            tokenizer, or the cached shards are damaged.
    """
    say = progress or (lambda _line: None)
    root = (Path(data.cache_dir).expanduser() if data.cache_dir is not None else storage / "cache").resolve()
    folder = root / cache_key(data)
    try:
        if not (folder / PREPARED_FILE).is_file():
            root.mkdir(parents=True, exist_ok=True)
            _write_once(data, folder, say)
    except OSError as error:
        raise DataError(f"the data could not be prepared in {root}: {error}") from error
    prepared = load_prepared(folder)
    _verify_small(prepared)
    _check_enough(prepared, data)
    say(f"data: {prepared.n_documents} documents, {prepared.n_tokens} tokens, prepared in {folder}")
    return prepared


def cache_key(data: DataSpec) -> str:
    """Name of the cache folder: a hash of everything that changes what is in it.

    Raises:
        DataError: a source or the tokenizer's file does not exist.
    """
    content = {
        "format": FORMAT_VERSION,
        "sources": [describe_content(source) for source in data.sources],
        "tokenizer": describe_tokenizer(data.tokenizer),
        "validation_frac": data.validation_frac,
        "packed": data.seq_len if data.packing == "pad" else None,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]


def load_prepared(cache_dir: Path) -> PreparedData:
    """Read what `prepare` wrote; compares the sizes of all files with their headers.

    Raises:
        DataError: the folder is missing, not complete, or a file has been cut.
    """
    path = cache_dir / PREPARED_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        counts = [SplitCounts(**fields) for fields in stored["sources"]]
        tokenizer = stored["tokenizer"]
        fields = (
            str(tokenizer["fingerprint"]),
            int(tokenizer["vocab_size"]),
            int(tokenizer["end_of_document_id"]),
        )
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is missing: no data is prepared in {cache_dir}; run `packtrain data prepare`"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error}); delete {cache_dir} and prepare the data again"
        ) from error
    sources = []
    digest = hashlib.sha256(fields[0].encode())
    for number, count in enumerate(counts):
        folder = cache_dir / f"source-{number:02d}"
        for split in ("train", "validation"):
            header = TokenShards(folder / split).header
            if header.tokenizer_fingerprint != fields[0]:
                raise DataError(
                    f"{folder / split} was made with tokenizer {header.tokenizer_fingerprint[:12]} but "
                    f"{path} names {fields[0][:12]}; delete {cache_dir} and prepare the data again"
                )
            for file in header.files:
                digest.update(bytes.fromhex(file.sha256))
        sources.append(PreparedSource(folder / "train", folder / "validation", **asdict(count)))
    return PreparedData(
        cache_dir, tuple(sources), cache_dir / "tokenizer" / "tokenizer.json", *fields, digest.hexdigest()
    )


def check_vocab(prepared: PreparedData, model_vocab_size: int) -> None:
    """Refuse data whose ids the model's embedding does not have.

    Raises:
        DataError: the largest id, or the tokenizer's vocabulary, is beyond model.vocab_size.
    """
    if prepared.max_id >= model_vocab_size:
        raise DataError(
            f"the data's largest token id is {prepared.max_id} but model.vocab_size={model_vocab_size} has "
            f"ids up to {model_vocab_size - 1}; set model.vocab_size to at least {prepared.max_id + 1}, or "
            "is it other data?"
        )
    if prepared.vocab_size > model_vocab_size:
        raise DataError(
            f"the tokenizer has {prepared.vocab_size} ids but model.vocab_size={model_vocab_size}; "
            f"set model.vocab_size to at least {prepared.vocab_size}, or choose a smaller tokenizer"
        )


def check_unchanged(prepared: PreparedData, fingerprint: str) -> None:
    """Refuse to go on with other data than a run began with.

    Args:
        prepared: the data found now.
        fingerprint: PreparedData.fingerprint when the run began.

    Raises:
        DataError: the tokens or the tokenizer are not the same.
    """
    if prepared.fingerprint != fingerprint:
        raise DataError(
            f"the data has changed since the run began: fingerprint {prepared.fingerprint[:12]} in "
            f"{prepared.cache_dir}, the run began with {fingerprint[:12]}; bring the old files back, or "
            "start a new run"
        )


def check_validation(prepared: PreparedData) -> None:
    """Refuse an evaluation without data; to be called where train.evaluate_every_steps is set.

    Raises:
        DataError: no source has a validation document of two tokens.
    """
    n_tokens = sum(source.n_validation_tokens for source in prepared.sources)
    if all(source.n_validation_tokens < 2 for source in prepared.sources):
        raise DataError(
            f"train.evaluate_every_steps is set but the validation split has {n_tokens} tokens of "
            f"{prepared.n_documents} documents; raise data.validation_frac, divide the text into more "
            "documents (separator), or leave evaluation out"
        )


def _write_once(data: DataSpec, folder: Path, say: Callable[[str], None]) -> None:
    with _exclusive(folder.with_name(f".{folder.name}.lock"), say):
        if (folder / PREPARED_FILE).is_file():
            return  # another process wrote it while this one waited
        _remove_leftovers(folder.parent, folder.name)
        _write(data, folder, say)


def _write(data: DataSpec, folder: Path, say: Callable[[str], None]) -> None:
    partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex[:12]}")
    partial.mkdir()
    try:
        tokenizer = build_tokenizer(data.tokenizer, _iter_sample(data))
        _check_fingerprints(data, tokenizer)
        tokenizer.save(partial / "tokenizer")
        counts = []
        for number, source in enumerate(data.sources):
            label = f"data.sources[{number}] ({source.kind})"
            meter = _Meter(say, label, count_bytes(source))
            into = partial / f"source-{number:02d}"
            counts.append(write_split(source, into, tokenizer, data.validation_frac, meter.advance))
            if data.packing == "pad":
                for split in ("train", "validation"):
                    write_padding_plan(TokenShards(into / split), data.seq_len)
            say(f"data: {label}: {_describe(counts[-1])}")
        stored = {
            "sources": [asdict(count) for count in counts],
            "tokenizer": {
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "end_of_document_id": tokenizer.end_of_document_id,
            },
        }
        (partial / PREPARED_FILE).write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError:
            # Another process was first, where locks do not work; its copy is as good as ours.
            if not (folder / PREPARED_FILE).is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _iter_sample(data: DataSpec) -> Iterator[str]:
    """Documents of all text sources in turn: none is left out of a trained vocabulary for standing last."""
    running = [iter_texts(source) for source in data.sources if not isinstance(source, TokensSource)]
    while running:
        for texts in tuple(running):
            text = next(texts, None)
            if text is None:
                running.remove(texts)
            else:
                yield text


def _check_fingerprints(data: DataSpec, tokenizer: Tokenizer) -> None:
    for number, source in enumerate(data.sources):
        expected = source.tokenizer_fingerprint if isinstance(source, TokensSource) else None
        if expected is not None and expected != tokenizer.fingerprint:
            raise DataError(
                f"data.sources[{number}] was made with tokenizer {expected[:12]} but data.tokenizer is "
                f"{tokenizer.fingerprint[:12]}; name the tokenizer that the ids were made with"
            )


def _check_enough(prepared: PreparedData, data: DataSpec) -> None:
    if prepared.n_tokens == 0:
        raise DataError(
            f"the data has no tokens at all: 0 documents, {prepared.n_empty_documents} empty ones skipped; "
            f"at least {data.seq_len + 1} tokens are needed for one sequence"
        )
    packings = open_packings(
        [source.train for source in prepared.sources], data, prepared.end_of_document_id, keep_tail=False
    )
    for number, (source, packing) in enumerate(zip(prepared.sources, packings, strict=True)):
        if packing.n_sequences == 0:
            raise DataError(
                f"data.sources[{number}] has {source.n_train_tokens} tokens to train on "
                f"({source.n_documents} documents, {source.n_empty_documents} empty ones skipped, "
                f"{source.n_validation_tokens} tokens kept for validation), fewer than the "
                f"{data.seq_len + 1} that one sequence of data.seq_len={data.seq_len} needs"
            )
    # Refuses weights that cannot be kept; the seed plays no part in that.
    GlobalSampler([one.n_sequences for one in packings], [source.weight for source in data.sources], seed=0)


def _describe(count: SplitCounts) -> str:
    return (
        f"{count.n_documents} documents ({count.n_empty_documents} empty ones skipped), "
        f"{count.n_train_tokens} tokens to train on, {count.n_validation_tokens} for validation"
    )


def _verify_small(prepared: PreparedData) -> None:
    shards = [
        TokenShards(folder) for source in prepared.sources for folder in (source.train, source.validation)
    ]
    if sum(file.n_bytes for one in shards for file in one.header.files) < VERIFY_BELOW_BYTES:
        for one in shards:
            one.verify_checksums()


@contextmanager
def _exclusive(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file, which a process that dies lets go of. Without file locks nobody is kept out."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"data: another process is preparing the same data, waiting for it ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            say(f"data: no file locks in {path.parent}, another process might do the same work")
        yield


def _remove_leftovers(root: Path, key: str) -> None:
    """Delete what killed processes left. Only old ones: where locks do not work, a young one may be alive."""
    for partial in root.glob(f"{key}.partial-*"):
        with suppress(FileNotFoundError):
            changed_at = max(path.stat().st_mtime for path in [partial, *partial.rglob("*")])
            if time.time() - changed_at > _LEFTOVER_AGE_S:
                shutil.rmtree(partial, ignore_errors=True)


class _Meter:
    """Says how far a source is, every few seconds."""

    def __init__(self, say: Callable[[str], None], label: str, total_bytes: int) -> None:
        self._say, self._label, self._total_bytes = say, label, total_bytes
        self._done_bytes = 0
        self._said_at_mono_s = time.monotonic()

    def advance(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes
        now = time.monotonic()
        if now - self._said_at_mono_s >= _PROGRESS_EVERY_S:
            self._said_at_mono_s = now
            self._say(
                f"data: {self._label}: {self._done_bytes / 1e6:.1f} of {self._total_bytes / 1e6:.1f} MB "
                "tokenized"
            )
