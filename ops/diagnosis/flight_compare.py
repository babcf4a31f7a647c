"""Flight recorder dumps of the ranks of a hung job, compared: who holds up the others.

The rank that is behind is not always the one with the lowest number: a rank can be behind in one group
because it waits in another. So each group says who waits for whom, and the culprits are those whom somebody
waits for and who themselves wait for nobody. Works on NCCL's dumps and on gloo's, which know neither the
members of a group nor states.

Does not read dumps (flight_dump.py) and passes no verdict (flight_recorder.py).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.diagnosis.flight_dump import Dump, Operation

SAME_SIZE_OPS = frozenset(
    {"all_reduce", "broadcast", "reduce", "_all_gather_base", "_allgather_base", "_reduce_scatter_base"}
)
"""Collectives whose ranks must bring equally many elements of one type; the others may differ by rank."""
MAX_LISTED = 8
"""Ranks named one by one in a sentence; more are counted."""
STATES = ("scheduled", "started", "completed")


@dataclass(frozen=True)
class GroupState:
    """How far each rank of one group has come."""

    name: str
    description: str
    last_seq: Mapping[int, int]
    """Last collective that each rank has called."""
    behind: tuple[int, ...]
    """Ranks that others of this group wait for."""
    waiting: tuple[int, ...]
    """Ranks that wait for them, or, where nobody is behind, that have something open."""
    open_operation: str
    """What they wait in."""
    missing: tuple[int, ...]
    """Members without a dump."""

    def __str__(self) -> str:
        label = f"group {self.name}" + (f" ({self.description})" if self.description else "")
        if not self.last_seq:
            return f"{label}: ranks {list(self.waiting)} in {self.open_operation} without {list(self.behind)}"
        ranks_at: dict[int, list[int]] = defaultdict(list)
        for rank, seq in sorted(self.last_seq.items()):
            ranks_at[seq].append(rank)
        counts = ", ".join(
            f"{seq} on {f'ranks {ranks}' if len(ranks) <= MAX_LISTED else f'{len(ranks)} ranks'}"
            for seq, ranks in sorted(ranks_at.items())
        )
        return f"{label}: last collective {counts}; open: {self.open_operation or 'nothing'}"


@dataclass(frozen=True)
class Mismatch:
    """Ranks of one group that called different things under one number: an error of the program."""

    group: str
    seq: int
    ranks: tuple[int, ...]
    """The fewer; empty where no side is in the minority."""
    text: str


@dataclass(frozen=True)
class Comparison:
    """What the dumps of one hung job say together."""

    culprits: tuple[int, ...]
    """Ranks that hold up the others, ascending; empty where nobody is behind."""
    missing: tuple[int, ...]
    """Ranks of the world that left no dump."""
    deadlock: tuple[int, ...]
    """Ranks that wait for one another in a circle, across groups."""
    mismatch: Mismatch | None
    groups: tuple[GroupState, ...]
    """Groups in which somebody waits, the ones that name a culprit first."""
    n_pending: int
    """Operations begun and not ended, over all ranks."""
    basis: str
    """What the culprits rest on: sequence, run_ahead, state, no_dump; empty where there are none."""
    sees_p2p: bool
    """Sends and receives are recorded; gloo records none, so a rank that waits in one looks idle."""


class _Table:
    """Dumps by rank and group, and what can be read off them."""

    def __init__(
        self, dumps: Sequence[Dump], groups: Mapping[str, Sequence[int]], world_size: int | None
    ) -> None:
        self.by_rank = {d.rank: d for d in dumps}
        if len(self.by_rank) != len(dumps):
            raise ValueError("two dumps of the same rank")
        self.collectives: dict[str, dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
        self.p2p: dict[str, dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
        self.descriptions: dict[str, str] = {}
        known: dict[str, set[int]] = {name: set(ranks) for name, ranks in groups.items()}
        self.order: dict[str, tuple[int, ...]] = {name: tuple(ranks) for name, ranks in groups.items()}
        mixed: set[str] = set()
        for dump in dumps:
            mixed |= dump.mixed
            self.descriptions |= dump.descriptions
            for name, ranks in dump.members.items():
                known.setdefault(name, set(ranks))
                self.order.setdefault(name, ranks)
            for op in dump.operations:
                (self.p2p if op.is_p2p else self.collectives)[op.group][dump.rank].append(op)
        self.mixed = mixed
        self.world = set(range(world_size)) if world_size is not None else set(self.by_rank)
        default = {n for n, text in self.descriptions.items() if text == "default_pg" or n == ""}
        for name in default:
            self.world |= known.get(name, set())
        self.members: dict[str, set[int]] = {}
        for name in {*self.collectives, *self.p2p, *(n for d in dumps for n in d.progress)}:
            present = {d.rank for d in dumps if name in d.progress} | set(self.collectives[name])
            self.members[name] = known.get(name, self.world if name in default else set()) | present

    def last_seq(self, group: str, rank: int) -> int | None:
        """Last collective that `rank` has called in `group`; None where its dump cannot say."""
        dump = self.by_rank.get(rank)
        if dump is None:
            return None
        called = max((op.seq for op in self.collectives[group].get(rank, ())), default=0)
        if group in self.mixed:
            return called or None
        progress = dump.progress.get(group)
        return max(called, progress.enqueued) if progress is not None else called

    def pending(self, group: str, rank: int) -> list[Operation]:
        """Collectives that `rank` has begun in `group` and not ended, in order."""
        return [op for op in self.collectives[group].get(rank, ()) if not op.is_done]

    def someone_completed(self, group: str, seq: int) -> bool:
        """A rank's device has ended collective `seq` of `group`."""
        if group in self.mixed:
            return any(op.seq == seq and op.is_done for ops in self.collectives[group].values() for op in ops)
        return any(d.progress[group].completed >= seq for d in self.by_rank.values() if group in d.progress)


