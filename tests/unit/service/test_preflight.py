"""Checks before any worker starts: each bad start is one clear error, and all of them come together."""

import errno
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import SpecError
from jobs.spec.load import load_spec
from service.preflight import (
    CheckpointEstimate,
    ClusterFacts,
    check_before_start,
    cluster_findings,
    estimate_checkpoint,
    free_bytes,
    interface_problems,
    local_interfaces,
    space_findings,
    storage_problem,
    tokenizer_file_size,
    vocabulary_problem,
)
from service.run_store import create_run, read_state, write_state
from tests.support.ranks import run_ranks

RANKS_PRELOAD = ("deepspeed", "ops.checkpoint.writer")

SPEC = """\
model: {preset: tiny}
data: {seq_len: 64}
optim: {lr: 3e-4}
train: {steps: 10, global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: native, dp: 2}
"""
MIB = 1024**2
GIB = 1024**3


@pytest.fixture
def load(tmp_path):
    def load(*overrides: str):
        (tmp_path / "spec.yaml").write_text(SPEC)
        return load_spec(tmp_path / "spec.yaml", overrides)

    return load


@pytest.fixture
def refused(tmp_path):
    def refused(spec, cluster=None, environment=None, **kwargs) -> list[str]:
        with pytest.raises(SpecError) as caught:
            check_before_start(spec, tmp_path / "runs" / "one", cluster, environment, **kwargs)
        return str(caught.value).replace(str(tmp_path), "TMP").splitlines()

    return refused


def test_a_good_start_makes_nothing(load, tmp_path):
    run_dir = tmp_path / "runs" / "one"
    assert check_before_start(load(), run_dir, ClusterFacts(2, 0, 2, 0), {}) == []
    assert not run_dir.parent.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spec.yaml"]


def test_everything_is_reported_together(load, refused, tmp_path):
    spec = load(
        "data.sources=[{kind: text, path: /no/such/corpus}]",
        "resources.env.GLOO_SOCKET_IFNAME=nosuch0",
        "strategy.dp=4",
    )
    (tmp_path / "runs").write_text("a file")
    lines = refused(spec, ClusterFacts(2, 0, 1, 0))
    assert lines == [
        "data.sources.0.path: /no/such/corpus does not exist (of its folders, / is the last that does)",
        f"GLOO_SOCKET_IFNAME=nosuch0: this node has no interface nosuch0; it has "
        f"{', '.join(local_interfaces())}",
        "run.storage: TMP/runs cannot be made: TMP/runs is a file",
        "strategy.dp=4: 4 workers x 1 CPUs = 4 CPUs wanted, but the cluster has 2 (1 free): room for 2 "
        "workers",
    ]


def test_paths(load, refused, tmp_path):
    (tmp_path / "here.txt").touch()
    spec = load(
        "data.sources=[{kind: text, path: here.txt}, {kind: jsonl, path: gone/a.jsonl}, {kind: text, "
        "path: g*.txt}, "
        "{kind: text, path: h*.txt}]",
        "data.tokenizer={kind: file, path: tokenizer.json}",
        "train.init_from=weights",
    )
    assert refused(spec) == [
        f"data.sources.1.path: {Path.cwd()}/gone/a.jsonl does not exist (of its folders, {Path.cwd()} is "
        f"the last "
        "that does)",
        f"data.sources.2.path: no file matches {Path.cwd()}/g*.txt",
        f"data.tokenizer.path: {Path.cwd()}/tokenizer.json does not exist (of its folders, {Path.cwd()} "
        f"is the last "
        "that does)",
        f"train.init_from: {Path.cwd()}/weights does not exist (of its folders, {Path.cwd()} is the last "
        f"that does)",
    ]


def test_vocabulary_of_a_tokenizer_file(load, refused, tmp_path):
    content = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 600}},
        "added_tokens": [{"id": 700, "content": "<|endoftext|>"}],
    }
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    assert tokenizer_file_size(file) == 701
    spec = load("data.tokenizer={kind: file, path: tokenizer.json}")
    assert refused(spec) == [
        "model.vocab_size=512 is smaller than the tokenizer's 701 ids (largest id 700); set "
        "model.vocab_size to at "
        "least 701"
    ]
    assert (
        check_before_start(
            load("data.tokenizer={kind: file, path: tokenizer.json}", "model.vocab_size=701"),
            tmp_path / "runs" / "one",
            None,
        )
        == []
    )
    file.write_text("{}")
    assert refused(spec) == [
        "data.tokenizer.path: TMP/tokenizer.json is no tokenizer.json: it has no model.vocab"
    ]


