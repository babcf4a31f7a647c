"""Wrong data through the command line: found while it is prepared, before a cluster is asked for anything."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from service import runner
from tests.support.commands import command, refusal

SPEC = """\
model: {preset: tiny}
data:
  sources: [{kind: text, path: corpus.txt}]
  seq_len: 64
optim: {lr: 3e-4}
train: {steps: 10, global_batch_size: 4, micro_batch_size: 2}
run: {name: one, storage: runs}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a spec and a corpus, in which no run and no cluster may ever begin."""

    def begin(*_: object, **__: object) -> None:
        raise AssertionError("a wrong input has come as far as the cluster")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_connect", begin)
    (tmp_path / "corpus.txt").write_text("hello world. " * 2000)
    (tmp_path / "spec.yaml").write_text(SPEC)
    yield tmp_path
    assert not (tmp_path / "runs" / "one").exists(), "a refused start leaves no run folder"


def refused_source(source: str, *more: str) -> str:
    lines = refusal("run", "spec.yaml", "--set", f"data.sources=[{source}]", *more)
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("content", ["", " \n\n \n"])
def test_a_corpus_without_a_token(folder: Path, content: str) -> None:
    """NVIDIA/Megatron-LM#62."""
    (folder / "corpus.txt").write_text(content)
    assert refused_source("{kind: text, path: corpus.txt}") == (
        "the data has no tokens at all: 0 documents, 1 empty ones skipped; at least 65 tokens are needed for "
        "one sequence"
    )


def test_a_corpus_of_less_than_a_sequence(folder: Path) -> None:
    (folder / "corpus.txt").write_text("hi")
    line = refused_source("{kind: text, path: corpus.txt}")
    assert line.startswith("data.sources[0] has 3 tokens to train on (1 documents, 0 empty ones skipped, ")
    assert "fewer than the 65 that one sequence of data.seq_len=64 needs" in line


