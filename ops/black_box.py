"""The black box of a rank: one small memory-mapped file that tells where the rank is, also after a SIGKILL.

    offset 0      magic (8 bytes), version (u32), slot size (u32)
    offset 64     slot 0:  sequence (u64) | fields | CRC-32 of all before it (u32)
    offset 1024   slot 1:  the same

All numbers are little-endian. Each write goes to the slot that holds the older record, with the next
sequence number; a reader takes the newest slot whose CRC is right. So a writer killed in the middle of a
write leaves the record before it, and a read torn by a living writer is noticed and done again. The kernel
keeps the pages of a killed process; a crash of the whole node loses them.

Put the file on a local disk or in memory: on a network file system the mapping is not shared. Does not judge
what it reads (ops/monitors/heartbeat.py does) and keeps no history: it holds the present and a few sums.
"""

import math
import mmap
import os
import struct
import tempfile
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from uuid import UUID

from jobs.errors import PacktrainError

MAGIC = b"PTBLKBOX"
VERSION = 1
FILE_BYTES = 4096
SLOT_OFFSETS = (64, 1024)
N_READS = 100
"""A read is given up after so many torn ones in a row; the writer cannot keep up such a pace."""
UNKNOWN = -1
WAITING_UNKNOWN = 2

_HEAD = struct.Struct("<8sII")


class Phase(IntEnum):
    """What a rank is doing. The numbers are in files: they never change."""

    INIT = 0
    """Process start to the end of group and engine building."""
    LOAD = 1
    """Restoring from a checkpoint."""
    COMPILE = 2
    STEP = 3
    CHECKPOINT = 4
    """The part of a save that blocks training."""
    EVALUATE = 5
    END = 6
    """After the last step: closing down."""


_IDENTITY = "IIII16s"
_PRESENT = "BBBxddd4qdd"
_SUMS = "Qddd"
_SLOT = struct.Struct("<Q" + _IDENTITY + _PRESENT + _SUMS * len(Phase))
_CRC = struct.Struct("<I")
SLOT_BYTES = _SLOT.size + _CRC.size


class BlackBoxError(PacktrainError):
    """A file is no black box, is of another version, or holds no whole record."""


@dataclass(frozen=True)
class Identity:
    """Whose box it is."""

    attempt: int
    generation: int
    rank: int
    pid: int
    boot_id: str
    """UUID of the node's boot: monotonic times can be compared only inside one boot."""


@dataclass(frozen=True)
class PhaseSums:
    """What is known of the stays in one phase that have ended, since the box was cleared."""

    count: int = 0
    last_s: float = 0.0
    max_s: float = 0.0
    total_s: float = 0.0

    def with_stay(self, duration_s: float) -> "PhaseSums":
        """The sums with one more stay."""
        longest_s = max(self.max_s, duration_s)
        return PhaseSums(self.count + 1, duration_s, longest_s, self.total_s + duration_s)


@dataclass(frozen=True)
class BoxReading:
    """One whole record of a rank's black box."""

    identity: Identity
    sequence: int
    """Writes since the box was cleared."""
    phase: Phase
    entered_at_mono_s: float
    """When the phase was entered, by the node's monotonic clock (one for all processes of a boot)."""
    entered_at: float
    """The same by the wall clock, unix seconds."""
    written_at_mono_s: float
    step: int
    """Completed optimizer steps; UNKNOWN before the first is known."""
    micro_batch: int
    """Micro-batches begun in the step under way; UNKNOWN where the engine does not tell."""
    collective: int
    """Sequence number of the last collective begun; UNKNOWN where it is not known."""
    sample_ordinal: int
    """Data cursor: global ordinal of the next step's first sample; UNKNOWN before the first is known."""
    loss: float
    """Of the last completed step; NaN before it."""
    has_ended: bool
    """The rank said itself that it leaves, with its work done."""
    is_waiting: bool | None
    """It is inside a communication call; None where the engine does not tell."""
    first_step_s: float
    """How long this process's first step took (kernels are built in it); NaN before its end."""
    sums: tuple[PhaseSums, ...]
    """One a phase, in Phase's order. A step is counted when it is finished, and not the first."""

    def age_s(self, now_mono_s: float) -> float:
        """How long it has been in its phase (for a step: since the last one was finished)."""
        return max(0.0, now_mono_s - self.entered_at_mono_s)

    @property
    def is_first_step(self) -> bool:
        """In a step, and none was finished by this process."""
        return self.phase is Phase.STEP and math.isnan(self.first_step_s)


