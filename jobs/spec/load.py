"""Loads one YAML file into a JobSpec: YAML, overrides, DeepSpeed JSON, preset, strict schema, legal layout.

Everything that is wrong is reported together, each with file:line. Imports neither torch nor ray; does not
look at the data, the cluster or the storage (service/preflight.py does).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from jobs.errors import SpecError
from jobs.planner.legality import refusals
from jobs.spec.data import BpeTokenizer, FileTokenizer, TokensSource
from jobs.spec.deepspeed_json import check_zero_options, merge_deepspeed_json
from jobs.spec.deepspeed_reading import DeepspeedReport
from jobs.spec.hf_config import read_hf_config
from jobs.spec.job import JobSpec
from jobs.spec.lesson import is_lesson
from jobs.spec.overrides import apply_overrides
from jobs.spec.presets import PRESETS
from jobs.spec.schema import problems_of
from jobs.spec.tree import Json, KeyPath, Origin, Tree, describe, did_you_mean, spec_error
from jobs.spec.yaml_tree import read_yaml

_PATHS: tuple[KeyPath, ...] = (
    ("data", "tokenizer", "path"),
    ("model", "hf_config"),
    ("strategy", "deepspeed_config"),
    ("train", "init_from"),
)
"""Keys that name files the run reads, besides data.sources.*.path."""

_STAND_IN: dict[str, Json] = {
    "vocab_size": 2**30,
    "n_layers": 1,
    "d_model": 2,
    "n_heads": 1,
    "n_kv_heads": 1,
    "head_dim": 2,
    "d_ff": 1,
    "max_seq_len": 2**30,
}
"""Stands for a preset that is not there, so that its absence is one problem and not eight."""


@dataclass(frozen=True)
class LoadedSpec:
    """A spec, and what became of the keys of the DeepSpeed JSON that it names."""

    spec: JobSpec
    deepspeed: DeepspeedReport | None


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Load a spec; see `load_spec_with_report`."""
    return load_spec_with_report(path, overrides).spec


def load_spec_with_report(path: str | Path, overrides: Sequence[str] = ()) -> LoadedSpec:
    """Load a spec, with the report on its DeepSpeed JSON.

    Relative paths of files that the run reads (data, tokenizer, hf_config, deepspeed_config, init_from) are
    resolved against the spec file's folder if they exist there, else against the working directory, and kept
    absolute. run.storage and data.cache_dir are written to, and stay as they are.

    Args:
        path: the YAML file.
        overrides: `key.key=value` each, as given to --set; the value is YAML.

    Raises:
        SpecError: one line for each problem, `file:line: key.path: message`.
    """
    tree = read_yaml(Path(path))
    apply_overrides(tree, overrides)
    if is_lesson(tree):
        raise SpecError(
            f"{path}: is a lesson (model.kind: mlp), not a run; start it with packtrain run {path}"
        )
    _resolve_paths(tree, Path(path).absolute().parent)
    report = _take_deepspeed_json(tree)
    check_zero_options(tree)
    _take_model_defaults(tree)
    _check_deepspeed_pipeline(tree)
    spec = _validated(tree)
    if spec is not None:
        _check_vocabulary(tree, spec)
        for refusal in refusals(spec):
            tree.complain(tuple(refusal.key.split(".")), str(refusal))
    if spec is None or tree.problems:
        raise spec_error(tree.problems)
    return LoadedSpec(spec, report)


def resolved_json(spec: JobSpec) -> str:
    """The spec as JSON with every key written out: what is kept with the run."""
    return json.dumps(spec.model_dump(mode="json"), indent=2) + "\n"


def spec_from_json(text: str, source: str = "spec.json") -> JobSpec:
    """The spec back from `resolved_json`; nothing else is read.

    Args:
        text: what resolved_json gave.
        source: name of the text in errors.

    Raises:
        SpecError: not JSON, or not a JobSpec of this version.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"{source}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise SpecError(f"{source}: a resolved spec is a JSON object")
    tree = Tree(value, {(): Origin(source)})
    spec = _validated(tree)
    if spec is None:
        raise spec_error(tree.problems)
    return spec


def _validated(tree: Tree) -> JobSpec | None:
    """The tree as a JobSpec; None, and the tree's problems, where it is none."""
    try:
        return JobSpec.model_validate_json(json.dumps(tree.root))
    except ValidationError as error:
        blamed = {problem.path for problem in tree.problems}
        found = problems_of(error.errors(include_url=False), tree)
        tree.problems += [problem for problem in found if problem.path not in blamed]
        return None