Edges = dict[int, set[int]]
"""Whom each rank waits for."""


def compare(
    dumps: Sequence[Dump],
    groups: Mapping[str, Sequence[int]] | None = None,
    world_size: int | None = None,
) -> Comparison:
    """Compare the ranks of one hung job.

    Args:
        dumps: one a rank, of those that could be had.
        groups: ranks of each group by name, in group order, where the caller knows them (gloo's dumps do
            not).
        world_size: number of ranks of the job; None takes what the dumps know.

    Raises:
        ValueError: no dumps, or two of one rank.
    """
    if not dumps:
        raise ValueError("no dumps to compare")
    table = _Table(dumps, groups or {}, world_size)
    names = sorted(table.members, key=lambda n: (len(n), n))
    n_pending = sum(not op.is_done for d in dumps for op in d.operations)
    edges, basis, by_group = _first_that_tells(table, names)
    culprits, deadlock = _ends(edges)
    present = {r for r in culprits if r in table.by_rank}
    if culprits and not present:
        basis = "no_dump"
    culprits = present or culprits
    states = [_group_state(table, name, by_group.get(name, {})) for name in names]

    def telling(state: GroupState) -> tuple[bool, bool, int, int]:
        behind = set(state.behind)
        return not culprits & behind, not state.last_seq, len(behind - culprits), -len(state.last_seq)

    return Comparison(
        culprits=tuple(sorted(culprits)),
        missing=tuple(sorted(table.world - set(table.by_rank))),
        deadlock=tuple(sorted(deadlock)),
        mismatch=_mismatch(table, names),
        groups=tuple(sorted((s for s in states if s.waiting), key=telling)),
        n_pending=n_pending,
        basis=basis if culprits else "",
        sees_p2p=not any(d.is_gloo for d in dumps),
    )


def _first_that_tells(table: _Table, names: Sequence[str]) -> tuple[Edges, str, dict[str, Edges]]:
    """Who waits for whom by the strictest reading that names anybody: (edges, its name, edges by group)."""
    by_group = _waits(table)
    basis = "sequence"
    for weaker, read in (("run_ahead", _called_less), ("state", _less_done)):
        if any(others for edges in by_group.values() for others in edges.values()):
            break
        basis, by_group = weaker, {name: read(table, name) for name in names}
    edges: Edges = defaultdict(set)
    for of_group in by_group.values():
        for rank, others in of_group.items():
            edges[rank] |= others
    return (dict(edges), basis, by_group) if any(edges.values()) else ({}, "", {})


def _waits(table: _Table) -> dict[str, Edges]:
    """Whom each rank waits for in its oldest open operation, by group.

    For those that have not called it; where all have, for those to whom it is not the oldest; where it is so
    for all, for those that left no dump.
    """
    by_group: dict[str, Edges] = defaultdict(dict)
    oldest = {rank: op for rank, dump in table.by_rank.items() if (op := _oldest_open(dump)) is not None}
    for rank, op in oldest.items():
        others = _peer(table, rank, op, oldest) if op.is_p2p else _members(table, rank, op, oldest)
        by_group[op.group][rank] = others
    return by_group


def _oldest_open(dump: Dump) -> Operation | None:
    return next((op for op in dump.operations if not op.is_done), None)


def _members(table: _Table, rank: int, op: Operation, oldest: Mapping[int, Operation]) -> set[int]:
    seqs = {r: table.last_seq(op.group, r) for r in table.members[op.group] if r != rank}
    late = {r for r, seq in seqs.items() if seq is not None and seq < op.seq}
    if late:
        return late
    called = {r for r in seqs if any(o.seq == op.seq for o in table.pending(op.group, r))}
    busy = {r for r in called if _is_other(oldest.get(r), op)}
    silent = {r for r in seqs if r not in table.by_rank}
    # What one rank has completed all have called, the silent too: then this rank's own device is late.
    if (
        busy
        or table.someone_completed(op.group, op.seq)
        or any(seqs[r] is None for r in seqs if r not in silent)
    ):
        return busy
    return silent