def test_a_real_tokenizers_size_is_its_vocabulary(tmp_path):
    from tokenizers import Tokenizer, models, trainers

    for model, trainer in (
        (models.BPE(), trainers.BpeTrainer(vocab_size=80, special_tokens=["<|endoftext|>"])),
        (models.Unigram(), trainers.UnigramTrainer(vocab_size=40, special_tokens=["</s>"])),
    ):
        tokenizer = Tokenizer(model)
        tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
        tokenizer.add_tokens(["<extra>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        assert tokenizer_file_size(tmp_path / "tokenizer.json") == tokenizer.get_vocab_size(
            with_added_tokens=True
        )


@pytest.mark.parametrize(
    ("tokenizer", "model", "fits"), [(257, 257, True), (258, 257, False), (65_536, 50_304, False)]
)
def test_vocabulary(tokenizer, model, fits):
    problem = vocabulary_problem(tokenizer, model)
    assert (problem is None) == fits
    if problem is not None:
        assert f"model.vocab_size={model} is smaller than the tokenizer's {tokenizer} ids" in problem


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (
            errno.EDQUOT,
            "your disk quota is exceeded (errno 122: Disk quota exceeded), though the volume itself has ",
        ),
        (errno.ENOSPC, "no space left on the volume (errno 28; "),
        (errno.EROFS, " is on a file system that is mounted read-only"),
        (errno.EACCES, " cannot be written: Permission denied at "),
    ],
)
def test_writing_fails(tmp_path, number, expected):
    def write(folder: Path) -> None:
        assert folder == tmp_path
        raise OSError(number, os.strerror(number))

    problem = storage_problem(tmp_path / "runs" / "one", write)
    assert problem is not None
    assert problem.startswith(f"run.storage: {tmp_path}/runs")
    assert expected in problem


