"""Wrong words about runs and checkpoints through the command line, and folders that somebody has damaged."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service import runner
from tests.support.commands import command, refusal
from tests.support.stored_runs import stopped_run

SPEC = """\
model: {preset: tiny, n_layers: 1}
data:
  sources: [{kind: text, path: corpus.txt}]
  seq_len: 64
optim: {lr: 3e-4}
train: {steps: 20, global_batch_size: 4, micro_batch_size: 2}
run: {name: one, storage: runs}
tracking: {mlflow: false}
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    (folder / "corpus.txt").write_text("hello world. " * 2000)
    (folder / "spec.yaml").write_text(SPEC.replace("runs", str(folder / "runs")))
    stopped_run(folder / "spec.yaml", (5, 10))
    return folder


@pytest.fixture(autouse=True)
def folder(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of a folder with a stopped run at step 10; no cluster is asked for anything."""

    def begin(*_: object, **__: object) -> None:
        raise AssertionError("a wrong input has come as far as the cluster")

    folder = tmp_path / "here"
    shutil.copytree(stored, folder)
    for file in (folder / "runs" / "one").glob("*.json"):
        file.write_text(file.read_text().replace(str(stored), str(folder)))
    (folder / "spec.yaml").write_text(SPEC)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(runner, "_connect", begin)
    before = tree(folder / "runs")
    yield folder
    if (folder / "runs").is_dir():
        assert tree(folder / "runs") <= before, "a refused command leaves nothing behind"


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "cache" not in path.parts}


def test_a_name_in_use(folder: Path) -> None:
    assert refusal("run", "spec.yaml") == [
        f"run.name: one is in use at {folder}/runs/one (status STOPPED); choose another name, or go on with "
        "it: packtrain resume one"
    ]


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("run.seed=7", "run.seed: 0 -> 7"),
        ("data.seq_len=32", "data.seq_len: 64 -> 32"),
        ("model.rope_theta=5e5", "model.rope_theta: 10000.0 -> 500000.0"),
        ("optim.kind=sgd", "optim.kind: adamw -> sgd"),
        ("data.packing=pad", "data.packing: concat -> pad"),
    ],
)
def test_a_resume_that_would_mean_another_run(override: str, changed: str) -> None:
    lines = refusal("resume", "one", "--set", override, "--set", "train.steps=40")
    assert lines == [
        f"the spec changed in a way that this run cannot go on with: {changed}. Put the old values back, or "
        "start a new run under another run.name"
    ]


def test_a_resume_at_a_size_that_the_batch_does_not_divide_by(folder: Path) -> None:
    """deepspeedai/DeepSpeed#2898: a size that works with the batch is a size that may resume."""
    (line,) = refusal("resume", "one", "--set", "strategy.dp=3")
    assert "4 != 2 x 3 x 0.666667; nearest that work: 6 or 12; or strategy.dp=1 or 2 as it is" in line
    assert line.startswith(f"{folder}/runs/one/spec.json:")


def test_a_resume_with_other_data(folder: Path) -> None:
    (folder / "corpus.txt").write_text("other words. " * 2000)
    answer = command("resume", "one")
    assert answer.code == 2
    assert "the data has changed since the run began: fingerprint " in answer.err


def test_a_resume_of_what_is_finished_or_being_driven(folder: Path) -> None:
    file = folder / "runs" / "one" / "run.json"
    state = json.loads(file.read_text())
    metrics = folder / "runs" / "one" / "metrics.jsonl"
    metrics.write_text('{"at": 1.0, "step": 20, "grad_norm": 1.0}\n')
    file.write_text(json.dumps({**state, "status": "FINISHED"}))
    assert refusal("resume", "one") == [
        "run one is FINISHED at step 20 of train.steps=20: nothing is left to do; train further with --set "
        "train.steps=N"
    ]
    metrics.unlink()
    me = {"driver_pid": os.getpid(), "driver_started_at": psutil.Process().create_time()}
    file.write_text(json.dumps({**state, **me, "status": "RUNNING"}))
    (line,) = refusal("resume", "one")
    assert line.startswith(f"run one is being driven by process {os.getpid()} on ")
    assert line.endswith("end that first: packtrain stop one")


def test_runs_that_are_not_there(folder: Path) -> None:
    unknown = [f"no run 'two' in {folder}/runs; there: one"]
    for verb in (
        ["resume"],
        ["status"],
        ["stop"],
        ["logs"],
        ["report"],
        ["checkpoint", "ls"],
        ["checkpoint", "verify"],
    ):
        assert refusal(*verb, "two") == unknown
    assert refusal("checkpoint", "export", "two", "out") == unknown
    assert refusal("status", "one", "--storage", "corpus.txt") == [
        f"no run 'one' in {folder}/corpus.txt; there: none"
    ]
    assert command("list", "--storage", "nowhere").out == "no runs in nowhere\n"
    assert refusal("logs", "one", "--rank", "99") == ["--rank 99: run one has ranks 0 to 0"]
    assert refusal("logs", "one", "--rank", "-1") == ["--rank -1: run one has ranks 0 to 0"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", b""),
        ("run.json", b'{"run_id": "one"'),
        ("run.json", b'{"run_id": "one", "status": "STOPPED", "created_at": 0, "of_a_later_version": 1}'),
        ("run.json", b"[]"),
        ("spec.json", b'{"run": 5'),
        ("spec.json", b'{"run": {"seed": "x"}}'),
        ("spec.json", b"\xff"),
        ("spec.json", None),
    ],
)
def test_damaged_files_of_a_run(folder: Path, name: str, content: bytes | None) -> None:
    file = folder / "runs" / "one" / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    for verb in ("status", "resume", "report"):
        assert all(name in line for line in refusal(verb, "one"))
    rows = command("list", "--json").json
    assert [(row["run_id"], row["status"]) for row in rows] == [("one", "UNREADABLE")]
    assert name in rows[0]["error"]
    if content is None:
        shutil.rmtree(folder / "runs")


