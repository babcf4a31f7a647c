"""Between a run's checkpoints and Hugging Face folders. Reads and writes files; trains nothing."""

from pathlib import Path

import torch

from jobs.data.prepare import load_prepared
from jobs.errors import CheckpointError, SpecError
from ops.checkpoint.huggingface import export_huggingface
from ops.checkpoint.layout import CHECKPOINTS_DIR, folder_name
from ops.checkpoint.reader import find_newest, open_checkpoint
from service.run_store import read_spec, read_state

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_run(run_dir: Path, out: Path, step: int | None, dtype: str) -> str:
    """Export one checkpoint of a run; returns the line to show.

    Raises:
        SpecError: no such dtype.
        CheckpointError: no verified checkpoint, or `out` exists.
    """
    if dtype not in DTYPES:
        raise SpecError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    skipped: list[str] = []
    folder = run_dir / CHECKPOINTS_DIR
    if step is None:
        found = find_newest(folder, lambda path, reason: skipped.append(f"passed over {path.name}: {reason}"))
    else:
        found = open_checkpoint(folder / folder_name(step))
    if found is None:
        raise CheckpointError("\n".join([f"no verified checkpoint in {folder}", *skipped]))
    tokenizer = load_prepared(Path(read_state(run_dir).data_dir)).tokenizer_json
    export_huggingface(found, read_spec(run_dir).model, tokenizer, out, DTYPES[dtype])
    return "\n".join([*skipped, f"exported step {found.step} to {out}"])
