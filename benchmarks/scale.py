"""What does it cost to watch a large run, and how far behind its reports is a verdict?

    python benchmarks/scale.py [--quick] [--nodes 2048] [--gpus 8] [--every 10]

One process plays the coordinator's part of 2,048 nodes of 8 GPUs: each reports every ten seconds, spread over
them, the black boxes of its ranks and a signal of each GPU. A report is unpickled as it comes out of Ray,
taken in (service/watch.py), and once a second all boxes are looked at. The clock is simulated, CPU time is
real; making the reports is not counted, and Ray's own share of a call is not in it. Three scenes:

    calm    nothing happens: CPU time a second, memory, and no verdict
    hang    one rank stops in a step and all others wait: who is blamed, how long after the rule could know
    storm   every rank fails at once, with a window full of kernel lines: seconds to the decision

Goal: 25 % of one core, 1 GiB, a verdict at most 5 s behind.
"""

import argparse
import pickle
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import harness

from jobs.spec.job import ResilienceSection
from ops.black_box import BoxReading, Identity, Phase, PhaseSums
from ops.decision import TODAYS_ACTIONS, Action
from ops.diagnosis.hang_culprits import hang_incident
from ops.diagnosis.rank_deaths import join_signals
from ops.diagnosis.rank_exits import RankExit, diagnose
from ops.monitors.collective_hang import Hang
from ops.policy import decide
from ops.quarantine import Cluster
from ops.signal import Entity, EntityKind, Signal
from ops.situation import Situation
from service.watch import NodeReport, Watch

GOAL_CORE_FRAC = 0.25
GOAL_BYTES = 2**30
GOAL_BEHIND_S = 5.0
STEP_S = 2.0
START = 1_700_000_000.0