class BlackBox:
    """The writer. One a rank process; not for several threads at once."""

    def __init__(self, path: Path, identity: Identity, now_mono_s: float, now: float) -> None:
        """Clears the box: a new file takes the place of an older attempt's.

        A process of an older attempt that is still alive goes on writing into its own file, which has no
        name any more.

        Args:
            path: on a local file system; its folder exists.
            identity: of this process.
            now_mono_s: time.monotonic().
            now: wall clock, unix seconds.

        Raises:
            OSError: the file cannot be made.
        """
        self._identity = (
            identity.attempt,
            identity.generation,
            identity.rank,
            identity.pid,
            UUID(identity.boot_id).bytes,
        )
        self._sequence = 0
        self._phase = Phase.INIT
        self._entered_at_mono_s = now_mono_s
        self._entered_at = now
        self._step = self._micro_batch = self._collective = self._sample_ordinal = UNKNOWN
        self._loss = self._first_step_s = math.nan
        self._has_ended = False
        self._waiting = WAITING_UNKNOWN
        self._sums = [PhaseSums() for _ in Phase]
        self._packed_sums: list[float] = []
        self._repack_sums()
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            # Not a file with holes: a write to one in a full /dev/shm would end the process by SIGBUS.
            os.posix_fallocate(handle, 0, FILE_BYTES)
            self._map = mmap.mmap(handle, FILE_BYTES)
            self._map[: _HEAD.size] = _HEAD.pack(MAGIC, VERSION, SLOT_BYTES)
            self._write(now_mono_s)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)

    def enter(self, phase: Phase, now_mono_s: float, now: float) -> None:
        """The rank begins a phase; the one before it has ended. Back in STEP, a step begins."""
        if self._phase is not Phase.STEP:
            self._count(self._phase, now_mono_s - self._entered_at_mono_s)
        self._begin(phase, now_mono_s, now)

    def finish_step(self, step: int, loss: float, sample_ordinal: int, now_mono_s: float, now: float) -> None:
        """A step is complete, the next begins.

        Args:
            step: completed steps, this one included.
            loss: of the step.
            sample_ordinal: global ordinal of the next step's first sample.
            now_mono_s: time.monotonic().
            now: wall clock, unix seconds.
        """
        duration_s = now_mono_s - self._entered_at_mono_s
        if math.isnan(self._first_step_s):
            self._first_step_s = duration_s
        else:
            self._count(Phase.STEP, duration_s)
        self._step, self._loss, self._sample_ordinal = step, loss, sample_ordinal
        self._begin(Phase.STEP, now_mono_s, now)

    def start_from(self, step: int, sample_ordinal: int, now_mono_s: float) -> None:
        """Where training goes on from, once it is known (0 and 0 in a new run)."""
        self._step, self._sample_ordinal = step, sample_ordinal
        self._write(now_mono_s)

    def mark(
        self,
        now_mono_s: float,
        micro_batch: int | None = None,
        collective: int | None = None,
        is_waiting: bool | None = None,
    ) -> None:
        """Progress inside a step; what is None stays as it was."""
        if micro_batch is not None:
            self._micro_batch = micro_batch
        if collective is not None:
            self._collective = collective
        if is_waiting is not None:
            self._waiting = int(is_waiting)
        self._write(now_mono_s)

    def end(self, now_mono_s: float, now: float) -> None:
        """The clean-exit mark. What happens to the process from here on is no failure of training."""
        self._has_ended = True
        self.enter(Phase.END, now_mono_s, now)

    def close(self) -> None:
        """Drop the mapping; the file stays. Sets no mark."""
        self._map.close()

    def __enter__(self) -> "BlackBox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, phase: Phase, now_mono_s: float, now: float) -> None:
        self._phase = phase
        self._entered_at_mono_s, self._entered_at = now_mono_s, now
        self._micro_batch = UNKNOWN if self._micro_batch == UNKNOWN else 0
        self._write(now_mono_s)

    def _count(self, phase: Phase, duration_s: float) -> None:
        self._sums[phase] = self._sums[phase].with_stay(duration_s)
        self._repack_sums()

    def _repack_sums(self) -> None:
        self._packed_sums = [
            value for sums in self._sums for value in (sums.count, sums.last_s, sums.max_s, sums.total_s)
        ]

    def _write(self, now_mono_s: float) -> None:
        record = _SLOT.pack(
            self._sequence,
            *self._identity,
            self._phase,
            self._has_ended,
            self._waiting,
            self._entered_at_mono_s,
            self._entered_at,
            now_mono_s,
            self._step,
            self._micro_batch,
            self._collective,
            self._sample_ordinal,
            self._loss,
            self._first_step_s,
            *self._packed_sums,
        )
        start = SLOT_OFFSETS[self._sequence % 2]
        self._map[start : start + SLOT_BYTES] = record + _CRC.pack(zlib.crc32(record))
        self._sequence += 1


