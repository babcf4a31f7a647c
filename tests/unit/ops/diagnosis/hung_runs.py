"""Flight recorder dumps of a run that never was: ranks of a TP x PP x DP layout, some of which stop.

Each rank calls the operations of its program in order, at most `depth` ahead of what has ended. An operation
ends once all of its ranks have called it and ended what they called before it.
"""

import pickle
import random
from dataclasses import dataclass, field

from ops.diagnosis.flight_dump import Dump, parse_dump


@dataclass(frozen=True)
class Layout:
    tp: int
    pp: int
    dp: int

    @property
    def world_size(self):
        return self.tp * self.pp * self.dp

    def rank(self, tp, pp, dp):
        return tp + self.tp * (dp + self.dp * pp)

    def place(self, rank):
        return rank % self.tp, rank // (self.tp * self.dp), rank // self.tp % self.dp

    def groups(self):
        """Ranks of each group by name, in the order in which they are made."""
        found = {"world": list(range(self.world_size))}
        for dp in range(self.dp):
            for pp in range(self.pp):
                found[f"tp-{pp}-{dp}"] = [self.rank(t, pp, dp) for t in range(self.tp)]
        for tp in range(self.tp):
            for pp in range(self.pp):
                found[f"dp-{tp}-{pp}"] = [self.rank(tp, pp, d) for d in range(self.dp)]
            for dp in range(self.dp):
                found[f"pp-{tp}-{dp}"] = [self.rank(tp, p, dp) for p in range(self.pp)]
        return found

    def program(self, rank, n_steps):
        """What the rank calls: (group, name, ends of a pair or None)."""
        tp, pp, dp = self.place(rank)
        tp_group, dp_group, pp_group = f"tp-{pp}-{dp}", f"dp-{tp}-{pp}", f"pp-{tp}-{dp}"
        layer = [(tp_group, "_all_gather_base", None), (tp_group, "_reduce_scatter_base", None)]
        step = [(pp_group, "p2p", (pp - 1, pp))] if pp else []
        step += layer * 2
        if pp < self.pp - 1:
            step += [(pp_group, "p2p", (pp, pp + 1)), (pp_group, "p2p", (pp + 1, pp))]
        step += layer
        if pp:
            step += [(pp_group, "p2p", (pp, pp - 1))]
        return [*step, (dp_group, "all_reduce", None), ("world", "all_reduce", None)] * n_steps


@dataclass
class _Rank:
    program: list
    stops_at: int
    called: list = field(default_factory=list)
    n_ended: int = 0


def hung_dumps(
    layout: Layout, faulty: list[int], rng: random.Random, *, depth: int, is_gloo: bool
) -> list[Dump]:
    """Dumps of all ranks, the faulty ones stopped at one random point and the rest come to rest."""
    groups = layout.groups()
    n_ops = len(layout.program(0, 1))
    stop = rng.randrange(n_ops, 2 * n_ops)
    ranks = [_Rank(layout.program(r, 3), stop if r in faulty else 10**9) for r in range(layout.world_size)]
    moved = True
    while moved:
        n_moved = sum(_advance(rank, depth) for rank in ranks)
        moved = n_moved + sum(_end(rank, ranks, groups) for rank in ranks) > 0
    return [_dump(r, rank, groups, is_gloo) for r, rank in enumerate(ranks)]


def _advance(rank, depth):
    moved = False
    while len(rank.called) < min(rank.stops_at, len(rank.program), rank.n_ended + depth):
        group, name, ends = rank.program[len(rank.called)]
        same = [c for c in rank.called if c[0] == group and c[2] == ends]
        rank.called.append((group, name, ends, len(same) + 1))
        moved = True
    return moved


def _end(rank, ranks, groups):
    if rank.n_ended == len(rank.called):
        return False
    group, name, ends, number = rank.called[rank.n_ended]
    members = groups[group] if ends is None else [groups[group][i] for i in ends]
    if not all((group, name, ends, number) in ranks[m].called[: ranks[m].n_ended + 1] for m in members):
        return False
    rank.n_ended += 1
    # All of them end it together; whoever comes later in the loop finds it ended here and there.
    for m in members:
        at = ranks[m].called.index((group, name, ends, number))
        ranks[m].n_ended = max(ranks[m].n_ended, at + 1)
    return True


def _dump(number, rank, groups, is_gloo):
    names = {g: str(i) for i, g in enumerate(groups)}
    entries, p2p_seq, collective_seq = [], {}, {}
    for i, (group, name, ends, _) in enumerate(rank.called):
        counter = p2p_seq if ends else collective_seq
        counter[group] = counter.get(group, 0) + 1
        if ends:
            me = groups[group].index(number)
            other = ends[1] if me == ends[0] else ends[0]
            name = f"send {me}->{other}" if me == ends[0] else f"recv {me}<-{other}"
        is_done = i < rank.n_ended
        if ends if is_gloo else is_done:
            continue  # gloo records collectives only, NCCL's dump on a time-out what is open
        entries.append(
            {
                "pg_id": int(names[group]),
                "process_group": (names[group], "default_pg" if group == "world" else group),
                "collective_seq_id": collective_seq.get(group, 0),
                "p2p_seq_id": p2p_seq.get(group, 0),
                "op_id": collective_seq.get(group, 0) + p2p_seq.get(group, 0),
                "profiling_name": f"{'gloo' if is_gloo else 'nccl'}:{name}",
                "input_sizes": [[4]],
                "input_dtypes": ["Float"],
                "state": "scheduled",
                "retired": is_gloo and is_done,
                "is_p2p": ends is not None,
            }
        )
    mine = {g: m for g, m in groups.items() if number in m}
    status = {
        names[g]: {
            "last_enqueued_collective": sum(c[0] == g for c in rank.called),
            "last_completed_collective": sum(c[0] == g for c in rank.called[: rank.n_ended]),
        }
        for g in mine
    }
    config = {names[g]: {"name": names[g], "desc": g, "ranks": str(m)} for g, m in mine.items()}
    if is_gloo:
        config = {"": {"name": "", "desc": "", "ranks": "[]"}}
    tree = {"version": "2.10", "entries": entries, "pg_config": config, "pg_status": status}
    return parse_dump(pickle.dumps(tree), number)
