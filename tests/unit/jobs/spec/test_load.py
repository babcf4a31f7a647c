"""The loader: what it takes, and the sentence for everything that it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import SpecError
from jobs.spec.job import JobSpec
from jobs.spec.load import load_spec, load_spec_with_report, resolved_json, spec_from_json
from jobs.spec.tree import Json
from tests.unit.jobs.spec.conftest import VALID

FOLDER = Path(__file__).parents[4] / "jobs" / "specs"
SPECS = sorted(path for path in FOLDER.glob("*.yaml") if not path.name.startswith("lesson_"))


def without(section: str) -> str:
    """VALID without one top-level section."""
    lines, kept, inside = VALID.splitlines(), [], False
    for line in lines:
        if not line.startswith(" "):
            inside = line == f"{section}:"
        if not inside:
            kept.append(line)
    return "\n".join(kept)


def test_valid(write_spec):
    spec = load_spec(write_spec())
    assert spec.optim.lr == 3e-4
    assert isinstance(spec.optim.lr, float)
    assert (spec.model.d_model, spec.model.n_heads, spec.model.head_dim) == (128, 4, 32)
    assert (spec.world_size, spec.grad_accum_steps) == (2, 2)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("steps: 10", "stepz: 10", "spec.yaml:8: train.stepz: unknown key; did you mean steps?"),
        ("seq_len: 64", "seqlen: 64", "spec.yaml:4: data.seqlen: unknown key; did you mean seq_len?"),
        ("optim:", "optimizer:", "spec.yaml:5: optimizer: unknown key; did you mean optim?"),
        (
            "lr: 3e-4",
            "zzz: 1\n  lr: 3e-4",
            "spec.yaml:6: optim.zzz: unknown key; known here: kind, lr, beta1, beta2, eps, weight_decay, "
            "grad_clip_norm, schedule",
        ),
        ("  steps: 10\n", "", "spec.yaml:7: train.steps: missing in train; it wants a whole number"),
        ("steps: 10", "steps: ten", "spec.yaml:8: train.steps: wants a whole number, got the text 'ten'"),
        (
            "steps: 10",
            "steps: '10'",
            "spec.yaml:8: train.steps: wants a whole number, got the text '10'; write 10, plain and "
            "without quotes",
        ),
        ("steps: 10", "steps: 1e3", "spec.yaml:8: train.steps: wants a whole number, got 1000.0; write 1000"),
        ("steps: 10", "steps: 2.5", "spec.yaml:8: train.steps: wants a whole number, got 2.5"),
        ("steps: 10", "steps: 0", "spec.yaml:8: train.steps: must be greater than 0; got 0"),
        ("steps: 10", "steps: true", "spec.yaml:8: train.steps: wants a whole number, got true"),
        ("steps: 10", "steps:", "spec.yaml:8: train.steps: wants a whole number, got nothing (null)"),
        ("steps: 10", "steps: [1]", "spec.yaml:8: train.steps: wants a whole number, got a list of 1"),
        (
            "steps: 10",
            "steps: 010",
            "spec.yaml:8: train.steps: wants a whole number, got the text '010'; write 10, plain and "
            "without quotes",
        ),
        ("lr: 3e-4", "lr: .inf", "spec.yaml:6: optim.lr: .inf is not a finite number"),
        ("lr: 3e-4", "lr: 1e999", "spec.yaml:6: optim.lr: 1e999 is not a finite number"),
        ("lr: 3e-4", "lr: -1", "spec.yaml:6: optim.lr: must be greater than 0; got -1"),
        (
            "lr: 3e-4",
            "lr: 3e-4\n  kind: adam",
            "spec.yaml:7: optim.kind: must be one of adamw, sgd; got the text 'adam'; did you mean adamw?",
        ),
        (
            "lr: 3e-4",
            "lr: 3e-4\n  schedule: {warmup_steps: 3}",
            "spec.yaml:7: optim.schedule: the key kind is missing; it wants one of cosine, wsd, linear, "
            "constant",
        ),
        (
            "lr: 3e-4",
            "lr: 3e-4\n  schedule: {kind: cosinus}",
            "spec.yaml:7: optim.schedule: kind must be one of cosine, wsd, linear, constant; "
            "got the text 'cosinus'; did you mean cosine?",
        ),
        (
            "lr: 3e-4",
            "lr: 3e-4\n  schedule: cosine",
            "spec.yaml:7: optim.schedule: wants a section with the key kind (one of cosine, wsd, linear, "
            "constant), "
            "got the text 'cosine'",
        ),
        (
            "lr: 3e-4",
            "lr: 3e-4\n  schedule:\n    kind: wsd\n    decay_step: 3",
            "spec.yaml:9: optim.schedule.decay_step: unknown key; did you mean decay_steps?",
        ),
        (
            "dp: 2",
            "dp: 2\n  stage: 1",
            "spec.yaml:14: strategy.stage: belongs to kind deepspeed_zero or deepspeed_pipeline, but kind is "
            "native; known here: kind, dp, pp, cp, tp, ep, etp, sequence_parallel, context_method, pipeline, "
            "zero_stage, recompute, bucket_mib",
        ),
        (
            "seq_len: 64",
            "seq_len: 64\n  mask_documents: yes",
            "spec.yaml:5: data.mask_documents: wants true or false, got the text 'yes'; write true",
        ),
        (
            "seq_len: 64",
            "seq_len: 64\n  sources: []",
            "spec.yaml:5: data.sources: needs at least 1 element, got none",
        ),
        (
            "seq_len: 64",
            "seq_len: 64\n  sources:\n    - kind: python\n    - kind: text\n      pth: x",
            "spec.yaml:8: data.sources.1.pth: unknown key; did you mean path?",
        ),
        (
            "seq_len: 64",
            "seq_len: 64\n  sources:\n    - kind: python\n    - kind: text",
            "spec.yaml:7: data.sources.1.path: missing in data.sources.1; it wants text",
        ),
        (
            "model:",
            "run: {name: a b}\nmodel:",
            "spec.yaml:1: run.name: got 'a b'; a name is 1 to 80 letters, digits, dots, _ and -, "
            "a letter or digit first",
        ),
        (
            "model:",
            "run: {name: 2024}\nmodel:",
            'spec.yaml:1: run.name: wants text, got 2024; put it in quotes: "2024"',
        ),
        (
            "model:",
            "resources: {env: {OMP_NUM_THREADS: 2}}\nmodel:",
            'spec.yaml:1: resources.env.OMP_NUM_THREADS: wants text, got 2; put it in quotes: "2"',
        ),
        ("preset: tiny", "preset: tinny", "spec.yaml:2: model.preset: no preset 'tinny'; did you mean tiny?"),
        (
            "preset: tiny",
            "preset: gpt",
            "spec.yaml:2: model.preset: no preset 'gpt'; known here: tiny, small, 125m, 1b, 3b, 8b, 70b, "
            "405b, llama2_7b, tiny_moe, mixtral_8x7b, deepseek_16b",
        ),
        (
            "preset: tiny",
            "preset: tiny\n  n_heads: 6",
            "spec.yaml:3: model.n_heads: n_heads=6 does not divide d_model=128: 128 / 6 = 21.3333; "
            "change one of them or give head_dim",
        ),
        (
            "preset: tiny",
            "preset: tiny\n  n_kv_heads: 3",
            "spec.yaml:3: model: n_kv_heads=3 does not divide n_heads=4; choose n_kv_heads in [1, 2, 4]",
        ),
        (
            "preset: tiny",
            "preset: tiny\n  vocab_size: 256",
            "spec.yaml:3: model.vocab_size: 256 is smaller than the bytes tokenizer's 257 ids (largest "
            "id 256); "
            "set it to at least 257",
        ),
        (
            "global_batch_size: 8",
            "global_batch_size: 9",
            "spec.yaml:9: train.global_batch_size=9 is not micro_batch_size x dp x a whole number: "
            "9 != 2 x 2 x 2.25; nearest that work: 8 or 12",
        ),
        (
            "micro_batch_size: 2",
            "micro_batch_size: 8",
            "spec.yaml:9: train.global_batch_size=8 is not micro_batch_size x dp x a whole number: "
            "8 != 8 x 2 x 0.5; nearest that work: 16 or 32; or strategy.dp=1 as it is",
        ),
        (
            "seq_len: 64",
            "seq_len: 4096",
            "spec.yaml:4: data.seq_len=4096 is longer than model.max_seq_len=1024; shorten the one or "
            "raise the other",
        ),
        (
            "dp: 2",
            "dp: 2\n  dp: 3",
            "spec.yaml:14: strategy.dp: written twice (first at line 13); keep one of the two",
        ),
        (
            "dp: 2",
            "<<: {dp: 2}",
            "spec.yaml:13: strategy: merge keys (<<) are not supported; write the keys out",
        ),
        (
            "dp: 2",
            "dp: !!python/name:os.system 2",
            "spec.yaml:13: strategy.dp: the tag tag:yaml.org,2002:python/name:os.system is not allowed; "
            "write a plain value",
        ),
    ],
)
def test_refused(problems_of, old, new, expected):
    assert old in VALID
    assert problems_of(VALID.replace(old, new, 1)) == [expected]


@pytest.mark.parametrize("section", ["model", "data", "optim", "train"])
def test_missing_section_is_at_the_top(problems_of, section):
    expected = f"spec.yaml:1: {section}: missing in the spec; it wants a section (keys and values)"
    assert expected in problems_of(without(section))


def test_several_problems_are_reported_together(problems_of):
    text = (
        VALID.replace("steps: 10", "stepz: 10")
        .replace("lr: 3e-4", "lr: fast")
        .replace("dp: 2", "dp: 2\n  dp: 4")
    )
    assert problems_of(text) == [
        "spec.yaml:6: optim.lr: wants a number, got the text 'fast'",
        "spec.yaml:8: train.stepz: unknown key; did you mean steps?",
        "spec.yaml:14: strategy.dp: written twice (first at line 13); keep one of the two",
    ]


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_is_a_spec_error(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("any") / "spec.yaml"
    file.write_bytes(text.encode())
    with pytest.raises(SpecError, match=r"spec\.yaml"):
        load_spec(file)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "lr", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
SETTABLE = [
    "model",
    "model.n_heads",
    "model.head_dim",
    "model.rope_scaling",
    "data.sources",
    "data.tokenizer",
    "optim",
    "optim.schedule",
    "train.steps",
    "strategy",
    "strategy.zero_options",
    "resources.env",
    "run.name",
    "strategy.dp",
]


@given(st.sampled_from(SETTABLE), JSON)
@settings(max_examples=100, deadline=None)
def test_any_value_anywhere_loads_or_is_named(tmp_path_factory, key, value: Json):
    file = tmp_path_factory.mktemp("any") / "spec.yaml"
    file.write_text(VALID)
    override = f"{key}={json.dumps(value)}"
    try:
        spec = load_spec(file, [override])
    except SpecError as error:
        lines = str(error).splitlines()
    else:
        assert spec_from_json(resolved_json(spec)) == spec
        return
    assert all(line.startswith(("--set ", str(file))) for line in lines)
    assert any(line.startswith(f"--set {key}=") for line in lines)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_load_and_round_trip(path):
    loaded = load_spec_with_report(path)
    assert loaded.deepspeed is None
    spec = loaded.spec
    text = resolved_json(spec)
    assert spec_from_json(text) == spec
    assert resolved_json(spec_from_json(text)) == text
    assert json.loads(text)["optim"]["lr"] == spec.optim.lr


def test_shipped_specs_are_these():
    assert [path.stem for path in SPECS] == [
        "llama3_8b_zero3",
        "moe_ep",
        "quickstart",
        "tiny",
        "zero0",
        "zero1",
        "zero2",
        "zero3",
    ]
    stages = {path.stem: load_spec(path).strategy for path in SPECS if path.stem.startswith("zero")}
    assert {name: strategy.stage for name, strategy in stages.items()} == {f"zero{s}": s for s in range(4)}


def test_resolved_json_writes_every_key(write_spec):
    resolved = json.loads(resolved_json(load_spec(write_spec())))
    assert set(resolved) == set(JobSpec.model_fields)
    assert resolved["optim"]["schedule"] == {"kind": "cosine", "warmup_steps": 0, "min_lr_frac": 0.1}


def test_resolved_json_is_as_strict(write_spec):
    resolved = json.loads(resolved_json(load_spec(write_spec())))
    resolved["train"]["step"] = 3
    with pytest.raises(SpecError, match=r"^runs/a/spec.json: train.step: unknown key; did you mean steps\?$"):
        spec_from_json(json.dumps(resolved), "runs/a/spec.json")
    with pytest.raises(SpecError, match=r"^spec.json:1: not JSON"):
        spec_from_json('{"train": ')
    with pytest.raises(SpecError, match="a JSON object"):
        spec_from_json("[]")


def test_paths_beside_the_spec_win(tmp_path, monkeypatch):
    home, work = tmp_path / "specs", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    (home / "a.txt").touch()
    (home / "tokenizer.json").touch()
    for name in ("a.txt", "b.txt", "c1.txt"):
        (work / name).touch()
    sources = "".join(
        f"    - {{kind: text, path: '{p}'}}\n" for p in ("a.txt", "b.txt", "c*.txt", "nowhere", "/abs")
    )
    text = VALID.replace(
        "  seq_len: 64\n",
        f"  seq_len: 64\n  tokenizer: {{kind: file, path: tokenizer.json}}\n  sources:\n{sources}",
    )
    (home / "spec.yaml").write_text(text + "run: {storage: out}\n")
    monkeypatch.chdir(work)
    spec = load_spec(Path("../specs/spec.yaml"))
    found = [source.path for source in spec.data.sources]
    assert [Path(p).resolve() for p in found] == [
        home / "a.txt",
        work / "b.txt",
        work / "c*.txt",
        work / "nowhere",
        Path("/abs"),
    ]
    assert all(Path(p).is_absolute() for p in found)
    assert Path(spec.data.tokenizer.path).resolve() == home / "tokenizer.json"
    assert spec.run.storage == "out"


def test_imports_neither_torch_nor_ray():
    code = (
        "import sys\n"
        "from jobs.spec.load import load_spec, resolved_json\n"
        "import jobs.spec.compare, service.preflight\n"
        f"resolved_json(load_spec({str(SPECS[0])!r}))\n"
        "heavy = {'torch', 'ray', 'deepspeed', 'mlflow', 'numpy', 'tokenizers', 'transformers'} & "
        "set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "value", ["[slack://s3cret/token]", "slack://s3cret", '["${URL}", "s3cret${URL}"]', '["${}"]']
)
def test_urls_of_notifications_are_never_in_the_spec_and_never_quoted(write_spec, value):
    path = write_spec(f"{VALID}\ntracking:\n  notify: {value}\n")
    with pytest.raises(SpecError, match="put the URL into an environment variable") as caught:
        load_spec(path)
    assert "s3cret" not in str(caught.value)


def test_notifications_name_environment_variables(write_spec):
    spec = load_spec(write_spec(f"{VALID}\ntracking:\n  notify: ['${{OPS_URL}}']\n"))
    assert spec.tracking.notify == ("${OPS_URL}",)
    assert spec_from_json(resolved_json(spec)) == spec