@dataclass
class Fleet:
    """Nodes that report in simulated time."""

    n_nodes: int
    n_gpus: int
    every_s: int
    hang_rank: int = -1
    hang_at: float = float("inf")
    """Simulated seconds: the step of this moment is never finished."""
    watch: Watch = field(init=False)
    busy_s: float = 0.0
    """CPU time of all that is counted."""
    longest_s: float = 0.0
    """Of one simulated second."""
    hang: Hang | None = None

    def __post_init__(self) -> None:
        self.watch = Watch(reports_every_s=float(self.every_s))
        self.stages = dict.fromkeys(range(self.n_ranks), 0)

    @property
    def n_ranks(self) -> int:
        """One a GPU."""
        return self.n_nodes * self.n_gpus

    def run(self, first: int, last: int) -> None:
        """Simulated seconds first to last, or until the verdict."""
        for second in range(first, last):
            due = [
                self.report(node, second) for node in range(second % self.every_s, self.n_nodes, self.every_s)
            ]
            began = time.process_time()
            for data in due:
                self.watch.hear(pickle.loads(data), self.stages, START + second)
            self.hang = self.watch.look((0, 0), self.n_ranks, START + second)
            took_s = time.process_time() - began
            self.busy_s += took_s
            self.longest_s = max(self.longest_s, took_s)
            if self.hang is not None:
                return

    def report(self, node: int, second: int) -> bytes:
        """What a node agent sends, as it travels."""
        address = node_name(node)
        ranks = range(node * self.n_gpus, (node + 1) * self.n_gpus)
        signals = tuple(
            Signal(
                START + second,
                "gpu_health",
                "temperature",
                Entity(EntityKind.GPU, f"GPU-{rank}", address),
                81.0,
                "temperature 81 C, slowdown at 87 C",
            )
            for rank in ranks
        )
        boxes = tuple(self.box(rank, second) for rank in ranks)
        return pickle.dumps(NodeReport(0, address, boxes, signals), protocol=5)

    def box(self, rank: int, second: int) -> tuple[BoxReading, float]:
        """A rank's box at a simulated second, and its age."""
        moment = min(float(second), self.hang_at)
        step = int(moment // STEP_S)
        began_at = step * STEP_S
        steps = PhaseSums(max(0, step - 1), STEP_S, 1.1 * STEP_S, STEP_S * max(0, step - 1))
        sums = tuple(steps if phase is Phase.STEP else PhaseSums(1, 30.0, 30.0, 30.0) for phase in Phase)
        is_stuck = second > self.hang_at
        reading = BoxReading(
            identity=Identity(0, 0, rank, 1000 + rank, "00000000-0000-0000-0000-000000000001"),
            sequence=4 * step,
            phase=Phase.STEP,
            entered_at_mono_s=began_at,
            entered_at=START + began_at,
            written_at_mono_s=began_at,
            step=step,
            micro_batch=3,
            collective=100 * step,
            sample_ordinal=4096 * step,
            loss=2.0,
            has_ended=False,
            is_waiting=rank != self.hang_rank if is_stuck else None,
            first_step_s=60.0 if step else float("nan"),
            sums=sums,
        )
        return reading, second - began_at


def node_name(node: int) -> str:
    return f"10.{node // 65536}.{node // 256 % 256}.{node % 256}"


def peak_bytes() -> int:
    """Of this process since it became this program; getrusage also counts what its parent was at the fork."""
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


def calm(args: argparse.Namespace, windows: int) -> dict[str, float]:
    fleet = Fleet(args.nodes, args.gpus, args.every)
    fleet.run(0, 2 * args.every)  # until everything is known and learned
    fleet.longest_s = 0.0
    fracs = []
    for window in range(2, 2 + windows):
        fleet.busy_s = 0.0
        fleet.run(window * args.every, (window + 1) * args.every)
        assert fleet.hang is None, fleet.hang
        fracs.append(fleet.busy_s / args.every)
    peak = peak_bytes()
    middle, least = harness.median(fracs), min(fracs)
    return {"core_frac": middle, "core_frac_min": least, "longest_s": fleet.longest_s, "peak_bytes": peak}


def hang(args: argparse.Namespace) -> dict[str, float]:
    culprit = args.nodes * args.gpus // 3
    hang_at = 2 * args.every + 1.0
    fleet = Fleet(args.nodes, args.gpus, args.every, culprit, hang_at)
    fleet.run(0, 20 * args.every)
    found = fleet.hang
    assert found is not None, "the hang was not seen"
    began = time.process_time()
    nodes = {rank: node_name(rank // args.gpus) for rank in range(fleet.n_ranks)}
    incident = hang_incident(found, (), None, {}, nodes)
    decision = decide(incident, [], ResilienceSection(), shells_alive=True)
    decided_s = time.process_time() - began
    assert found.culprits == (culprit,), found.reason[:500]
    assert decision.action is Action.RESTART_RANKS, decision
    behind_s = found.at - (found.since + found.limit_s) + fleet.longest_s + decided_s
    return {"after_s": found.at - START - hang_at, "limit_s": found.limit_s, "behind_s": behind_s}


def storm(args: argparse.Namespace) -> dict[str, float]:
    """Rank 5's GPU falls off the bus; all others lose their peer, and every node complains of its network."""
    n_ranks = args.nodes * args.gpus
    exits = [
        RankExit(
            rank=rank,
            node=node_name(rank // args.gpus),
            at=START + 100 + rank / n_ranks,
            exit_code=1,
            error_type="torch.distributed.DistBackendError",
            error_text="NCCL communicator was aborted: remote process exited or there was a network error",
            traceback="Traceback (most recent call last): ...\n" * 20,
            from_communication=True,
        )
        for rank in range(n_ranks)
    ]
    watch = Watch()
    for place in range(20_000):
        node = place % args.nodes
        text = f"mlx5_core 0000:{node % 256:02x}:00.0: temperature warning, module {place}"
        entity = Entity(EntityKind.NODE, node_name(node))
        watch.add_signals([Signal(START + 60 + place / 1000, "kernel_log", "line", entity, None, text)])
    fallen = "NVRM: Xid (PCI:0000:18:00): 79, pid=4711, name=python3, GPU has fallen off the bus."
    at = Entity(EntityKind.NODE, node_name(0))
    watch.add_signals([Signal(START + 99.5, "kernel_log", "line", at, None, fallen)])
    began = time.process_time()
    incident = diagnose(exits, 50, START + 101)
    incident = join_signals(incident, exits, watch.signals_since(incident.failed_at - 60))
    decision = decide(
        incident,
        [],
        ResilienceSection(),
        shells_alive=True,
        available=TODAYS_ACTIONS | {Action.RESTART_WITHOUT_NODE},
        situation=Situation(cluster=Cluster(args.nodes), nodes=frozenset({node_name(0), node_name(1)})),
    )
    decided_s = time.process_time() - began
    assert incident.failure_class == "gpu_hardware", incident
    assert decision.action is Action.RESTART_WITHOUT_NODE, decision
    assert decision.exclude == (node_name(0),), decision
    return {"decided_s": decided_s}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--every", type=int, default=10, help="seconds between two reports of a node")
    args = parser.parse_args()
    quiet, stuck, stormy = calm(args, windows=2 if args.quick else 6), hang(args), storm(args)
    harness.print_table(
        [
            ("scene", "measured", "goal"),
            (
                "calm: of one core",
                f"{quiet['core_frac']:.1%} (least {quiet['core_frac_min']:.1%})",
                f"{GOAL_CORE_FRAC:.0%}",
            ),
            ("calm: longest second", f"{quiet['longest_s']:.3f} s", ""),
            ("calm: memory", f"{quiet['peak_bytes'] / 2**20:.0f} MiB", f"{GOAL_BYTES / 2**20:.0f} MiB"),
            ("hang: verdict behind", f"{stuck['behind_s']:.2f} s", f"{GOAL_BEHIND_S:g} s"),
            ("hang: after it stopped", f"{stuck['after_s']:.1f} s (limit {stuck['limit_s']:.1f} s)", ""),
            ("storm: to the decision", f"{stormy['decided_s']:.2f} s", f"{GOAL_BEHIND_S:g} s"),
        ]
    )
    ranks = {"nodes": args.nodes, "gpus": args.gpus, "every_s": args.every}
    harness.print_json("scale", GOAL_CORE_FRAC, {**ranks, **quiet, **stuck, **stormy})


if __name__ == "__main__":
    main()
