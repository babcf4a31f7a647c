"""Checks before any worker starts: paths, storage, space, cluster, interfaces, the run's name and its model.

All that is wrong is reported together. The checks are functions of a spec and of facts; small functions that
gather the facts ask the file system and the network stack of this node. Imports no Ray, and does not look at
GPUs or at other nodes.
"""

import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jobs.errors import SpecError
from jobs.spec.compare import model_changes, model_fingerprint
from jobs.spec.data import FileTokenizer, PythonCorpus
from jobs.spec.job import JobSpec
from jobs.spec.load import spec_from_json
from service.run_store import read_state

_GIB: Final = 1024**3
_MIB: Final = 1024**2
_PROBE_BYTES: Final = 1 * _MIB
"""Written and synced to see that writing works: free space by statvfs says nothing of quotas."""


@dataclass(frozen=True)
class ClusterFacts:
    """Logical resources of a Ray cluster: all of them, and those that nobody holds now."""

    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


@dataclass(frozen=True)
class CheckpointEstimate:
    """Bytes of one checkpoint, and how they come about."""

    n_params: int
    bytes_per_param: int
    arithmetic: str

    @property
    def n_bytes(self) -> int:
        """Size of one checkpoint."""
        return self.n_params * self.bytes_per_param


def check_before_start(
    spec: JobSpec,
    run_dir: Path,
    cluster: ClusterFacts | None,
    environment: Mapping[str, str] | None = None,
    *,
    resume: bool = False,
) -> list[str]:
    """Check everything that can be checked on the driver's node.

    Args:
        spec: the resolved spec.
        run_dir: folder of this run (below run.storage); need not exist yet.
        cluster: the cluster's resources; None skips their check.
        environment: the environment that ranks inherit; resources.env goes over it.
        resume: the run folder is expected to be there.

    Returns:
        Warnings, one sentence each.

    Raises:
        SpecError: one line for each problem.
    """
    problems = missing_paths(spec)
    problems += vocabulary_problems(spec)
    problems += interface_problems({**(environment or {}), **spec.resources.env}, local_interfaces())
    problems += folder_problems(spec, run_dir, resume=resume)
    writing = storage_problem(run_dir)
    warnings: list[str] = []
    if writing is not None:
        problems.append(writing)
    else:
        estimate = estimate_checkpoint(spec)
        free = free_bytes(run_dir)
        too_small, warnings = space_findings(estimate, spec.checkpoint.keep_last, free, str(run_dir))
        problems += too_small
    if cluster is not None:
        too_few, waits = cluster_findings(spec, cluster)
        problems += too_few
        warnings += waits
    if problems:
        raise SpecError("\n".join(problems))
    return warnings


def missing_paths(spec: JobSpec) -> list[str]:
    """Files and folders that the run reads and that are not there or cannot be read."""
    named = [
        (f"data.sources.{index}.path", source.path)
        for index, source in enumerate(spec.data.sources)
        if not isinstance(source, PythonCorpus)
    ]
    if isinstance(spec.data.tokenizer, FileTokenizer):
        named.append(("data.tokenizer.path", spec.data.tokenizer.path))
    if spec.train.init_from is not None:
        named.append(("train.init_from", spec.train.init_from))
    problems = []
    for key, text in named:
        if "://" in text:
            continue
        path = Path(text)
        if any(mark in text for mark in "*?["):
            if not path.exists() and next(Path(path.anchor or ".").glob(_below_anchor(path)), None) is None:
                problems.append(f"{key}: no file matches {text}")
        elif not path.exists():
            problems.append(f"{key}: {text} does not exist{_deepest_existing(path)}")
        elif not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
            problems.append(f"{key}: {text} cannot be read by this user")
    return problems


def _below_anchor(path: Path) -> str:
    return str(path.relative_to(path.anchor)) if path.anchor else str(path)


def _deepest_existing(path: Path) -> str:
    above = next((parent for parent in path.absolute().parents if parent.exists()), None)
    return f" (of its folders, {above} is the last that does)" if above is not None else ""


def vocabulary_problems(spec: JobSpec) -> list[str]:
    """A tokenizer file with more ids than the model has embeddings (the loader checks other tokenizers)."""
    tokenizer = spec.data.tokenizer
    if not isinstance(tokenizer, FileTokenizer) or not Path(tokenizer.path).is_file():
        return []
    try:
        size = tokenizer_file_size(Path(tokenizer.path))
    except (ValueError, OSError) as error:
        return [f"data.tokenizer.path: {tokenizer.path} is no tokenizer.json: {error}"]
    problem = vocabulary_problem(size, spec.model.vocab_size)
    return [problem] if problem is not None else []