def test_steps_dtypes_and_folders_of_an_export(folder: Path) -> None:
    where = f"{folder}/runs/one/checkpoints"
    for step in ("7", "-7", str(10**20)):
        assert refusal("checkpoint", "export", "one", "out", "--step", step) == [
            f"no checkpoint of step {step} in {where}; committed steps: 5, 10"
        ]
    assert refusal("checkpoint", "export", "one", "out", "--dtype", "float8") == [
        "--dtype float8: choose one of float32, bfloat16"
    ]
    (folder / "full").mkdir()
    assert refusal("checkpoint", "export", "one", "full") == ["full exists: give a folder that does not"]
    assert "Not a directory" in refusal("checkpoint", "export", "one", "corpus.txt/x")[0]
    assert refusal("run", "spec.yaml", "--set", "run.name=two", "--export", "full") == [
        "--export: full exists; name a folder that does not"
    ]
    assert not (folder / "out").exists()
    assert list((folder / "full").iterdir()) == []


def test_damaged_checkpoints_are_passed_over_or_named(folder: Path) -> None:
    """vllm-project/speculators#739, bghira/SimpleTuner#2613."""
    checkpoints = folder / "runs" / "one" / "checkpoints"
    shard = next((checkpoints / "step-00000010").glob("shard-*"))
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 10)  # in the weights: an export reads nothing else
        file.write(b"\xff" * 8)
    answer = command("checkpoint", "verify", "one")
    assert answer.code == 1
    assert "step-00000005  good" in answer.out
    assert "step-00000010  BAD: " in answer.out
    assert "checksum" in refusal("checkpoint", "export", "one", "out", "--step", "10")[0]
    told = command("checkpoint", "export", "one", "newest")
    assert told.code == 0
    assert "passed over step-00000010: " in told.out
    assert "exported step 5 to newest" in told.out
    for path in checkpoints.glob("step-*/manifest.json"):
        path.unlink()
    lines = refusal("checkpoint", "export", "one", "out")
    assert lines[0] == f"no verified checkpoint in {checkpoints}"
    assert all("not finished" in line for line in lines[1:])


def test_imports_that_cannot_be(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "gpt").mkdir()
    (folder / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "text").mkdir()
    (folder / "text" / "config.json").write_text("hello")
    assert refusal("checkpoint", "import", "gone", "out") == ["gone: no such file"]
    assert refusal("checkpoint", "import", "empty", "out") == ["empty/config.json: no such file"]
    assert refusal("checkpoint", "import", "text", "out") == ["text/config.json:1: not JSON: Expecting value"]
    assert "gpt2" in refusal("checkpoint", "import", "gpt", "out")[0]
    assert refusal("checkpoint", "import", "gpt", "empty") == ["empty exists: choose a new folder"]
    assert not (folder / "out").exists()


def test_addresses_where_nobody_is() -> None:
    for address in ("http://127.0.0.1:1", "nonsense"):
        (line,) = refusal("submit", "spec.yaml", "--set", "run.name=two", "--address", address)
        assert line.startswith(f"no Ray dashboard answers at {address}: ")
