"""Tokenizers: bytes, any Hugging Face tokenizer.json, BPE trained on the spot. Does not read documents."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HubTokenizer

from jobs.errors import DataError
from jobs.spec import data as spec

END_OF_DOCUMENT = "<|endoftext|>"
"""End-of-document token of the bytes tokenizer and of trained ones."""

_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>")
_CONFIG_FILE = "tokenizer_config.json"

Ids = npt.NDArray[np.unsignedinteger[Any]]
"""Token ids of one document, without its end-of-document token."""


@dataclass(frozen=True)
class ByteTokenizer:
    """One token a byte of UTF-8; 256 ends a document."""

    json_text: str
    """The same tokenizer as the text of a tokenizer.json."""
    vocab_size: int = 257
    end_of_document_id: int = 256
    end_of_document: str = END_OF_DOCUMENT

    @property
    def fingerprint(self) -> str:
        """Hash of the content: equal ids for equal text."""
        return _fingerprint(self.json_text, self.end_of_document)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, nothing added."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids; ends of documents are left out, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < self.end_of_document_id).decode(errors="replace")

    def save(self, folder: Path) -> Path:
        """Write tokenizer.json and tokenizer_config.json for Hugging Face users; the path of the former."""
        return _save(folder, self.json_text, self.end_of_document)


@dataclass(frozen=True)
class JsonTokenizer:
    """A Hugging Face tokenizer.json, from a file or just trained."""

    json_text: str
    end_of_document: str
    end_of_document_id: int
    vocab_size: int
    """Largest id + 1: the rows that an embedding needs."""
    backend: Any = field(repr=False, compare=False)

    @property
    def fingerprint(self) -> str:
        """Hash of the content: equal ids for equal text."""
        return _fingerprint(self.json_text, self.end_of_document)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, nothing added and nothing cut; special tokens written in a text stay text."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        dtype: type[np.unsignedinteger[Any]] = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        return [np.array(encoding.ids, dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids; special tokens are left out."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> Path:
        """Write tokenizer.json and tokenizer_config.json for Hugging Face users; the path of the former."""
        return _save(folder, self.json_text, self.end_of_document)


Tokenizer = ByteTokenizer | JsonTokenizer


def build_tokenizer(wanted: spec.Tokenizer, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that the spec asks for.

    Args:
        wanted: the spec's data.tokenizer.
        texts: documents to train on, read only by kind `bpe` and only up to its sample_bytes.

    Raises:
        DataError: the file cannot be read, lacks its end-of-document token, or there is no text to train on.
    """
    match wanted:
        case spec.BytesTokenizer():
            return ByteTokenizer(_byte_level_json())
        case spec.FileTokenizer():
            return load_tokenizer(Path(wanted.path), wanted.end_of_document)
        case spec.BpeTokenizer():
            return _from_json(
                _train_bpe(wanted.vocab_size, wanted.sample_bytes, texts), END_OF_DOCUMENT, "trained"
            )


def load_tokenizer(path: Path, end_of_document: str | None = None) -> JsonTokenizer:
    """Read a tokenizer.json.

    Raises:
        DataError: the file is missing or broken, or has no such end-of-document token.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.tokenizer.path: cannot read {path} ({error})") from error
    return _from_json(text, end_of_document, str(path))


def describe_tokenizer(wanted: spec.Tokenizer) -> dict[str, Any]:
    """What decides a tokenizer besides the documents it is trained on, as JSON values."""
    described = wanted.model_dump(mode="json")
    if isinstance(wanted, spec.FileTokenizer):
        return {
            **described,
            "path": None,
            "content": load_tokenizer(Path(wanted.path), wanted.end_of_document).fingerprint,
        }
    return described


def _from_json(text: str, end_of_document: str | None, where: str) -> JsonTokenizer:
    try:
        backend = HubTokenizer.from_str(text)
    # The library raises bare Exception for whatever it cannot parse.
    except Exception as error:
        raise DataError(f"data.tokenizer: {where} is not a tokenizer.json ({error})") from error
    backend.no_truncation()
    backend.no_padding()
    # A document that happens to quote <|endoftext|> must not end there.
    backend.encode_special_tokens = True
    candidates = _KNOWN_ENDS if end_of_document is None else (end_of_document,)
    ends = [(token, backend.token_to_id(token)) for token in candidates]
    known = [(token, found) for token, found in ends if found is not None]
    if not known:
        raise DataError(
            f"data.tokenizer: {where} has no token {' or '.join(candidates)}; "
            "set data.tokenizer.end_of_document to the token that ends a document"
        )
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return JsonTokenizer(text, known[0][0], known[0][1], vocab_size, backend)


def _train_bpe(vocab_size: int, sample_bytes: int, texts: Iterable[str]) -> str:
    sample: list[str] = []
    n_bytes = 0
    for text in texts:
        sample.append(text)
        n_bytes += len(text.encode())
        if n_bytes >= sample_bytes:
            break
    if n_bytes == 0:
        raise DataError("data.tokenizer: kind bpe has no text to train on (0 bytes); token sources hold none")
    backend = HubTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(sample, trainer)
    return str(backend.to_str())


def _byte_level_json() -> str:
    """A byte-level BPE without merges, whose id of a byte is the byte."""
    vocab = {char: byte for byte, char in enumerate(_byte_characters())}
    backend = HubTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True)])
    return str(backend.to_str())


def _byte_characters() -> list[str]:
    """Character that stands for each byte in byte-level vocabularies.

    Printable bytes stand for themselves, the others, in order, for the characters from U+0100 on (GPT-2,
    Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _fingerprint(json_text: str, end_of_document: str) -> str:
    # Canonical JSON: layout and key order of the file change no id.
    canonical = json.dumps([json.loads(json_text), end_of_document], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _save(folder: Path, json_text: str, end_of_document: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    # tokenizer.json does not say which token ends a document; this class takes the file as it is.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end_of_document}
    (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    path = folder / "tokenizer.json"
    path.write_text(json_text, encoding="utf-8")
    return path
