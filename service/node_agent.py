"""The node agent: a Ray actor on each node of an attempt that reads what only that node can see.

    black boxes of the run's ranks  --+
    monitors, each at its interval  --+--> NodeReport, in intervals --> Coordinator

It takes no CPU from the ranks' share and none of its failures reaches them: an agent that dies is started
again by Ray, and ranks do not know of it. It judges nothing. `start_agents` is the driver's.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from ops.black_box import BlackBoxError, BoxReading, read_box
from ops.signal import Signal
from service.env import health_lines_path, kernel_log_path
from service.lifetime import end_with_raylet
from service.monitor_runner import MonitorRunner
from service.node_monitors import node_monitors
from service.rank_box import box_folder
from service.watch import NodeReport, report_interval_s

URGENT_LIMIT_S = 0.5
"""For the monitors that may know why ranks have died: a restart waits for them."""
START_AFTER_S = 1.5
"""After the shells have joined."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentConfig:
    """What an agent is told."""

    run_dir: str
    attempt: int
    coordinator: str
    """Name of the coordinator actor."""
    namespace: str
    report_every_s: float = 1.0


class NodeAgent:
    """The actor's class."""

    def __init__(self, config: AgentConfig) -> None:
        """Begin to report; a restarted agent takes the same way."""
        end_with_raylet()
        context = ray.get_runtime_context()
        run_dir = Path(config.run_dir)
        # Ray lowers its workers' priority. Ranks that spin would keep an agent behind them from telling that
        # they hang, so it gets its raylet's; it takes next to nothing of the processor.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        self._config = config
        self._node = ray.util.get_node_ip_address()
        self._boxes = BoxReader(box_folder(run_dir.name, context.get_node_id()))
        monitors = node_monitors(
            self._node, run_dir.parent, self._boxes.rank_of_pid, kernel_log_path(), health_lines_path()
        )
        # Threads of their own: what hangs when a GPU is lost must not keep the kernel's word on it back.
        self._urgent = MonitorRunner([one for one in monitors if one.is_urgent])
        self._others = MonitorRunner([one for one in monitors if not one.is_urgent])
        self._lock = threading.Lock()
        # Before it joins: what is written from then on is new to the monitors, and is told.
        early = self._urgent.ask_urgent(URGENT_LIMIT_S)
        self._coordinator = ray.get_actor(config.coordinator, namespace=config.namespace)
        self._coordinator.join_agent.remote(config.attempt, context.get_node_id(), context.current_actor)
        threading.Thread(target=self._report_on, args=(early,), name="reports", daemon=True).start()

    def check_urgent(self) -> list[Signal]:
        """What the monitors that may know why ranks have died say now."""
        with self._lock:
            return self._urgent.ask_urgent(URGENT_LIMIT_S)

    def _report_on(self, signals: list[Signal]) -> None:
        while True:
            due_at_mono_s = time.monotonic() + self._config.report_every_s
            try:
                with self._lock:
                    signals += [*self._urgent.turn(), *self._others.turn()]
                    switched_off = [*self._urgent.switched_off(), *self._others.switched_off()]
                report = NodeReport(
                    self._config.attempt,
                    self._node,
                    self._boxes.read(),
                    tuple(signals),
                    tuple(switched_off),
                )
                self._coordinator.report_node.remote(report)
                signals = []
            except Exception:  # of whatever kind: the next second may be better, and nobody else looks here
                _LOG.exception("no report of node %s", self._node)
            time.sleep(max(0.0, due_at_mono_s - time.monotonic()))


class BoxReader:
    """Reads the boxes of one run on this node."""

    def __init__(self, folder: Path) -> None:
        """Reads nothing yet; the folder may come later.

        Args:
            folder: of the boxes.
        """
        self._folder = folder
        self._pids: dict[int, int] = {}

    def read(self) -> tuple[tuple[BoxReading, float], ...]:
        """Every box, with the seconds that its rank has been in its phase. What is no box is left out."""
        found = []
        for path in sorted(self._folder.glob("rank-*.box")):
            with contextlib.suppress(OSError, BlackBoxError):
                box = read_box(path)
                found.append((box, box.age_s(time.monotonic())))
        self._pids = {box.identity.pid: box.identity.rank for box, _ in found}
        return tuple(found)

    def rank_of_pid(self) -> dict[int, int]:
        """Process id -> rank, as of the last reading."""
        return self._pids


@contextlib.contextmanager
def start_agents(coordinator: Any, config: AgentConfig) -> Iterator[None]:
    """Agents on the nodes of an attempt, for the length of a with-block.

    They start a little after the attempt's shells have joined: the first step comes first. Ray starts one
    that has died again, on its node.

    Args:
        coordinator: the run's.
        config: for all of them.
    """
    agents: list[Any] = []
    is_over = threading.Event()
    lock = threading.Lock()

    def start() -> None:
        try:
            nodes = ray.get(coordinator.nodes.remote(config.attempt))
        except ray.exceptions.RayError:
            return  # without a coordinator the attempt ends
        if is_over.wait(START_AFTER_S):
            return
        own = replace(config, report_every_s=report_interval_s(len(nodes)))
        for node_id in nodes:
            with lock:
                if is_over.is_set():
                    return
                agents.append(_start_agent(node_id, own))

    threading.Thread(target=start, name="agents", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        with lock:
            for agent in agents:
                with contextlib.suppress(ray.exceptions.RayError, RuntimeError):  # Ray itself may be gone
                    ray.kill(agent)


def _start_agent(node_id: str, config: AgentConfig) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return (
        ray.remote(NodeAgent)
        .options(num_cpus=0, max_restarts=-1, max_concurrency=2, scheduling_strategy=there)
        .remote(config)
    )
