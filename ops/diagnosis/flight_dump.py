"""One rank's flight recorder dump (torch 2.4 and later, NCCL or gloo), read without trusting it.

A dump is a pickle, and a pickle can run code: only containers, numbers and text are let in. A dump does not
say which rank wrote it: the file's name does. Does not compare ranks (flight_recorder.py).
"""

import ast
import io
import json
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_DUMP_BYTES = 1 << 28
"""A full ring of 20,000 entries is about 20 MB; anything far above is not a dump."""
_RANK = re.compile(r"(\d+)(?:\.[A-Za-z]\w*)?$")
_PAIR = re.compile(r"(\d+)\s*(->|<-)\s*(\d+)")


class DumpError(ValueError):
    """A file is not a flight recorder dump, or holds more than plain values."""


@dataclass(frozen=True)
class Operation:
    """One collective or point-to-point operation of a rank."""

    group: str
    """Name of the process group: the same on all of its ranks."""
    seq: int
    """Number of the collective in its group, from 1; for point-to-point the number among those."""
    name: str
    """"all_reduce", "_all_gather_base", "send", ... without the backend's prefix."""
    is_p2p: bool
    is_done: bool
    state: str
    """scheduled, started or completed; gloo never leaves scheduled."""
    source: int = -1
    """Of a point-to-point operation: sender, as a number within the group; -1 otherwise."""
    target: int = -1
    input_numel: int = 0
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Progress:
    """What a rank has done in one group, by the counters that outlive the ring."""

    enqueued: int
    completed: int


@dataclass(frozen=True)
class Dump:
    """What one rank left."""

    rank: int
    operations: tuple[Operation, ...]
    progress: Mapping[str, Progress]
    """By group name; only groups whose name the dump gives away."""
    members: Mapping[str, tuple[int, ...]]
    """Ranks of each group, where the dump says so; "" is the world where only the world is known."""
    descriptions: Mapping[str, str]
    is_gloo: bool
    mixed: frozenset[str]
    """Groups whose counter in `progress` counts collectives and point-to-point operations together."""


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, numbers and text; anything that would import or call is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise DumpError(f"it wants to load {module}.{name}: a dump holds plain values only")

    def persistent_load(self, pid: Any) -> Any:
        raise DumpError("it holds a persistent reference: a dump holds plain values only")


def read_dump(path: Path, rank: int | None = None) -> Dump:
    """Read one dump; a pickle, or the JSON that torch writes on request.

    Args:
        path: the file.
        rank: who wrote it; None takes the digits at the end of the file's name.

    Raises:
        DumpError: not a dump, more than plain values, or no rank in the name.
    """
    if rank is None:
        found = _RANK.search(path.name)
        if found is None:
            raise DumpError(f"{path}: no rank at the end of the file's name; name dumps like fr_12")
        rank = int(found.group(1))
    n_bytes = path.stat().st_size
    if n_bytes > MAX_DUMP_BYTES:
        raise DumpError(f"{path}: {n_bytes} bytes; a dump has at most {MAX_DUMP_BYTES}")
    try:
        return parse_dump(path.read_bytes(), rank)
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from error


def parse_dump(raw: bytes, rank: int) -> Dump:
    """The dump in `raw`.

    Raises:
        DumpError: not a dump, or more than plain values.
    """
    try:
        tree = json.loads(raw) if raw[:1] == b"{" else _PlainUnpickler(io.BytesIO(raw)).load()
    except DumpError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DumpError(f"not a flight recorder dump ({type(error).__name__}: {error})") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("entries", []), list):
        raise DumpError("not a flight recorder dump: no entries")
    if "entries" not in tree and "pg_status" not in tree:
        raise DumpError("not a flight recorder dump: neither entries nor pg_status")
    try:
        return _dump(tree, rank)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, SyntaxError) as error:
        raise DumpError(f"a field of it cannot be read ({type(error).__name__}: {error})") from error


def _dump(tree: dict[str, Any], rank: int) -> Dump:
    entries = tree.get("entries", [])
    config = tree.get("pg_config", {})
    names = _group_names(tree, entries)
    return Dump(
        rank=rank,
        operations=tuple(_operation(e) for e in entries),
        progress={
            names[str(key)]: Progress(
                enqueued=int(status["last_enqueued_collective"]),
                completed=int(status["last_completed_collective"]),
            )
            for key, status in tree.get("pg_status", {}).items()
            if str(key) in names
        },
        members={
            str(name): ranks for name, entry in config.items() if (ranks := _ranks(entry.get("ranks", "")))
        },
        descriptions={str(name): str(entry.get("desc", "")) for name, entry in config.items()}
        | {str(e["process_group"][0]): str(e["process_group"][1]) for e in entries},
        is_gloo=any(str(e["profiling_name"]).startswith("gloo:") for e in entries),
        mixed=frozenset(
            str(e["process_group"][0])
            for e in entries
            if e.get("is_p2p") or e.get("op_id", e["collective_seq_id"]) != e["collective_seq_id"]
        ),
    )


def _group_names(tree: dict[str, Any], entries: list[dict[str, Any]]) -> dict[str, str]:
    """Name of each group by its number on this rank, which is what pg_status is keyed by.

    Entries hold both. Groups without entries: numbers and names grow together as groups are made, so equally
    many of both can be paired in order, unless an entry contradicts.
    """
    seen = {str(e["pg_id"]): str(e["process_group"][0]) for e in entries}
    numbers, names = list(tree.get("pg_status", {})), list(tree.get("pg_config", {}))
    if len(numbers) != len(names) or not all(str(k).isdigit() for k in [*numbers, *names]):
        return seen
    paired = {str(k): str(n) for k, n in zip(sorted(numbers, key=int), sorted(names, key=int), strict=True)}
    return paired if all(paired.get(k) == n for k, n in seen.items()) else seen


def _operation(entry: dict[str, Any]) -> Operation:
    backend, _, text = str(entry["profiling_name"]).partition(":")
    if not text:
        backend, text = "", backend
    pair = _PAIR.search(text)
    source = target = -1
    if pair is not None:
        left, right = int(pair.group(1)), int(pair.group(3))
        source, target = (left, right) if pair.group(2) == "->" else (right, left)
    is_p2p = bool(entry.get("is_p2p"))
    sizes = entry.get("input_sizes") or []
    return Operation(
        group=str(entry["process_group"][0]),
        seq=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        name=text.split(" ")[0],
        is_p2p=is_p2p,
        # Gloo never says "completed"; it retires what is over. NCCL retires also what timed out.
        is_done=entry["state"] == "completed" or (backend == "gloo" and bool(entry.get("retired"))),
        state=str(entry["state"]),
        source=source,
        target=target,
        input_numel=sum(math.prod(int(n) for n in size) for size in sizes),
        dtypes=tuple(str(t) for t in entry.get("input_dtypes") or ()),
    )


def _ranks(text: object) -> tuple[int, ...]:
    value = ast.literal_eval(text) if isinstance(text, str) and text else text
    return tuple(int(r) for r in value) if isinstance(value, list | tuple) else ()
