"""A rank's black box in a run: where it lies on its node, and what is written into it when.

    fork      INIT        groups, engine
              LOAD        restore
    on_start  STEP        each step, with its micro-batches; the first builds kernels and is counted apart
              CHECKPOINT  the part of a save that blocks
              EVALUATE
    on_end    END, at last with the clean-exit mark

A thread adds twice a second how many collectives the rank has begun. What keeps the box from being written
is said once, and training goes on without. Reads no boxes (node_agent.py) and judges nobody (watch.py).
"""

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from jobs.events import EvalRecord, Progress, StepRecord
from ops.black_box import BlackBox, BlackBoxError, Identity, Phase, box_path, read_boot_id, read_box

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from jobs.comm.groups import Groups
    from jobs.engines.base import Engine

SHARED_MEMORY = Path("/dev/shm")
COLLECTIVES_EVERY_S = 0.5
OLD_BOX_S = 86_400.0
_LOG = logging.getLogger(__name__)


def box_folder(run_id: str, node_id: str, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Folder of a run's boxes on one node: in memory, or among the temporary files where there is none.

    Args:
        run_id: of the run.
        node_id: Ray's: nodes that share a machine have folders of their own.
        shared_memory: where files are kept in memory.
    """
    is_usable = shared_memory.is_dir() and os.access(shared_memory, os.W_OK)
    base = shared_memory if is_usable else Path(tempfile.gettempdir())
    return base / f"packtrain-{os.getuid()}" / f"{run_id}-{node_id[:16]}"


def remove_box(folder: Path, rank: int) -> None:
    """Take a rank's box away, and the folder with the last one."""
    with contextlib.suppress(OSError):
        box_path(folder, rank).unlink(missing_ok=True)
        folder.rmdir()


def remove_old_boxes(shared: Path, now: float) -> None:
    """Take away what killed processes have left here: day-old boxes and sockets.

    A younger one may still be looked at: it says where its rank stood.

    Args:
        shared: folder of all runs' boxes.
        now: seconds since the epoch.
    """
    for path in shared.glob("*/*.box"):
        with contextlib.suppress(OSError, BlackBoxError):
            if now - path.stat().st_mtime > OLD_BOX_S and not psutil.pid_exists(read_box(path).identity.pid):
                path.unlink()
                path.parent.rmdir()
    for path in shared.glob("warm-*"):  # sockets of fork servers that were killed while they waited
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > OLD_BOX_S:
                path.unlink()


class RankBox:
    """This process's black box; without one where it cannot be made. Safe between threads."""

    def __init__(self, folder: Path | None, attempt: int, generation: int, rank: int) -> None:
        """Makes the box, in phase INIT.

        Args:
            folder: as box_folder gives it; None keeps no box.
            attempt: of this process.
            generation: of this process.
            rank: of this process.
        """
        self._lock = threading.Lock()
        self._box: BlackBox | None = None
        self._phase = Phase.INIT
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            identity = Identity(attempt, generation, rank, os.getpid(), read_boot_id())
            self._box = BlackBox(box_path(folder, rank), identity, time.monotonic(), time.time())
        except OSError as error:
            _LOG.warning("no black box: a hang of this rank cannot be seen: %s", error)

    def enter(self, phase: Phase) -> None:
        """The rank begins a phase."""
        self._phase = phase
        with self._lock:
            if self._box is not None:
                self._box.enter(phase, time.monotonic(), time.time())

    def start_from(self, progress: Progress) -> None:
        """Where training goes on from."""
        with self._lock:
            if self._box is not None:
                self._box.start_from(progress.step, progress.sample_ordinal, time.monotonic())

    def finish_step(self, record: StepRecord) -> None:
        """A step is complete, the next begins."""
        self._phase = Phase.STEP
        with self._lock:
            if self._box is not None:
                self._box.finish_step(
                    record.step, record.loss, record.sample_ordinal, time.monotonic(), time.time()
                )

    def mark(self, *, micro_batch: int | None = None, collective: int | None = None) -> None:
        """Progress inside a step."""
        with self._lock:
            if self._box is not None:
                self._box.mark(time.monotonic(), micro_batch, collective)

    @contextlib.contextmanager
    def blocking_save(self) -> Iterator[None]:
        """For the part of a save that training waits for."""
        before = self._phase
        self.enter(Phase.CHECKPOINT)
        yield
        self.enter(before)

    def end(self) -> None:
        """The clean-exit mark: all work is done."""
        self._phase = Phase.END
        with self._lock:
            if self._box is not None:
                self._box.end(time.monotonic(), time.time())

    def follow_collectives(self, groups: "Groups") -> None:
        """Mark now and then, from a thread, how many collectives this rank has begun in all its groups."""
        if self._box is None:
            return
        made = process_groups(groups)
        threading.Thread(target=self._follow, args=(made,), name="black-box", daemon=True).start()

    def _follow(self, made: Sequence["ProcessGroup"]) -> None:
        before = -1
        while True:
            try:
                # torch's stubs leave it out
                n_begun = sum(group._get_sequence_number_for_group() for group in made)  # type: ignore[attr-defined]
            except RuntimeError:  # the groups were left, or their backend does not count
                return
            if n_begun != before:
                before = n_begun
                self.mark(collective=n_begun)
            time.sleep(COLLECTIVES_EVERY_S)


def process_groups(groups: "Groups") -> list["ProcessGroup"]:
    """This rank's process groups, each once."""
    lines = (groups.world, groups.dp, groups.pp, groups.cp, groups.tp, groups.kv, groups.ep, groups.etp)
    found = [line.group for line in (*lines, *groups.sums.values())]
    return list({id(group): group for group in (*found, groups.control) if group is not None}.values())


class BlackBoxHook:
    """The trainer's calls, into the box. First of all hooks: a step ends before others work on it."""

    def __init__(self, box: RankBox, on_micro_batch: Callable[[], None]) -> None:
        """Local.

        Args:
            box: this rank's.
            on_micro_batch: called where a forward pass begins; a drill strikes there.
        """
        self._box = box
        self._on_micro_batch = on_micro_batch
        self._n_micro_batches = 0

    def on_start(self, engine: "Engine", progress: Progress) -> None:
        """The first step begins. Each forward pass of a stage of the model is marked from here on."""
        from jobs.engines.base import stages_of

        for stage in stages_of(engine.model):
            stage.register_forward_pre_hook(self._begin_micro_batch)
        self._box.start_from(progress)
        self._box.enter(Phase.STEP)

    def after_step(self, record: StepRecord, engine: "Engine") -> None:
        """The step is complete."""
        self._n_micro_batches = 0
        self._box.finish_step(record)

    def after_evaluate(self, record: EvalRecord) -> None:
        """Back to training."""
        self._n_micro_batches = 0
        self._box.enter(Phase.STEP)

    def on_end(self, outcome: str, engine: "Engine", progress: Progress) -> None:
        """What is left is to close down."""
        self._box.enter(Phase.END)

    def _begin_micro_batch(self, _module: Any, _inputs: Any) -> None:
        self._n_micro_batches += 1
        self._box.mark(micro_batch=self._n_micro_batches)
        self._on_micro_batch()


class EvaluationHook:
    """Marks that an evaluation follows. Last of all hooks: what they do after a step is none of it."""

    def __init__(self, box: RankBox, every_steps: int) -> None:
        """Local.

        Args:
            box: this rank's.
            every_steps: the trainer evaluates after these steps.
        """
        self._box = box
        self._every_steps = every_steps

    def on_start(self, engine: "Engine", progress: Progress) -> None:
        """Nothing."""

    def after_step(self, record: StepRecord, engine: "Engine") -> None:
        """An evaluation, unless the run was stopped: then closing down follows at once."""
        if record.step % self._every_steps == 0:
            self._box.enter(Phase.EVALUATE)

    def after_evaluate(self, record: EvalRecord) -> None:
        """Nothing."""

    def on_end(self, outcome: str, engine: "Engine", progress: Progress) -> None:
        """Nothing."""
