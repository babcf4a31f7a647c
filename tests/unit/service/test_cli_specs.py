"""Wrong specs through the command line: one error each, exit code 2, with place, numbers and cure."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.spec.job import JobSpec
from service import runner
from tests.support.commands import command, refusal

SPEC = """\
model: {preset: tiny}
data:
  sources: [{kind: text, path: corpus.txt}]
  seq_len: 64
optim: {lr: 3e-4}
train:
  steps: 10
  global_batch_size: 8
  micro_batch_size: 2
strategy: {kind: native, dp: 2}
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


def edit(folder: Path, old: str, new: str) -> None:
    assert SPEC.count(old) == 1
    (folder / "spec.yaml").write_text(SPEC.replace(old, new))


def test_the_spec_itself_is_right() -> None:
    assert command("validate", "spec.yaml").json["strategy"]["dp"] == 2


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "lr: 3e-4",
            "lr: 3e-4, wieght_decay: 0",
            "spec.yaml:5: optim.wieght_decay: unknown key; did you mean",
        ),
        ("  seq_len: 64", "  seq_len: 64\n  sequence: 3", "spec.yaml:5: data.sequence: unknown key"),
        ("steps: 10", "steps: ten", "spec.yaml:7: train.steps: wants a whole number, got the text 'ten'"),
        ("steps: 10", "steps: 1e3", "spec.yaml:7: train.steps: wants a whole number, got 1000.0; write 1000"),
        ("steps: 10", "steps: -10", "spec.yaml:7: train.steps: must be greater than 0; got -10"),
        ("steps: 10", f"steps: {10**30}", f"spec.yaml:7: train.steps: {10**30} is too large a number"),
        ("lr: 3e-4", "lr: .inf", "spec.yaml:5: optim.lr: .inf is not a finite number"),
        ("lr: 3e-4", "lr: .nan", "spec.yaml:5: optim.lr: .nan is not a finite number"),
        ("lr: 3e-4", "lr: 1e999", "spec.yaml:5: optim.lr: 1e999 is not a finite number"),
        (
            "path: corpus.txt",
            "path: corpus.txt, weight: .inf",
            "spec.yaml:3: data.sources.0.weight: .inf is not a finite number",
        ),
        ("path: corpus.txt", "path: ''", "spec.yaml:3: data.sources.0.path: must not be empty"),
        ("kind: text, path: corpus.txt", "kind: text", "spec.yaml:3: data.sources.0.path: missing"),
        ("storage: runs", "storage: ''", "spec.yaml:11: run.storage: must not be empty"),
        ("storage: runs", 'storage: "a\\0b"', "spec.yaml:11: run.storage: holds a NUL character"),
        ("name: one", "name: \u00fc", "spec.yaml:11: run.name: got '\u00fc'; a name is 1 to 80 letters"),
        ("name: one", "name: ../one", "spec.yaml:11: run.name: got '../one'; a name is"),
        ("tiny", "tinny", "spec.yaml:1: model.preset: no preset 'tinny'; did you mean tiny?"),
        (
            "tiny",
            "tiny, vocab_size: 100",
            "spec.yaml:1: model.vocab_size: 100 is smaller than the bytes tokenizer's 257 ids (largest id "
            "256); set it to at least 257",
        ),
        (
            "global_batch_size: 8",
            "global_batch_size: 9",
            "spec.yaml:8: train.global_batch_size=9 is not micro_batch_size x dp x a whole number: "
            "9 != 2 x 2 x 2.25; nearest that work: 8 or 12",
        ),
        (
            "dp: 2",
            "dp: 3",
            "spec.yaml:8: train.global_batch_size=8 is not micro_batch_size x dp x a whole number: "
            "8 != 2 x 3 x 1.33333; nearest that work: 6 or 12; or strategy.dp=1 or 2 or 4 as it is",
        ),
        (
            "run: {name: one, storage: runs}",
            "run: {name: one, storage: runs}\nresources: {env: {'A=B': x}}",
            "spec.yaml:12: resources.env.A=B: the name of an environment variable is not empty and holds no",
        ),
        (
            "run: {name: one, storage: runs}",
            "run: {name: one, storage: runs}\nresilience: {collective_timeout_s: 1e300}",
            "spec.yaml:12: resilience.collective_timeout_s: must be at most 1e+08; got 1e+300",
        ),
        (
            "optim: {lr: 3e-4}",
            "optim: {lr: 3e-4}\noptim: {lr: 1e-3}",
            "spec.yaml:6: optim: written twice (first at line 5)",
        ),
    ],
)
def test_one_wrong_key_is_one_line(folder: Path, old: str, new: str, expected: str) -> None:
    edit(folder, old, new)
    lines = refusal("run", "spec.yaml")
    assert len(lines) == 1, lines
    assert lines[0].startswith(expected), lines
    assert refusal("validate", "spec.yaml") == lines


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "odd.yaml:1: the file is empty; a spec has at least the sections model, data, optim and train"),
        (b"# only a remark\n", "odd.yaml:1: the file is empty"),
        (b"- a\n- b\n", "odd.yaml:1: a spec is sections of `key: value`, but this file holds a list"),
        (b"model:\n\tpreset: tiny\n", "odd.yaml:2: a tab is used for indentation"),
        (b"model: {preset: tiny\n", "odd.yaml:2: not YAML: expected ',' or '}'"),
        (b"model: {preset: tiny}\n\xff\xfe", "odd.yaml:2: not UTF-8 text (byte 0xff at offset 22)"),
        (b"model: \x00", "odd.yaml:1: holds the character U+0000"),
        (b"a: " + b"[" * 3000, "odd.yaml: lists or mappings are nested too deeply"),
        (b"a: &a [*a]\n", "odd.yaml:1: "),
    ],
)
def test_a_file_that_is_no_spec(folder: Path, content: bytes, expected: str) -> None:
    (folder / "odd.yaml").write_bytes(content)
    lines = refusal("run", "odd.yaml")
    assert len(lines) == 1
    assert lines[0].startswith(expected), lines


