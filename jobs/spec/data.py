"""The data section: sources with weights, tokenizer, sequence length, packing."""

from typing import Annotated, Literal

from pydantic import Field

from jobs.spec.base import SpecSection


class PythonCorpus(SpecSection):
    """The corpus that needs no network: the interpreter's documentation topics and library sources."""

    kind: Literal["python"] = "python"
    weight: float = Field(default=1.0, gt=0)
    max_bytes: int | None = Field(default=None, gt=0)
    """Stop after so many bytes of text (whole documents); None takes all."""


class TextSource(SpecSection):
    """Plain text files: documents are divided by `separator`, or one a file where it is None."""

    kind: Literal["text"]
    path: str = Field(min_length=1)
    """A file, a folder (all files below it, sorted) or a glob."""
    separator: str | None = None
    r"""Taken literally, except that "\n%\n" (a newline at both ends) means each line that holds just "%"."""
    weight: float = Field(default=1.0, gt=0)


class JsonlSource(SpecSection):
    """JSON lines: one document a line under `text_key`."""

    kind: Literal["jsonl"]
    path: str = Field(min_length=1)
    text_key: str = "text"
    weight: float = Field(default=1.0, gt=0)


class TokensSource(SpecSection):
    """Already tokenised input: a 1-D .npy of token ids, or a raw little-endian file with `dtype`."""

    kind: Literal["tokens"]
    path: str = Field(min_length=1)
    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Element type of a raw file; a .npy file says its own."""
    end_of_document_id: int | None = Field(default=None, ge=0, lt=2**32)
    """Token id that ends each document; None makes the whole file one document."""
    tokenizer_fingerprint: str | None = None
    """Fingerprint of the tokenizer the ids were made with; checked against data.tokenizer when given."""
    weight: float = Field(default=1.0, gt=0)


Source = Annotated[PythonCorpus | TextSource | JsonlSource | TokensSource, Field(discriminator="kind")]


class BytesTokenizer(SpecSection):
    """One token a byte (ids 0 to 255), 256 = end of document: vocabulary of 257."""

    kind: Literal["bytes"] = "bytes"


class FileTokenizer(SpecSection):
    """Any Hugging Face tokenizer.json."""

    kind: Literal["file"]
    path: str = Field(min_length=1)
    end_of_document: str | None = None
    """Token that ends a document; None takes <|endoftext|>, <|end_of_text|> or </s>, as the file has it."""


class BpeTokenizer(SpecSection):
    """Byte-level BPE trained on this run's own sources with the tokenizers library."""

    kind: Literal["bpe"]
    vocab_size: int = Field(gt=257)
    """Size of the vocabulary, the 256 bytes and <|endoftext|> included."""
    sample_bytes: int = Field(default=8_000_000, gt=0)
    """Train on at most so many bytes of text."""


Tokenizer = Annotated[BytesTokenizer | FileTokenizer | BpeTokenizer, Field(discriminator="kind")]


class DataSpec(SpecSection):
    """What the run reads."""

    sources: tuple[Source, ...] = Field(default=(PythonCorpus(),), min_length=1)
    tokenizer: Tokenizer = BytesTokenizer()
    seq_len: int = Field(gt=1)
    """Tokens that enter the model a sequence (labels are the same tokens shifted by one)."""
    packing: Literal["concat", "pad"] = "concat"
    """concat: documents one after another, cut at seq_len; pad: whole documents, first-fit, then padding."""
    mask_documents: bool = True
    """No attention across document borders, and positions restart at each document."""
    validation_frac: float = Field(default=0.01, ge=0, lt=1)
    """Share of each source's documents (chosen by hash of their content) kept for evaluation."""
    cache_dir: str | None = Field(default=None, min_length=1)
    """Where prepared shards are kept; None means `cache` under run.storage."""
