"""Holds what the ranks of a lesson found to one process. Starts no process and prints nothing."""

from collections.abc import Callable, Iterable
from typing import Final

import torch

from jobs.comm.groups import Groups
from jobs.lessons import collectives, context, data, expert, pipeline, sequence, tensor, zero
from jobs.lessons.tell import Tell
from jobs.lessons.toy import Piece, Whole, train_alone
from jobs.lessons.verdict import Finding, RankReport
from jobs.spec.lesson import Lesson, LessonSpec

TogetherFn = Callable[[LessonSpec, Groups, Tell], list[Piece]]
"""Run by every rank; returns its pieces."""
AloneFn = Callable[[LessonSpec], Whole]
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


def run_rank(groups: Groups, spec: LessonSpec) -> RankReport:
    """One rank's lesson, and its comparison with one process. Collective over all ranks."""
    together, alone = LESSONS[spec.lesson]
    said: list[tuple[str, str]] = []
    tell = Tell(METHODS[spec.lesson], groups.rank, lambda kind, text: said.append((kind, text)))
    pieces = together(spec, groups, tell)
    # Every rank computes the whole by itself: nothing of it has ever been communicated.
    return RankReport(tuple(findings(pieces, alone(spec))), tuple(said))


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


def _difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    if value.shape != expected.shape:
        return float("inf")
    difference = torch.linalg.vector_norm((value - expected).double()).item()
    if difference == 0:
        return 0.0
    norm = torch.linalg.vector_norm(expected.double()).item()
    # nan compares as larger than nothing: it must not pass for equal.
    return difference / norm if norm > 0 and difference == difference else float("inf")