def test_a_path_that_is_no_file(folder: Path) -> None:
    (folder / "folder.yaml").mkdir()
    (folder / "broken.yaml").symlink_to(folder / "gone.yaml")
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    assert refusal("run", "none.yaml") == ["none.yaml: no such file"]
    assert refusal("run", "folder.yaml") == ["folder.yaml: is a folder, not a file"]
    assert refusal("run", "broken.yaml") == ["broken.yaml: no such file"]
    assert refusal("run", "loop.yaml") == ["loop.yaml: cannot be read: Too many levels of symbolic links"]
    assert refusal("run", "/proc/self/mem")[0].startswith("/proc/self/mem: cannot be read: ")


def test_all_that_is_wrong_comes_at_once_in_the_order_of_the_lines(folder: Path) -> None:
    edit(
        folder, "  seq_len: 64\noptim: {lr: 3e-4}", "  seq_len: -1\noptim: {lr: 3e-4, beta1: 2, momentum: 1}"
    )
    places = [line.split(" must")[0].split(" unknown")[0] for line in refusal("run", "spec.yaml")]
    assert places == [
        "spec.yaml:4: data.seq_len:",
        "spec.yaml:5: optim.beta1:",
        "spec.yaml:5: optim.momentum:",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.learning_rate=1", "optim.learning_rate: unknown key; known here: kind, lr"),
        ("trian.steps=1", "trian: unknown key; did you mean train?"),
        ("optim.lr", "an override is written key.key=value, for example optim.lr=3e-4"),
        ("=1", "an override is written key.key=value"),
        ("a..b=1", "an override is written key.key=value"),
        ("optim.lr=-1", "optim.lr: must be greater than 0; got -1"),
        ("optim.lr=.nan", ".nan is not a finite number"),
        ("data.sources.4.weight=1", "data.sources: is a list of 1 element: it takes an index from 0 to 0"),
        ("optim.lr.x=1", "optim.lr: is 0.0003, so there is no optim.lr.x in it"),
        ("data.sources=[]", "data.sources: needs at least 1 element, got none"),
        (
            "strategy={kind: ddp}",
            "strategy: kind must be one of native, deepspeed_zero, deepspeed_pipeline; got the text 'ddp'",
        ),
        ("optim={lr: 1, lr: 2}", "lr: written twice"),
    ],
)
def test_an_override_is_named_as_it_was_written(override: str, expected: str) -> None:
    lines = refusal("run", "spec.yaml", "--set", override)
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"--set {override}: "), lines
    assert expected.split(": ", 1)[-1] in lines[0]