def test_paths_that_are_not_there(folder: Path) -> None:
    (folder / "broken.txt").symlink_to(folder / "gone.txt")
    (folder / "empty").mkdir()
    for name in ("gone.txt", "broken.txt"):
        assert refused_source(f"{{kind: text, path: {name}}}") == (
            f"data.sources.0.path: {folder}/{name} does not exist "
            f"(of its folders, {folder} is the last that does)"
        )
    assert (
        refused_source("{kind: text, path: '*.nope'}")
        == f"data.sources.0.path: no file matches {folder}/*.nope"
    )
    assert (
        refused_source("{kind: text, path: empty}")
        == f"data.sources: the folder {folder}/empty holds no file"
    )
    assert "s3://bucket/x names no file, folder or glob" in refused_source(
        "{kind: text, path: 's3://bucket/x'}"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"text": "a"}\n{"text": \n', ":2: not JSON (Expecting value at column 1)"),
        (b'{"text": "a"}\n{"txt": "b"}\n', ":2: no key 'text', the line has keys ['txt']; set text_key"),
        (b'{"text": "a"}\n{"text": 5}\n', ":2: 'text' is 5, it must be a string"),
        (b'{"text": "a"}\n[1]\n', ":2: no key 'text', the line has a list"),
        (b'{"text": "caf\xe9"}\n', ":1: not UTF-8 text (byte 13 of the line"),
        (b'{"text": "\\ud800"}\n', ":1: 'text' holds half of a surrogate pair at character 0"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(folder: Path, content: bytes, expected: str) -> None:
    (folder / "bad.jsonl").write_bytes(content)
    assert refused_source("{kind: jsonl, path: bad.jsonl}").startswith(f"{folder}/bad.jsonl{expected}")


def test_text_that_is_not_utf8(folder: Path) -> None:
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    assert refused_source("{kind: text, path: latin.txt}").startswith(f"{folder}/latin.txt: not UTF-8 text")


def test_token_ids_the_model_has_no_rows_for(folder: Path) -> None:
    """BlinkDL/RWKV-LM#346: refused before step 1, with both numbers."""
    np.array([1, 2, 600] * 100, np.uint16).tofile(folder / "ids.bin")
    np.array([1, -5, 60] * 100, np.int32).tofile(folder / "negative.bin")
    (folder / "odd.bin").write_bytes(b"123")
    (folder / "broken.npy").write_bytes(b"\x93NUMPY")
    assert refused_source("{kind: tokens, path: ids.bin}") == (
        "the data's largest token id is 600 but model.vocab_size=512 has ids up to 511; "
        "set model.vocab_size to at least 601, or is it other data?"
    )
    assert "largest token id is 70000 " in refused_source(
        "{kind: tokens, path: ids.bin, end_of_document_id: 70000}"
    )
    assert "token 1 is -5; ids are 0 or more" in refused_source(
        "{kind: tokens, path: negative.bin, dtype: int32}"
    )
    assert "3 bytes are not a whole number of uint16 tokens" in refused_source(
        "{kind: tokens, path: odd.bin}"
    )
    assert "not a .npy file that can be read" in refused_source("{kind: tokens, path: broken.npy}")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hello", "is no tokenizer.json: Expecting value"),
        ('{"hello": 1}', "is no tokenizer.json: it has no model.vocab"),
        ('{"model": {"vocab": {"a": "x"}}}', "is no tokenizer.json: its ids are not all whole numbers"),
        ('{"model": {"vocab": [["a", 1]]}, "added_tokens": 5}', "is no tokenizer.json: its ids are not all"),
        (
            '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b"}]}',
            "is no tokenizer.json: its ids",
        ),
        ('{"model": {"vocab": {"a": 0}}}', "is not a tokenizer.json (data did not match any variant"),
        ('{"model": {"vocab": {"a": 600}}}', "model.vocab_size=512 is smaller than the tokenizer's 601 ids"),
    ],
)
def test_a_tokenizer_file_that_is_none_or_too_large(folder: Path, content: str, expected: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    lines = refusal("run", "spec.yaml", "--set", "data.tokenizer={kind: file, path: tokenizer.json}")
    assert len(lines) == 1, lines
    assert expected in lines[0]
    assert "tokenizer" in lines[0]


def test_other_files_in_the_place_of_a_tokenizer(folder: Path) -> None:
    (folder / "folder").mkdir()
    for name, expected in (("gone.json", "does not exist"), ("folder", "cannot read")):
        lines = refusal("run", "spec.yaml", "--set", f"data.tokenizer={{kind: file, path: {name}}}")
        assert len(lines) == 1
        assert lines[0].startswith("data.tokenizer.path: ")
        assert expected in lines[0]


def test_a_weight_too_small_to_be_kept(folder: Path) -> None:
    (folder / "other.txt").write_text("other words. " * 2000)
    source = "{kind: text, path: corpus.txt}, {kind: text, path: other.txt, weight: 1e-300}"
    assert "a weight is under 1e-9 of the others" in refused_source(source)


def test_an_evaluation_without_validation_data() -> None:
    lines = refusal(
        "run", "spec.yaml", "--set", "train.evaluate_every_steps=5", "--set", "data.validation_frac=0"
    )
    assert lines[0].startswith("train.evaluate_every_steps is set but the validation split has 0 tokens")


def test_start_weights_that_the_ranks_could_not_read(folder: Path) -> None:
    (folder / "weights").mkdir()
    line = refusal("run", "spec.yaml", "--set", "train.init_from=weights")
    assert line == [f"train.init_from: {folder}/weights has no config.json: not a Hugging Face folder"]
    config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 344}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 1024}
    (folder / "weights" / "config.json").write_text(json.dumps(config))
    lines = refusal("run", "spec.yaml", "--set", "train.init_from=weights")
    assert lines[0].startswith(f"train.init_from: {folder}/weights is of another model: ")
    assert "d_model is 64 in the checkpoint and 128 in this run" in lines[0]
    lines = refusal(
        "run", "spec.yaml", "--set", "train.init_from=weights", "--set", "model={hf_config: weights}"
    )
    assert "has neither model.safetensors nor model.safetensors.index.json" in lines[0]


def test_peek_shows_a_step_by_the_contract_and_refuses_what_is_none() -> None:
    seen = command("data", "peek", "spec.yaml", "--step", "2", "--json").json
    assert {"step", "sample_ids", "tokens", "documents"} <= seen.keys()
    assert (seen["step"], len(seen["sample_ids"]), len(seen["tokens"][0])) == (2, 4, 64)
    for step in ("0", "-3", "one", "1.5"):
        assert command("data", "peek", "spec.yaml", "--step", step).code == 2
    assert refusal_of_far_step(2**63) == refusal_of_far_step(2**61 + 1).replace(str(2**61 + 1), str(2**63))


def refusal_of_far_step(step: int) -> str:
    answer = command("data", "peek", "spec.yaml", "--step", str(step))
    assert answer.code == 2
    line = answer.err.splitlines()[-1]
    assert line.startswith(f"error: step {step} x train.global_batch_size=4 is beyond the last sample")
    return line
