"""Two resolved specs of one run: what changed, whether a resume may go on, and which model the weights are.

Pure: reads no files, moves no weights.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from jobs.optim.schedule import lr_at
from jobs.spec.job import JobSpec
from jobs.spec.model import ModelSpec
from jobs.spec.tree import Json

_NOT_THE_MODEL: Final = {"preset", "hf_config", "init_std", "max_seq_len"}
"""Keys of the model section that say where values came from, how weights began, or a limit: the same weights
mean the same without them. All others count, equal shapes or not."""

_TRAINING_OF_EXPERTS: Final = {"balance_loss_coef", "z_loss_coef", "bias_update_rate", "capacity_factor"}
"""Keys of model.moe that say how experts are kept busy while they are trained."""

_BREAKING: Final = (
    *(f"model.{key}" for key in ModelSpec.model_fields if key not in _NOT_THE_MODEL),
    "data.sources",
    "data.tokenizer",
    "data.seq_len",
    "data.packing",
    "data.mask_documents",
    "data.validation_frac",
    "run.seed",
    "optim.kind",
)
"""Keys, with all below them, whose change breaks a resume: the model, the order of the data, the moments."""

_RECORD_ONLY: Final = ("run.name", "model.preset", "model.hf_config", "strategy.deepspeed_config")
"""The run's own name, and keys that name where others came from: once resolved they change nothing."""


@dataclass(frozen=True)
class Change:
    """One key that differs."""

    key: str
    old: Json
    new: Json

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


@dataclass(frozen=True)
class ResumeComparison:
    """What changed between the spec that a run was started with and the one it is to be resumed with."""

    breaking: tuple[Change, ...]
    """The run cannot go on: the weights, the moments or the data order would mean something else."""
    announced: tuple[Change, ...]
    """The run goes on, and says so."""

    def refusal(self) -> str | None:
        """The sentence that refuses the resume, naming every breaking key; None where it may go on."""
        if not self.breaking:
            return None
        changes = "; ".join(str(change) for change in self.breaking)
        return (
            f"the spec changed in a way that this run cannot go on with: {changes}. "
            "Put the old values back, or start a new run under another run.name"
        )


def compare_for_resume(old: JobSpec, new: JobSpec) -> ResumeComparison:
    """Compare key by key.

    Args:
        old: spec.json of the run.
        new: the spec that the user resumes with.
    """
    breaking: list[Change] = []
    announced: list[Change] = []
    for change in _changes("", old.model_dump(mode="json"), new.model_dump(mode="json")):
        if any(change.key == key or change.key.startswith(f"{key}.") for key in _BREAKING):
            breaking.append(change)
        elif change.key not in _RECORD_ONLY:
            announced.append(change)
    return ResumeComparison(tuple(breaking), tuple(announced))


def announce_lr(old: JobSpec, new: JobSpec, step: int) -> str | None:
    """One line if the learning rate of the next step differs under the new spec; None where it is the same.

    Args:
        old: spec.json of the run.
        new: the spec that it is resumed with.
        step: completed steps, i.e. the index of the step about to be taken.
    """
    before, after = lr_at(old.optim, old.train.steps, step), lr_at(new.optim, new.train.steps, step)
    if before == after:
        return None
    moved = [
        str(change)
        for change in compare_for_resume(old, new).announced
        if change.key == "train.steps" or change.key == "optim.lr" or change.key.startswith("optim.schedule")
    ]
    rates = f"the learning rate of step {step + 1} is {after:.6g}, it would have been {before:.6g}"
    return f"{'; '.join(moved)}: {rates}"


def model_fingerprint(model: ModelSpec) -> str:
    """What the weights mean, as canonical JSON: shapes, RoPE base and scaling, norm epsilon, tied embeddings.

    Equal fingerprints: weights of the one model are weights of the other. Names, initialisation, the longest
    sequence and how experts are balanced do not count. A checkpoint keeps it.
    """
    left_out: dict[str, bool | set[str]] = dict.fromkeys(_NOT_THE_MODEL, True) | {"moe": _TRAINING_OF_EXPERTS}
    if all(model.is_moe_layer(layer) for layer in range(model.n_layers)):
        left_out["d_ff"] = True  # of dense layers, and there is none
    return json.dumps(model.model_dump(mode="json", exclude=left_out), sort_keys=True)


def model_changes(old: JobSpec, new: JobSpec) -> tuple[Change, ...]:
    """The keys by which two models' fingerprints differ; empty where the fingerprints are equal."""
    return tuple(
        change for change in compare_for_resume(old, new).breaking if change.key.startswith("model.")
    )


def _changes(prefix: str, old: Json, new: Json) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _changes(f"{prefix}.{key}" if prefix else key, old.get(key), new.get(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _changes(f"{prefix}.{index}", one, other)
    elif old != new:
        yield Change(prefix, old, new)


def _shown(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)