def test_a_quota_is_not_called_a_full_disk(tmp_path):
    def write(folder: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    problem = storage_problem(tmp_path / "runs" / "one", write)
    assert problem is not None
    assert "no space" not in problem
    assert "quota" in problem


def test_a_folder_that_really_cannot_be_written(load):
    # writes below /proc fail for every user, root too
    problem = storage_problem(Path("/proc/packtrain/runs/one"))
    assert problem is not None
    assert problem.startswith("run.storage: /proc/packtrain/runs cannot be written: ")
    with pytest.raises(SpecError, match=r"run\.storage: /proc/packtrain/runs cannot be written"):
        check_before_start(load(), Path("/proc/packtrain/runs/one"), None)


def test_the_probe_leaves_nothing(tmp_path):
    assert storage_problem(tmp_path / "runs" / "one") is None
    assert list(tmp_path.iterdir()) == []


def test_free_bytes_are_those_of_the_volume(tmp_path):
    stat = os.statvfs(tmp_path)
    assert abs(free_bytes(tmp_path / "not" / "yet") - stat.f_bavail * stat.f_frsize) < 512 * MIB


def test_estimate(load):
    estimate = estimate_checkpoint(load("model.preset=8b"))
    assert estimate.n_bytes == 8_030_261_248 * 12
    assert estimate.arithmetic == (
        "8,030,261,248 parameters x 12 bytes (4 weights + 4 + 4 moments) = 89.75 GiB"
    )
    plain = estimate_checkpoint(load("optim.kind=sgd"))
    assert (plain.bytes_per_param, plain.n_bytes) == (4, load().model.n_params * 4)


@pytest.mark.parametrize(
    ("free", "problems", "warnings"),
    [
        (
            99 * MIB,
            ["run.storage: one checkpoint is X, but /runs has only 99.00 MiB free: not even one fits"],
            [],
        ),
        (
            100 * MIB,
            [],
            [
                "checkpoint.keep_last=3: one checkpoint is X; 3 kept + 1 being written = 400.00 MiB, but "
                "/runs has "
                "100.00 MiB free, enough for 1: free space or lower keep_last"
            ],
        ),
        (
            399 * MIB,
            [],
            [
                "checkpoint.keep_last=3: one checkpoint is X; 3 kept + 1 being written = 400.00 MiB, but "
                "/runs has "
                "399.00 MiB free, enough for 3: free space or lower keep_last"
            ],
        ),
        (400 * MIB, [], []),
    ],
)
def test_space(free, problems, warnings):
    """mlfoundations/open_lm#154: known before the first step, with the arithmetic."""
    estimate = CheckpointEstimate(n_params=25 * MIB, bytes_per_param=4, arithmetic="X")
    assert space_findings(estimate, 3, free, "/runs") == (problems, warnings)


@given(st.integers(1, 10**12), st.integers(1, 50), st.integers(0, 10**15))
def test_space_is_refused_warned_or_enough(n_params, keep_last, free):
    estimate = CheckpointEstimate(n_params, 12, "X")
    problems, warnings = space_findings(estimate, keep_last, free, "/runs")
    assert bool(problems) == (free < estimate.n_bytes)
    assert bool(warnings) == (estimate.n_bytes <= free < (keep_last + 1) * estimate.n_bytes)


def test_a_model_that_does_not_fit_is_refused_before_it_starts(load, refused):
    [line] = refused(load("model.preset=405b", "data.seq_len=64"))
    assert line.startswith(
        "run.storage: one checkpoint is 405,853,388,800 parameters x 12 bytes (4 weights + 4 + 4 moments) = "
        "4535.77 GiB, but TMP/runs/one has only "
    )


def save_as(groups, spec, folder: Path) -> None:
    """One rank's part of a save by the real writer, after a step."""
    import torch

    from jobs.engines.base import MicroBatch
    from jobs.engines.build import build_engine
    from jobs.events import Progress
    from jobs.mesh import Mesh
    from ops.checkpoint.manifest import Identity
    from ops.checkpoint.writer import AsyncWriter, Peers

    engine = build_engine(spec, groups, torch.device("cpu"))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    engine.train_step([MicroBatch(tokens, tokens, torch.arange(8).expand(2, 8), None)] * 2, 64, 1e-3)
    store = torch.distributed.FileStore(str(folder / f"store-{spec.strategy.kind}"), groups.world_size)
    identity = Identity("{}", spec.strategy.kind, Mesh(dp=groups.world_size))
    writer = AsyncWriter(
        folder / spec.strategy.kind,
        identity,
        Peers(groups.dp.rank, groups.world_size, store),
        lambda *_: None,
    )
    assert writer.save(engine.chunks(), Progress(1)) == "started"
    assert writer.wait(40)


@pytest.mark.parametrize(
    "strategy",
    ["{kind: native, dp: 2}", *(f"{{kind: deepspeed_zero, stage: {s}, dp: 2}}" for s in (1, 2, 3))],
)
def test_estimate_is_the_size_of_a_real_checkpoint(load, tmp_path, strategy):
    """mlfoundations/open_lm#154: within a few percent of the folder, native and at every stage."""
    spec = load(f"strategy={strategy}")
    run_ranks(save_as, 2, tmp_path, spec, tmp_path)
    real = sum(file.stat().st_size for file in (tmp_path / spec.strategy.kind).rglob("*") if file.is_file())
    assert estimate_checkpoint(spec).n_bytes == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    ("overrides", "cluster", "problems", "warnings"),
    [
        ((), ClusterFacts(2, 0, 2, 0), [], []),
        (
            ("strategy.dp=4",),
            ClusterFacts(3, 0, 2, 0),
            [
                "strategy.dp=4: 4 workers x 1 CPUs = 4 CPUs wanted, but the cluster has 3 (2 free): room "
                "for 3 workers"
            ],
            [],
        ),
        (
            ("resources.cpus_per_worker=1.5",),
            ClusterFacts(2, 0, 2, 0),
            [
                "strategy.dp=2: 2 workers x 1.5 CPUs = 3 CPUs wanted, but the cluster has 2 (2 free): room "
                "for 1 worker"
            ],
            [],
        ),
        (
            ("resources.gpus_per_worker=1",),
            ClusterFacts(8, 0, 8, 0),
            [
                "strategy.dp=2: 2 workers x 1 GPUs = 2 GPUs wanted, but the cluster has 0 (0 free): room "
                "for 0 workers"
            ],
            [],
        ),
        (
            (),
            ClusterFacts(8, 0, 1, 0),
            [],
            [
                "2 workers x 1 CPUs = 2 CPUs wanted, but only 1 of the cluster's 8 are free now; workers "
                "wait up to "
                "300 s (resilience.wait_for_nodes_s)"
            ],
        ),
    ],
)
def test_cluster(load, overrides, cluster, problems, warnings):
    assert cluster_findings(load(*overrides), cluster) == (problems, warnings)