def vocabulary_problem(tokenizer_vocab: int, model_vocab: int) -> str | None:
    """The sentence for a tokenizer whose ids do not all have an embedding; None where they fit."""
    if tokenizer_vocab <= model_vocab:
        return None
    return (
        f"model.vocab_size={model_vocab} is smaller than the tokenizer's {tokenizer_vocab} ids (largest id "
        f"{tokenizer_vocab - 1}); set model.vocab_size to at least {tokenizer_vocab}"
    )


def tokenizer_file_size(path: Path) -> int:
    """Largest id of a Hugging Face tokenizer.json, plus one.

    Raises:
        ValueError: the file is not one.
    """
    content = json.loads(path.read_bytes())
    model = content.get("model") if isinstance(content, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list) or not vocab:
        raise ValueError("it has no model.vocab")
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    try:
        ids += [token["id"] for token in content.get("added_tokens") or []]
        return int(max(ids)) + 1
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"its ids are not all whole numbers, or one is missing ({error})") from error


def storage_problem(run_dir: Path, write: Callable[[Path], None] | None = None) -> str | None:
    """Why the run folder cannot be written; None where it can. Tells a quota from a full disk.

    Args:
        run_dir: the folder, which need not exist: the nearest one above it that does is probed.
        write: writes something into a folder, and removes it.
    """
    folder = _existing(run_dir)
    where = f"run.storage: {run_dir.parent}"
    if not folder.is_dir():
        return f"{where} cannot be made: {folder} is a file"
    try:
        (write or _write_probe)(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        free = f"{shutil.disk_usage(folder).free / _GIB:.2f} GiB"
        match error.errno:
            case errno.EDQUOT:
                return (
                    f"{where}: your disk quota is exceeded (errno {errno.EDQUOT}: {reason}), though the "
                    f"volume itself has {free} free; free some of your own files or ask for a larger quota"
                )
            case errno.ENOSPC:
                return f"{where}: no space left on the volume (errno {errno.ENOSPC}; {free} free); free some"
            case errno.EROFS:
                return f"{where} is on a file system that is mounted read-only"
            case _:
                return f"{where} cannot be written: {reason} at {folder} (user id {os.getuid()})"
    return None


def _write_probe(folder: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".packtrain-probe-") as probe:
        probe.write(b"\0" * _PROBE_BYTES)
        probe.flush()
        os.fsync(probe.fileno())


def _existing(path: Path) -> Path:
    """The path, or the nearest above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the path's volume, by statvfs (quotas are not in it)."""
    return shutil.disk_usage(_existing(path)).free


def estimate_checkpoint(spec: JobSpec) -> CheckpointEstimate:
    """Size of one checkpoint under any layout: fp32 weights, and Adam's two moments where there are any."""
    adam = spec.optim.kind == "adamw"
    per_param = 12 if adam else 4
    terms = "4 weights + 4 + 4 moments" if adam else "4 weights"
    n = spec.model.n_params
    return CheckpointEstimate(
        n, per_param, f"{n:,} parameters x {per_param} bytes ({terms}) = {_size(n * per_param)}"
    )


def space_findings(
    estimate: CheckpointEstimate, keep_last: int, free: int, where: str
) -> tuple[list[str], list[str]]:
    """Problems and warnings of the space for the checkpoints kept, and one more while it is written."""
    one = estimate.n_bytes
    wanted = (keep_last + 1) * one
    arithmetic = f"one checkpoint is {estimate.arithmetic}"
    if free < one:
        return [f"run.storage: {arithmetic}, but {where} has only {_size(free)} free: not even one fits"], []
    if free < wanted:
        fit = free // one
        return [], [
            f"checkpoint.keep_last={keep_last}: {arithmetic}; {keep_last} kept + 1 being written = "
            f"{_size(wanted)}, but {where} has {_size(free)} free, enough for {fit}: free space or lower "
            f"keep_last"
        ]
    return [], []


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.2f} GiB" if n_bytes >= _GIB else f"{n_bytes / _MIB:.2f} MiB"


