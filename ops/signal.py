"""A reading of something: what a monitor saw, where and when. A signal is not a verdict.

Pure values; reads nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class EntityKind(StrEnum):
    """What can be blamed, or be all right."""

    RANK = "rank"
    GPU = "gpu"
    NODE = "node"
    LINK = "link"
    STORAGE = "storage"
    JOB = "job"
    UNKNOWN = "unknown"


@dataclass(frozen=True, order=True)
class Entity:
    """One thing that can be blamed."""

    kind: EntityKind
    name: str
    """Rank number, GPU UUID or PCI address, node address, "node-node" for a link, path for storage."""
    node: str = ""
    """Address of the node that it is on, where it is not one itself."""

    def __str__(self) -> str:
        where = f" (node {self.node})" if self.node and self.kind is not EntityKind.NODE else ""
        return f"{self.kind} {self.name}{where}"

    def to_json(self) -> dict[str, str]:
        """As plain JSON values."""
        return {"kind": self.kind.value, "name": self.name, "node": self.node}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Entity":
        """The reverse of to_json.

        Raises:
            KeyError, TypeError, ValueError: the values have another form.
        """
        return Entity(EntityKind(str(values["kind"])), str(values["name"]), str(values["node"]))


@dataclass(frozen=True)
class Signal:
    """One reading."""

    at: float
    """Wall clock, unix seconds, of what was seen; corrected for the node's clock skew by who collects it."""
    source: str
    """Name of the monitor, or the file, that it comes from."""
    kind: str
    """What was seen, in the source's own terms: "xid", "oom_kill", "ecc_uncorrected", "last_step", ..."""
    entity: Entity
    value: float | None = None
    """Number of the reading, in the unit that `kind` names."""
    text: str = ""
    """The line or the sentence that it rests on, as it was read."""
