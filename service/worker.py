"""The shell: runs inside a Ray Train worker, forks a rank, watches it, obeys orders.

    shell_main
      start the fork server (imports torch while Ray sets up the rest)
      join the coordinator, then for each order:
        start      fork a rank process
        store      tell the rank where its generation meets
        fault      fail on purpose, in a drill
        witness    have the hung rank write its flight recorder, and take its stacks
        kill       SIGKILL the rank (it may hang in a collective of a dead peer)
        terminate  SIGTERM the rank: save and leave
        end        kill what is left, return; the fork server waits where another attempt follows
      every exit of a rank is reported with its exit code and its own words

The shell outlives its rank: it sees exit codes and signals that Ray cannot report, and a crashed rank
costs a fork, not a new actor. Only the shell talks to Ray; a rank knows nothing of it. Holds no tensors,
imports no torch.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.train
from ray.train.backend import BackendConfig

from jobs.spec.job import JobSpec
from ops.diagnosis.rank_exits import RankExit
from service.drill import write_xid
from service.env import RANK_MEMORY, environment, get_env, kernel_log_path, visible_devices
from service.evidence import incident_folder
from service.fork_client import ForkServer, RankMessage
from service.lifetime import end_with_raylet
from service.orders import Order, ShellInfo
from service.origin import find_source_root
from service.rank_box import box_folder, remove_box, remove_old_boxes
from service.rank_process import RankRequest
from service.run_store import log_path, read_spec
from service.titles import keep_title
from service.warm_servers import Warm, warm_key
from service.witness import dump_path, groups_path, take_testimony


@dataclass(frozen=True)
class ShellConfig:
    """What the launcher tells every shell."""

    run_dir: str
    data_dir: str
    attempt: int
    coordinator: str
    """Name of the coordinator actor."""
    namespace: str
    preload: tuple[str, ...]
    code_dir: str
    """Folder that holds jobs, ops and service, for processes that Ray does not start; empty: this
    process's own."""
    token: str
    """What control/token in the run folder holds: a node that reads something else does not share the
    storage."""


@dataclass
class ShellBackend(BackendConfig):
    """Sets up no process group in the worker actors: groups are the ranks' own.

    TorchConfig would have every shell import torch and form a group that no rank uses.
    """

    backend: str = "shell"


def shell_main(config: dict[str, Any]) -> None:
    """Entry of a Ray Train worker (train_loop_per_worker)."""
    end_with_raylet()
    settings = ShellConfig(**{**config, "preload": tuple(config["preload"])})
    context = ray.train.get_context()
    place = _Place(
        rank=context.get_world_rank(),
        local_rank=context.get_local_rank(),
        node_rank=context.get_node_rank(),
        world_size=context.get_world_size(),
        local_world_size=context.get_local_world_size(),
        node=ray.util.get_node_ip_address(),
        node_id=ray.get_runtime_context().get_node_id(),
    )
    coordinator = ray.get_actor(settings.coordinator, namespace=settings.namespace)
    info = ShellInfo(
        place.rank, place.node, place.node_id, psutil.Process().pid, sees_storage=sees_storage(settings)
    )
    if not info.sees_storage:
        ray.get(coordinator.join.remote(settings.attempt, info))
        return
    _Shell(settings, place, coordinator).run(info)


def sees_storage(config: ShellConfig, tries: int = 20) -> bool:
    """The driver's token can be read back here; waits a little, since network file systems may lag."""
    path = Path(config.run_dir) / "control" / "token"
    for _ in range(tries):
        with contextlib.suppress(OSError):
            if path.read_text() == config.token:
                return True
        time.sleep(0.25)
    return False


@dataclass(frozen=True)
class _Place:
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    node: str
    node_id: str