HAS = ["lo", "eth0", "eth1", "ib0"]


@pytest.mark.parametrize(
    ("variable", "value", "lacking"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", None),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", None),
        ("GLOO_SOCKET_IFNAME", "eth", "eth"),
        ("GLOO_SOCKET_IFNAME", "eth0,nosuch0", "nosuch0"),
        ("GLOO_SOCKET_IFNAME", "", None),
        ("NCCL_SOCKET_IFNAME", "eth", None),
        ("NCCL_SOCKET_IFNAME", "=eth", "eth"),
        ("NCCL_SOCKET_IFNAME", "=eth0", None),
        ("NCCL_SOCKET_IFNAME", "^docker0,lo", None),
        ("NCCL_SOCKET_IFNAME", "nosuch0", "nosuch0"),
        ("NCCL_SOCKET_IFNAME", "bond,ib", None),
        ("NCCL_SOCKET_IFNAME", "bond,wlan", "bond, wlan"),
        ("OTHER_IFNAME", "nosuch0", None),
    ],
)
def test_interfaces(variable, value, lacking):
    """ray-project/ray#42652: an interface that is not there is named, with those that are."""
    expected = [f"{variable}={value}: this node has no interface {lacking}; it has lo, eth0, eth1, ib0"]
    assert interface_problems({variable: value}, HAS) == (expected if lacking else [])


def test_the_specs_environment_goes_over_the_nodes(load, refused, tmp_path):
    run_dir = tmp_path / "runs" / "one"
    assert "lo" in [name for _, name in socket.if_nameindex()]
    node = {"GLOO_SOCKET_IFNAME": "nosuch0"}
    assert refused(load(), environment=node)[0].startswith("GLOO_SOCKET_IFNAME=nosuch0: ")
    assert check_before_start(load("resources.env.GLOO_SOCKET_IFNAME=lo"), run_dir, None, node) == []


@pytest.fixture
def used(load, tmp_path):
    run_dir = tmp_path / "runs" / "one"
    write_state(run_dir, replace(create_run(load(), run_dir), status="FINISHED"))
    return run_dir


def test_name_in_use(load, refused, used):
    assert refused(load()) == [
        "run.name: one is in use at TMP/runs/one (status FINISHED); choose another name, or go on with it: "
        "packtrain resume one"
    ]
    assert check_before_start(load(), used, None, resume=True) == []


def test_a_name_in_use_by_a_run_whose_driver_was_killed_has_the_status_that_others_show(load, refused, used):
    write_state(used, replace(read_state(used), status="RUNNING", driver_started_at=0.0))
    assert "(status FAILED)" in refused(load())[0]


def test_a_strangers_folder_is_in_use_too(load, refused, tmp_path):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    assert check_before_start(load(), tmp_path / "runs" / "one", None) == []
    (tmp_path / "runs" / "one" / "notes.txt").touch()
    assert refused(load())[0].startswith(
        "run.name: one is in use at TMP/runs/one (not a run of Packtrain: there is no readable run.json); "
    )


def test_resume_of_nothing(load, refused):
    assert refused(load(), resume=True) == ["TMP/runs/one: there is no such run to resume"]


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("model.d_model=256", "model.d_model: 128 -> 256; model.head_dim: 32 -> 64"),
        ("model.rope_theta=500000.0", "model.rope_theta: 10000.0 -> 500000.0"),
    ],
)
def test_folder_of_another_model(load, refused, used, override, change):
    """NVIDIA-NeMo/Automodel#836: refused before anything is loaded, also where all shapes are equal."""
    expected = f"TMP/runs/one holds checkpoints of another model: {change}; choose another run.name"
    assert refused(load(override), resume=True) == [expected]
    assert refused(load(override))[1:] == [expected]


def test_unreadable_spec_of_the_run(load, refused, used):
    (used / "spec.json").write_text("{")
    [line] = refused(load(), resume=True)
    assert line.startswith("TMP/runs/one/spec.json:1: not JSON")


def test_needs_no_ray():
    code = "import sys, service.preflight; assert not {'ray', 'torch'} & set(sys.modules)"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
