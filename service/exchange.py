"""Between checkpoints and Hugging Face folders. Reads and writes files; trains nothing.

An imported folder looks like a run's as far as weights go, so that `checkpoint export` and `verify` take
either:

    <out>/  model.json  tokenizer.json  tokenizer_config.json  checkpoints/step-00000000/
"""

import json
import shutil
from pathlib import Path

import torch

from jobs.data.prepare import load_prepared
from jobs.errors import CheckpointError, SpecError
from jobs.spec.hf_config import read_hf_config
from jobs.spec.model import ModelSpec
from ops.checkpoint.huggingface import check_huggingface, export_huggingface, import_huggingface
from ops.checkpoint.layout import CHECKPOINTS_DIR, committed_steps, folder_name
from ops.checkpoint.reader import find_newest, open_checkpoint
from service.run_store import find_run, read_spec, read_state

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODEL_FILE = "model.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def folder_of_checkpoints(name: str, storage: Path) -> Path:
    """Folder of a run (by id or path) or of an import.

    Raises:
        SpecError: neither.
    """
    imported = Path(name)
    return imported.resolve() if (imported / MODEL_FILE).is_file() else find_run(name, storage)


def export_checkpoint(folder: Path, out: Path, step: int | None, dtype: str) -> str:
    """Export one checkpoint of a run or an import; returns the lines to show.

    Args:
        folder: as folder_of_checkpoints gives.
        out: folder to write; must not exist.
        step: which checkpoint; None takes the newest verified one.
        dtype: "float32" or "bfloat16".

    Raises:
        SpecError: no such dtype.
        CheckpointError: no verified checkpoint, none of that step, or `out` exists.
    """
    if dtype not in DTYPES:
        raise SpecError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    skipped: list[str] = []
    checkpoints = folder / CHECKPOINTS_DIR
    if step is None:
        found = find_newest(checkpoints, lambda path, why: skipped.append(f"passed over {path.name}: {why}"))
    else:
        steps = committed_steps(checkpoints)
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {checkpoints}; committed steps: {there}")
        found = open_checkpoint(checkpoints / folder_name(step))
    if found is None:
        raise CheckpointError("\n".join([f"no verified checkpoint in {checkpoints}", *skipped]))
    model, tokenizer = _model_and_tokenizer(folder)
    export_huggingface(found, model, tokenizer, out, DTYPES[dtype])
    return "\n".join([*skipped, f"exported step {found.step} to {out}"])


def import_folder(source: Path, out: Path) -> str:
    """Write a Hugging Face Llama's weights as a checkpoint of step 0; returns the line to show.

    Raises:
        CheckpointError: it is not a Llama that we can hold, or `out` exists.
        SpecError: config.json is missing or names features that we do not have.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists: choose a new folder")
    model = _model_of(source)
    import_huggingface(source, model, out / CHECKPOINTS_DIR)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    (out / MODEL_FILE).write_text(model.model_dump_json(indent=2))
    return f"imported {model.n_params:,} parameters to {out}"


def check_start_weights(folder: Path, model: ModelSpec) -> None:
    """Refuse start weights that the ranks could not read.

    Raises:
        SpecError: no Hugging Face folder, or of another model; names train.init_from and what differs.
    """
    try:
        check_huggingface(folder, model)
    except CheckpointError as error:
        raise SpecError(f"train.init_from: {error}") from error


def _model_of(source: Path) -> ModelSpec:
    values = read_hf_config(source)
    values.setdefault("head_dim", int(str(values["d_model"])) // int(str(values["n_heads"])))
    return ModelSpec.model_validate_json(json.dumps(values))


def _model_and_tokenizer(folder: Path) -> tuple[ModelSpec, Path | None]:
    if not (folder / MODEL_FILE).is_file():
        return read_spec(folder).model, load_prepared(Path(read_state(folder).data_dir)).tokenizer_json
    tokenizer = folder / TOKENIZER_FILES[0]
    model = ModelSpec.model_validate_json((folder / MODEL_FILE).read_text())
    return model, tokenizer if tokenizer.is_file() else None