def _peer(table: _Table, rank: int, op: Operation, oldest: Mapping[int, Operation]) -> set[int]:
    order = table.order.get(op.group, ())
    source, target = (order[i] if i < len(order) else i for i in (op.source, op.target))
    peer = target if rank == source else source
    if peer == rank or op.source < 0:
        return set()
    answers = [
        o
        for o in table.p2p[op.group].get(peer, ())
        if not o.is_done and (o.source, o.target) == (op.source, op.target)
    ]
    return {peer} if not answers or _is_other(oldest.get(peer), answers[0]) else set()


def _is_other(oldest: Operation | None, op: Operation) -> bool:
    """What a rank is in is something else than `op`, which it has called as well."""
    if oldest is None:
        return False
    return (oldest.group, oldest.is_p2p, oldest.seq) != (op.group, op.is_p2p, op.seq)


def _called_less(table: _Table, group: str) -> Edges:
    """All have called the first open collective, but some have run on further: the others hang back."""
    seqs = {r: s for r in table.members[group] if (s := table.last_seq(group, r)) is not None}
    return {rank: {r for r, other in seqs.items() if other < seq} for rank, seq in seqs.items()}


def _less_done(table: _Table, group: str) -> Edges:
    """All have called the same: behind are those whose device has started, or ended, less of it."""
    levels: dict[int, tuple[int, int]] = {}
    open_seqs = [ops[0].seq for r in table.members[group] if (ops := table.pending(group, r))]
    for rank in table.members[group] & set(table.by_rank):
        progress = table.by_rank[rank].progress.get(group)
        if progress is None or not open_seqs or group in table.mixed:
            return {}
        at = [op for op in table.collectives[group].get(rank, ()) if op.seq == min(open_seqs)]
        is_over = progress.completed >= min(open_seqs)
        if not at and not is_over:
            return {}
        level = len(STATES) - 1 if is_over else STATES.index(at[0].state)
        levels[rank] = (level, progress.completed)
    return {rank: {r for r, other in levels.items() if other < level} for rank, level in levels.items()}


def _ends(edges: Edges) -> tuple[set[int], set[int]]:
    """(ranks waited for that wait for nobody, ranks on circles where there are no such ranks)."""
    awaited = set().union(*edges.values()) if edges else set()
    ends = {r for r in awaited if not edges.get(r)}
    if ends or not awaited:
        return ends, set()
    circle = set(awaited)
    while True:
        kept = {r for r in circle if any(r in edges.get(other, ()) for other in circle)}
        if kept == circle:
            return set(), circle
        circle = kept


def _group_state(table: _Table, name: str, edges: Edges) -> GroupState:
    members = table.members[name]
    seqs = {r: s for r in members if (s := table.last_seq(name, r)) is not None}
    waiting = {r for r, others in edges.items() if others} or {r for r in members if table.pending(name, r)}
    open_p2p = {r: [op for op in ops if not op.is_done] for r, ops in table.p2p[name].items()}
    first_open = [ops[0] for r in waiting if (ops := table.pending(name, r) or open_p2p.get(r, []))]
    return GroupState(
        name=name,
        description=table.descriptions.get(name, ""),
        last_seq=seqs,
        behind=tuple(sorted(set().union(*edges.values()) if edges else set())),
        waiting=tuple(sorted(waiting)),
        open_operation=", ".join(sorted({op.name for op in first_open})),
        missing=tuple(sorted(members - set(table.by_rank))),
    )


def _mismatch(table: _Table, names: Sequence[str]) -> Mismatch | None:
    """The first open collective that ranks of a group called with different operations, sizes or types."""
    for name in names:
        at: dict[int, dict[int, Operation]] = defaultdict(dict)
        for rank, ops in table.collectives[name].items():
            for op in ops:
                at[op.seq][rank] = op
        for seq, ops_by_rank in sorted(at.items()):
            if all(op.is_done for op in ops_by_rank.values()):
                continue
            sides: dict[str, list[int]] = defaultdict(list)
            for rank, op in ops_by_rank.items():
                sides[_signature(op)].append(rank)
            if len(sides) > 1:
                return _as_mismatch(name, seq, sides)
    return None


def _signature(op: Operation) -> str:
    if op.name not in SAME_SIZE_OPS:
        return op.name
    return f"{op.name} of {op.input_numel} {'+'.join(op.dtypes)}"


def _as_mismatch(group: str, seq: int, sides: Mapping[str, list[int]]) -> Mismatch:
    text = ", ".join(f"ranks {sorted(ranks)} called {what}" for what, ranks in sorted(sides.items()))
    largest = max(len(ranks) for ranks in sides.values())
    minority = [r for ranks in sides.values() if len(ranks) < largest for r in ranks]
    is_tie = sum(len(ranks) == largest for ranks in sides.values()) > 1
    return Mismatch(
        group=group,
        seq=seq,
        ranks=() if is_tie else tuple(sorted(minority)),
        text=f"collective {seq} of group {group}: {text}",
    )
