"""Finding the newest checkpoint that is whole, and filling live state from it, whatever layout either has.

Every rank reads what it needs itself. Agreement between ranks is the caller's:
service/checkpoint_hook.py. Writes no file and removes none.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from jobs.errors import CheckpointError
from jobs.events import Progress
from jobs.state import Chunk
from ops.checkpoint.dcp import ChunkLoadPlanner, ShardStorageReader, by_name
from ops.checkpoint.element_types import DTYPES
from ops.checkpoint.fingerprint import check_fingerprint
from ops.checkpoint.layout import folder_name, foreign_entries, is_rng, list_steps
from ops.checkpoint.manifest import CorruptCheckpointError, Manifest, read_manifest
from ops.checkpoint.shard import check_bytes, check_size

OnSkip = Callable[[Path, str], None]
"""Takes a folder that was passed over and the reason, one line."""

_NAMES_SHOWN = 20


@dataclass(frozen=True)
class CheckpointRef:
    """A committed checkpoint whose manifest has been read and checked."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps completed when it was saved."""
        return self.manifest.progress.step


def open_checkpoint(path: Path) -> CheckpointRef:
    """Read a folder's manifest and look at the sizes of its files; no bytes are compared.

    Raises:
        CorruptCheckpointError: unfinished, torn, or a rank's file is missing or short: names rank and file.
    """
    manifest = read_manifest(path)
    if folder_name(manifest.progress.step) != path.name:
        raise CorruptCheckpointError(
            f"the manifest is of step {manifest.progress.step}, the folder is named {path.name}"
        )
    for shard in manifest.shards:
        check_size(path, shard)
    return CheckpointRef(path, manifest)


def iter_candidates(checkpoint_dir: Path, on_skip: OnSkip) -> Iterator[CheckpointRef]:
    """Committed checkpoints from the newest step down, their bytes not yet compared.

    Entries with other names are reported first ("vllm-project/speculators#739"), then each folder that is
    passed over when its turn comes.
    """
    for entry in foreign_entries(checkpoint_dir):
        on_skip(entry, "not a checkpoint: its name is not step- and the step's number")
    for step in reversed(list_steps(checkpoint_dir)):
        path = checkpoint_dir / folder_name(step)
        try:
            yield open_checkpoint(path)
        except CorruptCheckpointError as error:
            on_skip(path, str(error))


def check_shards(ref: CheckpointRef, ranks: Iterable[int]) -> None:
    """Compare every byte of the files that these ranks wrote with the checksums.

    Raises:
        CorruptCheckpointError: names the rank, the file and the tensor.
    """
    for rank in ranks:
        check_bytes(ref.path, ref.manifest.shards[rank])


def find_newest(checkpoint_dir: Path, on_skip: OnSkip) -> CheckpointRef | None:
    """Newest committed checkpoint, every byte of which matches its checksum.

    Local: for ranks that restore together, sharing the reading, see service/checkpoint_hook.py.

    Args:
        checkpoint_dir: folder of the checkpoint folders; may be missing.
        on_skip: takes each folder that was passed over and why.
    """
    for ref in iter_candidates(checkpoint_dir, on_skip):
        try:
            check_shards(ref, range(ref.manifest.world_size))
        except CorruptCheckpointError as error:
            on_skip(ref.path, str(error))
        else:
            return ref
    return None


def load_into(
    ref: CheckpointRef,
    chunks: Sequence[Chunk],
    *,
    strict: bool = True,
    fingerprint: str | None = None,
    convert_dtypes: bool = False,
    verify: bool = True,
) -> Progress:
    """Fill each chunk's tensor from the saved boxes that overlap it. Local.

    Args:
        ref: the checkpoint.
        chunks: what to fill, is_writer or not.
        strict: refuse saved names that no chunk wants. A rank that holds only part of the names passes
            False and checks the names of all ranks together.
        fingerprint: of the model that the chunks belong to; compared before anything is read.
        convert_dtypes: convert where an element type differs; else it is refused.
        verify: compare checksums of what is read. False where that has just been done.

    Returns:
        Where the run was.

    Raises:
        CheckpointError: another model, or names, shapes or element types that do not fit, all listed.
            Nothing was changed.
        CorruptCheckpointError: damage met while reading; some chunks may have been filled.
    """
    if fingerprint is not None:
        check_fingerprint(ref.manifest.identity.fingerprint, fingerprint, str(ref.path))
    wanted = by_name(chunks)
    saved = {name for name in ref.manifest.tensors if not is_rng(name)}
    problems = misfits(ref.manifest, chunks, convert_dtypes=convert_dtypes)
    if strict:
        problems += [
            f"{name} is in the checkpoint and nothing expects it" for name in sorted(saved - wanted.keys())
        ]
    if problems:
        raise CheckpointError(f"{ref.path} does not fit: {listed(problems)}")
    reader, planner = ShardStorageReader(ref.path, ref.manifest, verify=verify), ChunkLoadPlanner()
    with torch.no_grad():
        planner.set_up_planner(wanted, reader.read_metadata())
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
    return ref.manifest.progress


def read_tensor(ref: CheckpointRef, name: str) -> torch.Tensor:
    """One whole logical tensor on the host.

    Raises:
        CheckpointError: there is none of that name.
        CorruptCheckpointError: it does not match its checksum.
    """
    entry = ref.manifest.tensors.get(name)
    if entry is None:
        raise CheckpointError(f"{ref.path} has no tensor {name}")
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    whole = Chunk(name, entry.shape, (0,) * len(entry.shape), tensor, is_writer=False)
    load_into(ref, [whole], strict=False)
    return tensor


def misfits(manifest: Manifest, chunks: Iterable[Chunk], *, convert_dtypes: bool = False) -> list[str]:
    """One phrase for each wanted name that is missing or of another form.

    A missing name must never pass in silence ("deepspeedai/Megatron-DeepSpeed#405").
    """
    problems: dict[str, str] = {}
    for chunk in chunks:
        entry = manifest.tensors.get(chunk.name)
        if entry is None:
            problems[chunk.name] = f"{chunk.name} is expected and not in the checkpoint"
        elif entry.shape != chunk.global_shape:
            problems[chunk.name] = (
                f"{chunk.name} has shape {list(entry.shape)} in the checkpoint, "
                f"expected {list(chunk.global_shape)}"
            )
        elif DTYPES[entry.dtype] != chunk.tensor.dtype and not convert_dtypes:
            problems[chunk.name] = (
                f"{chunk.name} is {DTYPES[entry.dtype]} in the checkpoint, expected {chunk.tensor.dtype}"
            )
    return [problems[name] for name in sorted(problems)]


def listed(problems: Sequence[str]) -> str:
    """The problems in one line, a long list cut with its count."""
    rest = len(problems) - _NAMES_SHOWN
    return "; ".join(problems[:_NAMES_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
