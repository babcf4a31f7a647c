"""Runs a lesson (model.kind: mlp) on this machine and shows what its ranks said, in rank order.

No Ray and no run folder. What a lesson does is in jobs/lessons, how its ranks live in local_ranks.py.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.lessons.verdict import RankReport, judge
from jobs.spec.lesson import LessonSpec
from service.local_ranks import LocalRanks

if TYPE_CHECKING:
    from jobs.comm.groups import Groups

PRELOAD = ("torch", "torch.distributed", "service.cli", "service.lesson", "jobs.lessons.compare")


def run_lesson(spec: LessonSpec, say: Callable[[str], None]) -> int:
    """Run the lesson in the foreground; 0 where the ranks equal one process, 1 where not, 3 after Ctrl-C.

    Raises:
        PacktrainError: a rank raised or died; holds its traceback.
    """
    began_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="packtrain-lesson-") as folder:
            reports: list[RankReport] = LocalRanks(PRELOAD, Path(folder)).run(_rank, spec.mesh, 1, spec)
    except KeyboardInterrupt:
        say("stopped")
        return 3
    for line in in_order([report.said for report in reports]):
        say(line)
    verdict = judge([report.findings for report in reports])
    say("")
    if verdict.missing:
        say(f"no rank has shown all of: {', '.join(verdict.missing)}")
    say(
        f"equal to one process: {'yes' if verdict.ok else 'NO'}, worst difference {verdict.worst:.1e} "
        f"({verdict.worst_name}); {len(reports)} ranks, {time.monotonic() - began_s:.1f} s"
    )
    return 0 if verdict.ok else 1


def in_order(ranks: Sequence[Sequence[tuple[str, str]]]) -> Iterator[str]:
    """What the ranks said, part by part: a title, then all first lines in rank order, all second lines, ...

    Args:
        ranks: of each rank ("title" | "line", text), all with the same titles in the same order.
    """
    for parts in zip(*(_parts(said) for said in ranks), strict=True):
        title = parts[0][0]
        if title:
            yield from ("", f"-- {title}")
        for lines in zip_longest(*(lines for _, lines in parts)):
            yield from (line for line in lines if line is not None)


def _parts(said: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    parts: list[tuple[str, list[str]]] = [("", [])]
    for kind, text in said:
        if kind == "title":
            parts.append((text, []))
        else:
            parts[-1][1].append(text)
    return parts


def _rank(groups: "Groups", spec: LessonSpec) -> RankReport:
    """In a rank, where torch is imported; the process that the user started never needs it."""
    from jobs.lessons.compare import run_rank

    return run_rank(groups, spec)