def cluster_findings(spec: JobSpec, cluster: ClusterFacts) -> tuple[list[str], list[str]]:
    """Problems (the cluster is too small) and warnings (others hold what is wanted now)."""
    workers = spec.world_size
    problems, warnings = [], []
    for name, each, whole, free in (
        ("CPUs", spec.resources.cpus_per_worker, cluster.cpus, cluster.free_cpus),
        ("GPUs", spec.resources.gpus_per_worker, cluster.gpus, cluster.free_gpus),
    ):
        wanted = workers * each
        said = f"{workers} workers x {each:g} {name} = {wanted:g} {name} wanted"
        if wanted > whole:
            fit = int(whole // each)
            problems.append(
                f"strategy.{spec.strategy.mesh.factors}: {said}, but the cluster has {whole:g} "
                f"({free:g} free): room for {fit} worker{'' if fit == 1 else 's'}"
            )
        elif wanted > free:
            warnings.append(
                f"{said}, but only {free:g} of the cluster's {whole:g} are free now; "
                f"workers wait up to {spec.resilience.wait_for_nodes_s:g} s (resilience.wait_for_nodes_s)"
            )
    return problems, warnings


def local_interfaces() -> list[str]:
    """Names of this node's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def interface_problems(environment: Mapping[str, str], interfaces: Sequence[str]) -> list[str]:
    """Interfaces named for Gloo or NCCL that this node lacks.

    Gloo takes exact names; NCCL takes beginnings of names, `=name` for an exact one, `^name` for all but it.
    Several are divided by commas.
    """
    problems = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = environment.get(variable, "").strip()
        if not text or text.startswith("^"):
            continue
        by_beginning = variable.startswith("NCCL") and not text.startswith("=")
        names = [name.strip() for name in text.removeprefix("=").split(",") if name.strip()]
        lacking = [
            n for n in names if not any(i == n or (by_beginning and i.startswith(n)) for i in interfaces)
        ]
        # NCCL is content with one interface; Gloo opens a device for each name
        if lacking and (variable.startswith("GLOO") or len(lacking) == len(names)):
            problems.append(
                f"{variable}={text}: this node has no interface {', '.join(lacking)}; "
                f"it has {', '.join(interfaces)}"
            )
    return problems


def folder_problems(spec: JobSpec, run_dir: Path, *, resume: bool) -> list[str]:
    """A run name in use, and a folder that holds another model's run."""
    if not run_dir.is_dir() or not any(run_dir.iterdir()):
        return [f"{run_dir}: there is no such run to resume"] if resume else []
    problems = []
    if not resume:
        problems.append(
            f"run.name: {run_dir.name} is in use at {run_dir} ({_status(run_dir)}); "
            f"choose another name, or go on with it: packtrain resume {run_dir.name}"
        )
    problems += _other_model(spec, run_dir)
    return problems


def _status(run_dir: Path) -> str:
    try:
        return f"status {read_state(run_dir).current_status(run_dir)}"
    except SpecError:
        return "not a run of Packtrain: there is no readable run.json"


def _other_model(spec: JobSpec, run_dir: Path) -> list[str]:
    file = run_dir / "spec.json"
    try:
        old = spec_from_json(file.read_text(), str(file))
    except (OSError, UnicodeDecodeError):
        return []
    except SpecError as error:
        return [str(error)]
    if model_fingerprint(old.model) == model_fingerprint(spec.model):
        return []
    changes = "; ".join(str(change) for change in model_changes(old, spec))
    return [f"{run_dir} holds checkpoints of another model: {changes}; choose another run.name"]


def embedded_cpus(spec: JobSpec, n_cores: int) -> int:
    """Logical CPUs of an embedded cluster: as many as the workers want, within reason.

    Args:
        spec: the run.
        n_cores: of this machine.

    Raises:
        SpecError: the workers want so many that this machine would only swap them.
    """
    workers, each = spec.world_size, spec.resources.cpus_per_worker
    wanted, limit = max(workers, workers * each), max(32, 4 * n_cores)
    if wanted > limit:
        raise SpecError(
            f"strategy.{spec.strategy.mesh.factors}: {workers} workers x {each:g} CPUs = {workers * each:g} "
            f"CPUs wanted, but an embedded cluster takes at most {limit} on this machine's {n_cores} cores; "
            "make the layout smaller, lower resources.cpus_per_worker, or name a cluster with --address"
        )
    return max(2, round(workers * each))
