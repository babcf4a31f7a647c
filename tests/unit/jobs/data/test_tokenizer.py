"""The three kinds of tokenizer, and what Hugging Face users get of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer

from jobs.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    build_tokenizer,
    describe_tokenizer,
    load_tokenizer,
)
from jobs.errors import DataError
from jobs.spec.data import BpeTokenizer, BytesTokenizer, FileTokenizer

TEXTS = ["the cat sat on the mat\n" * 20, "def f(x):\n    return x + 1\n" * 20, "na\u00efve \u4f60\u597d"]
BYTES = build_tokenizer(BytesTokenizer(), [])


def train(vocab_size: int = 280, sample_bytes: int = 1_000_000) -> JsonTokenizer:
    tokenizer = build_tokenizer(
        BpeTokenizer(kind="bpe", vocab_size=vocab_size, sample_bytes=sample_bytes), TEXTS
    )
    assert isinstance(tokenizer, JsonTokenizer)
    return tokenizer


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    [ids] = BYTES.encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert BYTES.decode([*ids.tolist(), BYTES.end_of_document_id]) == text


@given(st.text())
def test_saved_bytes_tokenizer_gives_the_same_ids(text: str) -> None:
    hub = HubTokenizer.from_str(BYTES.json_text)
    hub.encode_special_tokens = True
    assert hub.encode(text).ids == BYTES.encode_batch([text])[0].tolist()
    assert hub.decode(hub.encode(text).ids) == text


def test_every_byte_has_its_own_id_when_saved(tmp_path: Path) -> None:
    saved = json.loads(BYTES.save(tmp_path).read_text())
    assert sorted(saved["model"]["vocab"].values()) == list(range(256))
    hub = HubTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert hub.token_to_id("<|endoftext|>") == BYTES.end_of_document_id == BYTES.vocab_size - 1
    assert [hub.decode([byte]) for byte in range(128)] == [chr(byte) for byte in range(128)]


def test_transformers_loads_what_is_saved(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name, tokenizer in (("bytes", BYTES), ("bpe", train())):
        tokenizer.save(tmp_path / name)
        # As in an exported model's folder, where transformers also looks at the model's config.
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama"}))
        loaded = AutoTokenizer.from_pretrained(tmp_path / name)
        for text in [*TEXTS, "  leading\n\n\ttabs "]:
            assert (
                loaded(text, add_special_tokens=False)["input_ids"]
                == tokenizer.encode_batch([text])[0].tolist()
            )
        assert loaded.eos_token_id == tokenizer.end_of_document_id


def test_trained_bpe_round_trips_and_has_the_end_token() -> None:
    tokenizer = train()
    assert tokenizer.vocab_size == 280
    assert tokenizer.decode([tokenizer.end_of_document_id]) == ""
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids.tolist()) == text
        assert len(ids) <= len(text.encode())
    assert len(tokenizer.encode_batch(TEXTS)[0]) < len(TEXTS[0]) / 2


def test_training_is_the_same_in_another_process_with_other_threads() -> None:
    code = (
        "from jobs.data.tokenizer import build_tokenizer\n"
        "from jobs.spec.data import BpeTokenizer\n"
        f"texts = {TEXTS!r}\n"
        "print(build_tokenizer(BpeTokenizer(kind='bpe', vocab_size=280), texts).fingerprint)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == train().fingerprint


def test_training_reads_no_more_than_its_sample() -> None:
    read = []

    def texts():
        for text in TEXTS:
            read.append(text)
            yield text

    build_tokenizer(BpeTokenizer(kind="bpe", vocab_size=260, sample_bytes=10), texts())
    assert read == TEXTS[:1]


def test_training_on_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="no text to train on"):
        build_tokenizer(BpeTokenizer(kind="bpe", vocab_size=300), [])


def test_text_that_quotes_the_end_token_does_not_end(tmp_path: Path) -> None:
    path = train().save(tmp_path)
    for tokenizer in (BYTES, train(), load_tokenizer(path)):
        [ids] = tokenizer.encode_batch(["say <|endoftext|> here"])
        assert tokenizer.end_of_document_id not in ids.tolist()
        assert tokenizer.decode(ids.tolist()) == "say <|endoftext|> here"


def test_truncation_and_padding_of_a_file_are_not_applied(tmp_path: Path) -> None:
    hub = HubTokenizer.from_str(train().json_text)
    hub.enable_truncation(3)
    hub.enable_padding(length=8)
    hub.save(str(tmp_path / "t.json"))
    tokenizer = build_tokenizer(FileTokenizer(kind="file", path=str(tmp_path / "t.json")), [])
    assert [len(ids) for ids in tokenizer.encode_batch(TEXTS)] == [
        len(i) for i in train().encode_batch(TEXTS)
    ]


def test_file_tokenizer_finds_its_end_token_or_says_which_it_lacks(tmp_path: Path) -> None:
    hub = HubTokenizer.from_str(train().json_text)
    hub.add_special_tokens(["</s>", "<stop>"])
    hub.save(str(tmp_path / "t.json"))
    path = str(tmp_path / "t.json")
    found = build_tokenizer(FileTokenizer(kind="file", path=path), [])
    assert found.end_of_document_id == hub.token_to_id("<|endoftext|>")
    assert found.vocab_size == 282
    named = build_tokenizer(FileTokenizer(kind="file", path=path, end_of_document="<stop>"), [])
    assert named.end_of_document_id == 281
    assert named.fingerprint != found.fingerprint
    with pytest.raises(DataError, match=r"has no token <eos>.*end_of_document"):
        build_tokenizer(FileTokenizer(kind="file", path=path, end_of_document="<eos>"), [])


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_broken_file_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(path)


def test_fingerprint_is_of_content_not_of_layout(tmp_path: Path) -> None:
    tokenizer = train()
    first = tokenizer.save(tmp_path / "first")
    second = tmp_path / "second.json"
    second.write_text(json.dumps(json.loads(first.read_text()), indent=7, sort_keys=True))
    one, other = (describe_tokenizer(FileTokenizer(kind="file", path=str(path))) for path in (first, second))
    assert one == other
    assert load_tokenizer(second).fingerprint == tokenizer.fingerprint
    assert train(vocab_size=275).fingerprint != tokenizer.fingerprint
    assert isinstance(BYTES, ByteTokenizer)
    assert BYTES.fingerprint != tokenizer.fingerprint