def test_deepspeed_keys_that_contradict(folder: Path) -> None:
    """deepspeedai/DeepSpeed#3982: the product is shown with its numbers, before a worker starts."""
    strategy = f"strategy.deepspeed_config={folder}/ds.json"
    zero = ("--set", "strategy={kind: deepspeed_zero, dp: 2, stage: 2}", "--set", strategy)

    def told(config: dict[str, object]) -> str:
        (folder / "ds.json").write_text(json.dumps(config))
        lines = refusal("run", "spec.yaml", *zero)
        assert len(lines) == 1, lines
        assert "ds.json" in lines[0]
        return lines[0]

    edit(folder, "  global_batch_size: 8\n  micro_batch_size: 2\n", "")
    batch = {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    assert "9 != 3 x 1 x 2" in told(batch)
    edit(folder, "steps: 10", "steps: 11")
    stage = told({"zero_optimization": {"stage": 3}})
    assert "zero_optimization.stage" in stage
    assert "2" in stage
    assert "3" in stage
    both = told({"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert "fp16" in both
    assert "Infinity" not in told({"gradient_clipping": float("inf")})


@pytest.mark.parametrize(
    "words", [[], ["validate"], ["bogus"], ["run", "spec.yaml", "--bogus"], ["run", "a", "b"]]
)
def test_usage_errors_have_exit_code_2_too(words: list[str]) -> None:
    answer = command(*words)
    assert (answer.code, "Traceback" in answer.err) == (2, False)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["native", "kind", "text", "tiny", "bytes", "9e9", "-0", "[", "{a: 1}"]),
    st.just([]),
    st.just({}),
)
KEYS = sorted(
    f"{section}.{key}"
    for section in JobSpec.model_fields
    for key in (
        getattr(JobSpec.model_fields[section].annotation, "model_fields", None) or ["kind", "dp", "stage"]
    )
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from(KEYS), LEAVES, min_size=1, max_size=3))
def test_any_values_load_or_are_refused(values: dict[str, object]) -> None:
    """No value of any key gets past the schema as an exception, and none is refused without a line."""
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    answer = command("validate", "spec.yaml", *sets)
    if answer.code:
        assert answer.code == 2
        assert answer.err.startswith("error: --set") or "spec.yaml:" in answer.err
    else:
        assert answer.json["model"]["preset"] in ("tiny", None) or "model.preset" in values


def test_a_spec_that_is_no_text_is_refused_by_every_verb_that_reads_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "spec.yaml").write_bytes(b"\x80")
    verbs: list[Callable[[], list[str]]] = [
        lambda: refusal("validate", "spec.yaml"),
        lambda: refusal("submit", "spec.yaml"),
        lambda: refusal("data", "prepare", "spec.yaml"),
        lambda: refusal("data", "peek", "spec.yaml"),
    ]
    assert {tuple(verb()) for verb in verbs} == {
        ("spec.yaml:1: not UTF-8 text (byte 0x80 at offset 0); save it as UTF-8",)
    }