def _check_deepspeed_pipeline(tree: Tree) -> None:
    """Stages of layers and a ZeRO that gives gradients away: not a key that is missing, but a limit."""
    kind, stage = tree.get(("strategy", "kind")), tree.get(("strategy", "stage"))
    if kind == "deepspeed_zero" and tree.has(("strategy", "pp")):
        pp = describe(tree.get(("strategy", "pp")))
        tree.complain(
            ("strategy", "pp"),
            f"pp={pp} with kind=deepspeed_zero: ZeRO-2 and ZeRO-3 give gradients away after each backward "
            "pass, and a pipeline needs them over all micro-batches; use kind=deepspeed_pipeline with stage "
            "0 or 1, or kind=native with pp and zero_stage=1",
        )
    elif kind == "deepspeed_pipeline" and stage in (2, 3):
        tree.complain(
            ("strategy", "stage"),
            f"stage={stage} with kind=deepspeed_pipeline: ZeRO-2 and ZeRO-3 give gradients away after each "
            "backward pass, and a pipeline needs them over all micro-batches; use stage 0 or 1",
        )


def _check_vocabulary(tree: Tree, spec: JobSpec) -> None:
    """The ids of a tokenizer that is not in a file must all have an embedding, where text is read at all."""
    tokenizer = spec.data.tokenizer
    if isinstance(tokenizer, FileTokenizer) or all(isinstance(s, TokensSource) for s in spec.data.sources):
        return
    n_ids = tokenizer.vocab_size if isinstance(tokenizer, BpeTokenizer) else 257
    if n_ids > spec.model.vocab_size:
        tree.complain(
            ("model", "vocab_size"),
            f"{spec.model.vocab_size} is smaller than the {tokenizer.kind} tokenizer's {n_ids} ids "
            f"(largest id {n_ids - 1}); set it to at least {n_ids}",
        )


def _resolve_paths(tree: Tree, folder: Path) -> None:
    sources = tree.get(("data", "sources"))
    n_sources = len(sources) if isinstance(sources, list) else 0
    for path in (*_PATHS, *(("data", "sources", index, "path") for index in range(n_sources))):
        text = tree.get(path)
        if isinstance(text, str) and text and "://" not in text:
            tree.put(path, _resolved(text, folder), tree.origin_of(path))


def _resolved(text: str, folder: Path) -> str:
    given = Path(text).expanduser()
    if given.is_absolute():
        return str(given)
    beside = folder / given
    is_glob = any(mark in text for mark in "*?[")
    if beside.exists() or (is_glob and next(folder.glob(text), None) is not None):
        return str(beside)
    return str(Path.cwd() / given)


def _take_deepspeed_json(tree: Tree) -> DeepspeedReport | None:
    path: KeyPath = ("strategy", "deepspeed_config")
    name = tree.get(path)
    if tree.get(("strategy", "kind")) != "deepspeed_zero" or not isinstance(name, str):
        return None
    try:
        return merge_deepspeed_json(tree, Path(name))
    except SpecError as error:
        tree.complain(path, str(error))
        return None


def _take_model_defaults(tree: Tree) -> None:
    """Fill in the model section from its preset or config.json; explicit keys win."""
    model = tree.get(("model",))
    if not isinstance(model, dict):
        return
    preset, config = model.get("preset"), model.get("hf_config")
    defaults: dict[str, Json] = {}
    if preset is not None and config is not None:
        tree.complain(
            ("model", "hf_config"), "preset and hf_config both give the model's defaults; keep one of them"
        )
        defaults = dict(_STAND_IN)
    elif isinstance(preset, str):
        if preset in PRESETS:
            defaults = PRESETS[preset].defaults()
        else:
            tree.complain(("model", "preset"), f"no preset {preset!r}{did_you_mean(preset, PRESETS)}")
            defaults = dict(_STAND_IN)
    elif isinstance(config, str):
        try:
            defaults = read_hf_config(Path(config))
        except SpecError as error:
            for line in str(error).splitlines():
                tree.complain(("model", "hf_config"), line)
            defaults = dict(_STAND_IN)
    origin = tree.origin_of(("model", "hf_config" if preset is None else "preset"))
    for key, value in defaults.items():
        if key not in model:
            tree.put(("model", key), value, origin)
        elif key == "moe":
            _take_expert_defaults(tree, model[key], value, origin)
    _take_head_dim(tree, model)


def _take_expert_defaults(tree: Tree, given: Json, defaults: Json, origin: Origin) -> None:
    """Below model.moe as well, keys that are written out win one by one."""
    if isinstance(given, dict) and isinstance(defaults, dict):
        for key, value in defaults.items():
            if key not in given:
                tree.put(("model", "moe", key), value, origin)


def _take_head_dim(tree: Tree, model: dict[str, Json]) -> None:
    d_model, n_heads = model.get("d_model"), model.get("n_heads")
    if "head_dim" in model or not isinstance(d_model, int) or not isinstance(n_heads, int) or n_heads < 1:
        return
    if d_model % n_heads:
        tree.complain(
            ("model", "n_heads"),
            f"n_heads={n_heads} does not divide d_model={d_model}: {d_model} / {n_heads} = "
            f"{d_model / n_heads:g}; change one of them or give head_dim",
        )
        model["head_dim"] = 2
    else:
        tree.put(("model", "head_dim"), d_model // n_heads, tree.origin_of(("model", "n_heads")))