def read_box(path: Path) -> BoxReading:
    """The newest whole record of a box, whether its writer lives or not.

    Raises:
        BlackBoxError: not a box, another version, or torn in every one of N_READS reads.
        OSError: no such file, or not readable.
    """
    with path.open("rb", buffering=0) as file:
        for _ in range(N_READS):
            content = os.pread(file.fileno(), FILE_BYTES, 0)
            _check_head(content, path)
            records = [record for start in SLOT_OFFSETS if (record := _whole_record(content, start))]
            if records:
                return max(records, key=lambda record: record.sequence)
    raise BlackBoxError(f"{path}: no whole record in {N_READS} reads: the file was cut or overwritten")


def box_path(folder: Path, rank: int) -> Path:
    """Where the box of a rank lies in its node's folder."""
    return folder / f"rank-{rank:05d}.box"


def read_boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """UUID of this boot of the node."""
    return path.read_text().strip()


def _check_head(content: bytes, path: Path) -> None:
    if len(content) < FILE_BYTES or not content.startswith(MAGIC):
        raise BlackBoxError(f"{path}: not a black box ({len(content)} bytes, {FILE_BYTES} expected)")
    _, version, slot_bytes = _HEAD.unpack_from(content)
    if (version, slot_bytes) != (VERSION, SLOT_BYTES):
        raise BlackBoxError(
            f"{path}: black box of version {version} with slots of {slot_bytes} bytes; "
            f"this program reads version {VERSION} with {SLOT_BYTES}"
        )


def _whole_record(content: bytes, start: int) -> BoxReading | None:
    record = content[start : start + _SLOT.size]
    if _CRC.unpack_from(content, start + _SLOT.size)[0] != zlib.crc32(record):
        return None
    fields = _SLOT.unpack(record)
    sequence, attempt, generation, rank, pid, boot, phase, has_ended, waiting = fields[:9]
    entered_at_mono_s, entered_at, written_at_mono_s, step, micro_batch, collective = fields[9:15]
    sample_ordinal, loss, first_step_s, *sums = fields[15:]
    return BoxReading(
        identity=Identity(attempt, generation, rank, pid, str(UUID(bytes=boot))),
        sequence=sequence,
        phase=Phase(phase),
        entered_at_mono_s=entered_at_mono_s,
        entered_at=entered_at,
        written_at_mono_s=written_at_mono_s,
        step=step,
        micro_batch=micro_batch,
        collective=collective,
        sample_ordinal=sample_ordinal,
        loss=loss,
        has_ended=bool(has_ended),
        is_waiting=None if waiting == WAITING_UNKNOWN else bool(waiting),
        first_step_s=first_step_s,
        sums=tuple(PhaseSums(*sums[i : i + 4]) for i in range(0, len(sums), 4)),
    )
