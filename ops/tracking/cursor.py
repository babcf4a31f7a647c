"""How far the tracking server has been told, kept in the run folder. Sends nothing."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ops.durable import fsync_folder, write_atomically
from ops.tracking.points import Counts


@dataclass(frozen=True)
class Cursor:
    """What the server has, as far as it has said so."""

    mlflow_uri: str
    """Without a password."""
    run_uid: str
    """Tag by which the run is found on the server again when the answer to its creation was lost."""
    mlflow_run_id: str | None = None
    metrics_offset_bytes: int = 0
    """Bytes of metrics.jsonl that have been sent."""
    ledger_offsets_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each ledger file that have been sent."""
    counts: Counts = field(default_factory=Counts)
    n_system_samples: int = 0
    n_refused: int = 0
    """Points that the server will never take."""
    settled_status: str | None = None
    """Final status that the server has been told; None while the run goes on."""
    mapped_names: Mapping[str, str] = field(default_factory=dict)
    """Names that the server does not take, and what they were sent as."""


def load_cursor(path: Path, uri: str) -> Cursor:
    """The cursor of a run; a fresh one where there is none, or where the server is another."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        cursor = Cursor(**{**values, "counts": Counts(**values["counts"])})
    except (OSError, ValueError, TypeError, KeyError):
        return Cursor(mlflow_uri=uri, run_uid=uuid.uuid4().hex)
    if cursor.mlflow_uri != uri:  # another server, or the same at a new address: the uid tells
        return Cursor(mlflow_uri=uri, run_uid=cursor.run_uid)
    return cursor


def save_cursor(path: Path, cursor: Cursor) -> None:
    """Replace the cursor's file in one step, so that it outlives a power cut: a lost one is a second run.

    Raises:
        OSError: the disk is full or the folder is gone; the old cursor stays.
    """
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        fsync_folder(path.parent.parent)
    write_atomically(path, json.dumps(asdict(cursor), indent=1))
