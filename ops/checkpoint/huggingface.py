"""Weights out to Hugging Face form and in from it: safetensors, config.json, tokenizer.

Names are those of jobs/exchange.py. Optimizer moments and progress stay in our own checkpoints.
"""

import json
import os
import shutil
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from jobs.errors import CheckpointError, SpecError
from jobs.events import Progress
from jobs.exchange import (
    MODEL_PREFIX,
    hf_config,
    is_ignored,
    to_huggingface,
)
from jobs.mesh import Mesh
from jobs.spec.compare import model_fingerprint
from jobs.spec.hf_config import read_hf_config
from jobs.spec.model import ModelSpec, parameter_shapes
from jobs.state import Chunk
from ops.checkpoint.fingerprint import check_fingerprint, differing_keys
from ops.checkpoint.layout import folder_name
from ops.checkpoint.manifest import Identity
from ops.checkpoint.reader import CheckpointRef, listed, load_into
from ops.checkpoint.writer import AsyncWriter, Peers
from ops.durable import fsync_folder, write_atomically

_SINGLE, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>")


def export_huggingface(
    ref: CheckpointRef,
    model: ModelSpec,
    tokenizer_json: Path | None,
    out_dir: Path,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = 5_000_000_000,
) -> Path:
    """Write a folder that transformers' LlamaForCausalLM (or MixtralForCausalLM) and AutoTokenizer load.

    The same input gives the same bytes. Holds one file's weights in memory at a time.

    Args:
        ref: a checkpoint with the model's weights.
        model: the model that it is of.
        tokenizer_json: taken over, with the tokenizer_config.json beside it where there is one; None
            writes none.
        out_dir: must not exist; appears whole or not at all.
        dtype: element type to write: float32, bfloat16 or float16.
        max_file_bytes: weights above this are divided into several files with an index.

    Returns:
        out_dir.

    Raises:
        CheckpointError: out_dir exists, the checkpoint is of another model, lacks a weight or is damaged,
            or the files cannot be written.
        SpecError: the model has experts of a kind that no Hugging Face model here has.
    """
    if out_dir.exists():
        raise CheckpointError(f"{out_dir} exists: give a folder that does not")
    check_fingerprint(ref.manifest.identity.fingerprint, model_fingerprint(model), str(ref.path))
    temporary = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        end_of_document_id = _write_tokenizer(tokenizer_json, temporary)
        config = hf_config(model, str(dtype).removeprefix("torch."), end_of_document_id)
        _write_json(temporary / _CONFIG, config)
        _write_weights(ref, model, temporary, dtype, max_file_bytes)
        fsync_folder(temporary)
        temporary.rename(out_dir)
        fsync_folder(out_dir.parent)
    except OSError as error:
        raise CheckpointError(f"{out_dir} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out_dir


def read_huggingface(folder: Path, chunks: Sequence[Chunk], model: ModelSpec) -> None:
    """Fill the chunks named `model/...` from a folder of safetensors; others are left alone. Local.

    Element types are converted to the chunks'. Only the wanted boxes are read.

    Args:
        folder: config.json and model.safetensors, or several files with an index.
        chunks: this rank's state.
        model: what the weights must be of.

    Raises:
        CheckpointError: no such files, another model (each differing key named), or missing, unknown or
            misshapen tensors, all listed. Nothing was changed.
    """
    files = check_huggingface(folder, model)
    wanted: dict[Path, list[tuple[str, Chunk]]] = {}
    for chunk in chunks:
        if chunk.name.startswith(MODEL_PREFIX):
            name = to_huggingface(chunk.name.removeprefix(MODEL_PREFIX))
            if name not in files:
                raise CheckpointError(f"{folder} has no {name}, which {chunk.name} is read from")
            wanted.setdefault(files[name], []).append((name, chunk))
    for path, pairs in wanted.items():
        with _open(path) as file, torch.no_grad():
            for name, chunk in pairs:
                box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.tensor.shape, strict=True))
                chunk.tensor.detach().copy_(file.get_slice(name)[box])


def check_huggingface(folder: Path, model: ModelSpec) -> dict[str, Path]:
    """Refuse a folder whose weights are not the model's: headers are read, and of weights only a tied head.

    Returns:
        The file of each tensor.

    Raises:
        CheckpointError: as read_huggingface.
    """
    _refuse_other_model(folder, model)
    files = _file_of_tensors(folder)
    _refuse_other_tensors(folder, files, model)
    if model.tie_embeddings and "lm_head.weight" in files:
        _refuse_untied(folder, files)
    return files


