"""Holds what the ranks of a lesson found to one process. Starts no process and prints nothing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

from jobs.comm.groups import Groups
from jobs.lessons import collectives, context, data, expert, pipeline, sequence, tensor, zero
from jobs.lessons.tell import Tell
from jobs.lessons.toy import Piece, Whole, train_alone
from jobs.spec.lesson import Lesson, LessonSpec

TogetherFn = Callable[[LessonSpec, Groups, Tell], list[Piece]]
"""Run by every rank; returns its pieces."""
AloneFn = Callable[[LessonSpec], Whole]
LIMIT: Final = 1e-6
"""Relative: norm of the difference over the norm of what one process has."""
METHODS: Final[dict[Lesson, str]] = {
    "collectives": "collectives",
    "dp": "data_parallelism",
    "tp": "tensor_parallelism",
    "sp": "sequence_parallelism",
    "pp": "pipeline_parallelism",
    "zero": "zero",
    "ep": "expert_parallelism",
    "cp": "context_parallelism",
}
LESSONS: Final[dict[Lesson, tuple[TogetherFn, AloneFn]]] = {
    "collectives": (collectives.lesson, collectives.alone),
    "dp": (data.lesson, train_alone),
    "tp": (tensor.lesson, tensor.alone),
    "sp": (sequence.lesson, sequence.alone),
    "pp": (pipeline.lesson, pipeline.alone),
    "zero": (zero.lesson, zero.alone),
    "ep": (expert.lesson, expert.alone),
    "cp": (context.lesson, context.alone),
}
"""Of each lesson: what its ranks do together, and the same on one process."""


@dataclass(frozen=True)
class Finding:
    """One piece against the same box of one process."""

    name: str
    box: tuple[tuple[int, int], ...]
    """Begin and end along each dimension."""
    n_whole: int
    """Elements of the whole."""
    difference: float


@dataclass(frozen=True)
class Verdict:
    """All ranks' findings together."""

    worst: float
    worst_name: str
    missing: tuple[str, ...]
    """Results of which the ranks together have not shown every element."""

    @property
    def ok(self) -> bool:
        """Equal to one process."""
        return self.worst <= LIMIT and not self.missing


def run_rank(spec: LessonSpec, groups: Groups, send: Callable[[str, str], None]) -> list[Finding]:
    """One rank's lesson, and its comparison with one process. Collective over all ranks.

    Args:
        spec: the lesson.
        groups: this rank's place.
        send: see Tell.send.
    """
    together, alone = LESSONS[spec.lesson]
    pieces = together(spec, groups, Tell(METHODS[spec.lesson], groups.rank, send))
    # Every rank computes the whole by itself: nothing of it has ever been communicated.
    return findings(pieces, alone(spec))


def findings(pieces: Iterable[Piece], whole: Whole) -> list[Finding]:
    """Each piece against its box of the whole, and every name of the whole that has no piece as an empty box.

    Raises:
        KeyError: a piece of something that one process does not have.
    """
    found = []
    seen = set()
    for piece in pieces:
        expected = whole[piece.name]
        begins = piece.offsets or (0,) * expected.dim()
        box = tuple((a, a + size) for a, size in zip(begins, piece.value.shape, strict=True))
        same = expected[tuple(slice(a, b) for a, b in box)]
        found.append(Finding(piece.name, box, expected.numel(), _difference(piece.value, same)))
        seen.add(piece.name)
    found += [Finding(name, ((0, 0),), whole[name].numel(), 0.0) for name in whole if name not in seen]
    return found


def judge(ranks: Iterable[Iterable[Finding]]) -> Verdict:
    """The worst of all ranks' findings, and what they left out."""
    every = [finding for rank in ranks for finding in rank]
    worst = max(every, key=lambda finding: finding.difference)
    boxes: dict[str, set[tuple[tuple[int, int], ...]]] = {}
    for finding in every:
        boxes.setdefault(finding.name, set()).add(finding.box)
    missing = {f.name for f in every if sum(_volume(box) for box in boxes[f.name]) != f.n_whole}
    return Verdict(worst.difference, worst.name, tuple(sorted(missing)))


def _difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    if value.shape != expected.shape:
        return float("inf")
    difference = torch.linalg.vector_norm((value - expected).double()).item()
    if difference == 0:
        return 0.0
    norm = torch.linalg.vector_norm(expected.double()).item()
    # nan compares as larger than nothing: it must not pass for equal.
    return difference / norm if norm > 0 and difference == difference else float("inf")


def _volume(box: tuple[tuple[int, int], ...]) -> int:
    n = 1
    for begin, end in box:
        n *= end - begin
    return n