class _Shell:
    def __init__(self, config: ShellConfig, place: _Place, coordinator: Any) -> None:
        self._config = config
        self._code_dir = config.code_dir or str(find_source_root())
        self._place = place
        self._run_dir = Path(config.run_dir)
        self._spec: JobSpec = read_spec(self._run_dir, config.attempt)
        self._coordinator = coordinator
        self._box_dir = box_folder(self._run_dir.name, place.node_id)
        remove_old_boxes(self._box_dir.parent, time.time())
        self._server = self._start_server()
        self._inbox: deque[Order] = deque()
        self._wake_up, self._waker = socket.socketpair()
        self._server.watch(self._wake_up)
        self._generation = -1
        self._has_rank = False
        """A rank was asked for and its exit has not been reported."""
        self._is_doomed = False
        self._is_followed = False
        """Another attempt begins after this one."""
        self._last_words: dict[str, Any] = {}

    def run(self, info: ShellInfo) -> None:
        """Obey orders until the last one."""
        keep_title(f"packtrain[{self._run_dir.name}] shell of rank {self._place.rank}")
        stage = self._spec.strategy.mesh.coordinates(self._place.rank)["pp"]
        ray.get(self._coordinator.join.remote(self._config.attempt, replace(info, stage=stage)))
        threading.Thread(target=self._listen, name="orders", daemon=True).start()
        try:
            while self._obey_orders():
                for message in self._server.wait():
                    self._on_message(message)
        finally:
            self._server.close(keep_warm=self._is_followed)
            remove_box(self._box_dir, self._place.rank)

    def _listen(self) -> None:
        """Long-poll the coordinator for orders (a thread: everything else happens in `run`'s)."""
        seen = 0
        while True:
            try:
                orders = ray.get(self._coordinator.orders.remote(self._config.attempt, seen))
            except ray.exceptions.RayError:
                # Nobody is left to give orders; a new coordinator may come, with a new attempt.
                orders = [Order("end", -1, is_followed=True)]
            seen += len(orders)
            self._inbox.extend(orders)
            with contextlib.suppress(OSError):
                self._waker.send(b"x")
            if any(order.kind == "end" for order in orders):
                return

    def _obey_orders(self) -> bool:
        """Carry out the orders that have come; False after the last one."""
        while self._inbox:
            order = self._inbox.popleft()
            match order.kind:
                case "start":
                    self._fork(order)
                case "store" if order.address is not None:
                    self._server.tell_rank(
                        {"event": "store", "host": order.address[0], "port": order.address[1]}
                    )
                case "witness":
                    self._witness()
                case "fault" if order.rank == self._place.rank:
                    self._fail(order.fault)
                case "kill":
                    self._kill()
                case "terminate":
                    self._server.tell_rank({"event": "terminate"})
                case "end":
                    self._is_followed = order.is_followed
                    return False
        return True

    def _fork(self, order: Order) -> None:
        self._generation = order.generation
        self._has_rank = True
        self._is_doomed = False
        self._last_words = {}
        place = self._place
        request = RankRequest(
            run_dir=self._config.run_dir,
            data_dir=self._config.data_dir,
            attempt=self._config.attempt,
            generation=order.generation,
            rank=place.rank,
            local_rank=place.local_rank,
            node_rank=place.node_rank,
            world_size=place.world_size,
            local_world_size=place.local_world_size,
            node=place.node,
            log_path=str(log_path(self._run_dir, self._config.attempt, place.rank)),
            box_dir=str(self._box_dir),
            restore_before=order.start.restore_before,
            skip_samples=order.start.skip_samples,
        )
        try:
            self._server.fork(request)
        except OSError:
            self._on_message(RankMessage("lost"))

    def _witness(self) -> None:
        """Have the rank write its flight recorder and take its stacks, in a thread: orders go on."""
        rank, generation = self._place.rank, self._generation
        folder = incident_folder(self._run_dir, self._config.attempt, generation)
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        paths = {"path": str(dump_path(folder, rank)), "groups_path": str(groups_path(folder, rank))}
        self._server.tell_rank({"event": "dump", **paths})
        pid = self._server.rank_pid

        def tell() -> None:
            found = take_testimony(rank, pid, folder)
            self._tell("report_testimony", self._config.attempt, generation, found)

        threading.Thread(target=tell, name="witness", daemon=True).start()

    def _fail(self, fault: str) -> None:
        """A drill: this rank, or this shell, has a fault on purpose."""
        match fault:
            case "stop":
                self._server.signal_rank(signal.SIGSTOP)
            case "kill":
                self._server.signal_rank(signal.SIGKILL)
            case "kill-shell":
                os.kill(os.getpid(), signal.SIGKILL)
            case "xid":
                write_xid(kernel_log_path())
                self._server.signal_rank(signal.SIGKILL)
            case _:
                self._server.tell_rank({"event": "fault", "fault": fault})

    def _kill(self) -> None:
        self._is_doomed = True  # a rank that is only being forked is killed when its pid is known
        self._server.signal_rank(signal.SIGKILL)

    def _on_message(self, message: RankMessage) -> None:
        attempt, rank = self._config.attempt, self._place.rank
        match message.event:
            case "forked":
                if self._is_doomed:
                    self._server.signal_rank(signal.SIGKILL)
                self._tell("report_forked", attempt, self._generation, rank, message.fields["pid"])
            case "store":
                self._tell(
                    "report_store", attempt, self._generation, self._place.node, message.fields["port"]
                )
            case "signal":
                self._tell("report_signal", attempt, self._generation, dict(message.fields))
            case "outcome" | "error":
                self._last_words = dict(message.fields)
            case "exited":
                self._report_exit(message.fields["exit_code"])
            case "lost":
                # The server was killed, and the kernel killed its rank: a new server, then the same report.
                self._server.close()
                self._server = self._start_server()
                self._server.watch(self._wake_up)
                if self._has_rank:
                    self._report_exit(-signal.SIGKILL)

    def _report_exit(self, exit_code: int) -> None:
        self._has_rank = False
        words = self._last_words
        report = RankExit(
            rank=self._place.rank,
            node=self._place.node,
            at=time.time(),
            exit_code=exit_code,
            error_type=words.get("error_type", ""),
            error_text=words.get("error_text", ""),
            traceback=words.get("traceback", ""),
            failure_class=words.get("failure_class", ""),
            from_communication=words.get("from_communication", False),
        )
        self._tell("report_exit", self._config.attempt, self._generation, report, words.get("outcome", ""))

    def _tell(self, method: str, *arguments: Any) -> None:
        """Fire and forget: Ray delivers one caller's calls to an actor in order."""
        getattr(self._coordinator, method).remote(*arguments)

    def _start_server(self) -> ForkServer:
        values = {
            "OMP_NUM_THREADS": str(self._spec.resources.threads_per_rank),
            "GLIBC_TUNABLES": get_env("GLIBC_TUNABLES") or RANK_MEMORY,
            "OPENBLAS_NUM_THREADS": "1",  # numpy's own threads would start at import, before the fork
            "LOCAL_RANK": str(self._place.local_rank),
            "PYTHONPATH": ":".join(filter(None, (self._code_dir, get_env("PYTHONPATH")))),
            **_socket_interface(self._place.node),
            **self._spec.resources.env,
        }
        log = (
            self._run_dir
            / "logs"
            / f"attempt-{self._config.attempt:03d}"
            / f"forkserver-{self._place.rank:05d}.log"
        )
        # Ray lowers its workers' priority; a rank gets its raylet's, as it would have under another launcher.
        niceness = os.getpriority(os.PRIO_PROCESS, os.getppid())
        preload = self._config.preload
        # By the token one driver's servers are told from another's, whose code may be another.
        wanted = {**values, **visible_devices(), "driver": self._config.token}
        key = warm_key(self._run_dir.name, self._place.node_id, wanted, preload)
        raylet_pid = get_env("RAY_RAYLET_PID")
        warm = Warm(str(self._box_dir.parent), key, int(raylet_pid) if raylet_pid else None)
        return ForkServer(preload, environment(**values), Path(self._code_dir), log, niceness, warm)


def _socket_interface(node_ip: str) -> dict[str, str]:
    """Interface that holds the address Ray knows this node by; the node's own setting wins.

    Without it gloo takes the address that the host name resolves to, which on many machines is another one.
    """
    found = next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(a.address == node_ip for a in addresses)
        ),
        None,
    )
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: get_env(name) or found for name in names if get_env(name) or found}  # type: ignore[misc]