def import_huggingface(folder: Path, model: ModelSpec, checkpoint_dir: Path) -> Path:
    """Write a checkpoint of step 0 that holds the folder's weights in fp32 and nothing else.

    For export and verify; a run takes start weights from the folder itself (train.init_from), because it
    needs moments as well.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: as read_huggingface, the checkpoint exists, or it cannot be written.
    """
    path = checkpoint_dir / folder_name(0)
    if path.exists():
        raise CheckpointError(f"{path} exists: give a folder without a checkpoint of step 0")
    chunks = [
        Chunk(MODEL_PREFIX + name, shape, (0,) * len(shape), torch.empty(shape), is_writer=True)
        for name, shape in parameter_shapes(model).items()
    ]
    read_huggingface(folder, chunks, model)
    errors: list[str] = []

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        if kind == "checkpoint_failed":
            errors.append(str(fields["error"]))

    identity = Identity(model_fingerprint(model), "import", Mesh())
    writer = AsyncWriter(checkpoint_dir, identity, Peers(), on_event)
    writer.save(chunks, Progress())
    if not writer.wait(timeout_s=3600):
        raise CheckpointError(f"{path} cannot be written: {'; '.join(errors)}")
    return path


def _write_weights(
    ref: CheckpointRef, model: ModelSpec, folder: Path, dtype: torch.dtype, max_file_bytes: int
) -> None:
    shapes = parameter_shapes(model)
    groups = _divide(shapes, dtype.itemsize, max_file_bytes)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(groups, start=1):
        file = _SINGLE if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        tensors = {name: torch.empty(shapes[name], dtype=dtype) for name in names}
        whole = [
            Chunk(MODEL_PREFIX + name, tuple(t.shape), (0,) * t.dim(), t, is_writer=False)
            for name, t in tensors.items()
        ]
        load_into(ref, whole, strict=False, convert_dtypes=True)
        save_file(
            {to_huggingface(n): t for n, t in tensors.items()}, folder / file, metadata={"format": "pt"}
        )
        _fsync(folder / file)
        weight_map |= {to_huggingface(name): file for name in names}
    if len(groups) > 1:
        total = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
        _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _divide(shapes: dict[str, tuple[int, ...]], itemsize: int, max_file_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        n_bytes = prod(shape) * itemsize
        if groups[-1] and held + n_bytes > max_file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += n_bytes
    return groups


def _write_tokenizer(tokenizer_json: Path | None, folder: Path) -> int | None:
    """Returns the id of the token that ends a text, where it is known."""
    if tokenizer_json is None:
        return None
    text = tokenizer_json.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{tokenizer_json} is not a tokenizer.json: {error}") from error
    beside = tokenizer_json.with_name(_TOKENIZER_CONFIG)
    if beside.is_file():
        config = json.loads(beside.read_text(encoding="utf-8"))
    else:
        # Without a class named, transformers takes the one of the model type and rebuilds the pre-tokenizer.
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= next(
            ({"eos_token": t} for t in _END_OF_DOCUMENT if tokenizer.token_to_id(t) is not None), {}
        )
    write_atomically(folder / _TOKENIZER, text)
    _write_json(folder / _TOKENIZER_CONFIG, config)
    end = config.get("eos_token")
    found = tokenizer.token_to_id(end["content"] if isinstance(end, dict) else end) if end else None
    return None if found is None else int(found)


def _refuse_other_model(folder: Path, model: ModelSpec) -> None:
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"{folder} has no {_CONFIG}: not a Hugging Face folder")
    try:
        theirs = read_hf_config(folder / _CONFIG)
    except SpecError as error:
        raise CheckpointError(str(error)) from error
    ours = json.loads(model_fingerprint(model))
    theirs.setdefault("head_dim", ours["head_dim"])
    known = {key: value for key, value in theirs.items() if key in ours}
    differences = differing_keys(json.dumps(known), json.dumps(ours))
    if differences:
        raise CheckpointError(f"{folder} is of another model: {'; '.join(differences)}")


def _file_of_tensors(folder: Path) -> dict[str, Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): folder / Path(file).name for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a whole index: {error}") from error
    single = folder / _SINGLE
    if not single.is_file():
        raise CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}: only safetensors are read")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def _refuse_other_tensors(folder: Path, files: dict[str, Path], model: ModelSpec) -> None:
    expected = {to_huggingface(name): shape for name, shape in parameter_shapes(model).items()}
    allowed = {"lm_head.weight"} if model.tie_embeddings else set()
    problems = [f"{name} is missing" for name in expected if name not in files]
    problems += [
        f"{name} is no tensor of this model"
        for name in files
        if name not in expected and name not in allowed and not is_ignored(name)
    ]
    for path in dict.fromkeys(files.values()):
        with _open(path) as file:
            held = set(file.keys())
            for name in (name for name, place in files.items() if place == path and name in expected):
                if name not in held:
                    problems.append(f"{name} is not in {path.name}, where the index says it is")
                elif (shape := tuple(file.get_slice(name).get_shape())) != expected[name]:
                    problems.append(f"{name} has shape {list(shape)}, expected {list(expected[name])}")
    if problems:
        raise CheckpointError(f"{folder} does not fit the model: {listed(problems)}")


def _refuse_untied(folder: Path, files: dict[str, Path]) -> None:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    with _open(files[embedding]) as first, _open(files[head]) as second:
        if not torch.equal(first.get_tensor(embedding), second.get_tensor(head)):
            raise CheckpointError(
                f"{folder}: model.tie_embeddings is true, but {head} differs from {embedding}"
            )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
