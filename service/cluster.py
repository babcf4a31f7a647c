"""The Ray cluster of a run: joined where one is named, embedded (one node, loopback) where none is."""

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from jobs.errors import PacktrainError
from jobs.spec.job import JobSpec
from service.env import get_env, is_inside_ray_job, prepare_embedded_cluster, prepare_ray_environment
from service.preflight import embedded_cpus

CONNECT_LIMIT_S = 10.0
SERVICE_NICENESS = 10
UNUSED_SERVICES = ("/log_monitor.py", "/monitor.py", "/dashboard.py")


class ClusterError(PacktrainError):
    """The cluster cannot be joined. Never retried."""


@dataclass(frozen=True)
class Capacity:
    """What the live nodes of the cluster have, and what of it is free."""

    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


def connect(spec: JobSpec, address: str | None, code_dir: Path) -> str:
    """Connect this process to Ray; returns the address.

    Args:
        spec: its worker count sizes an embedded cluster (a CPU more than the workers need is no harm there).
        address: `host:port` or "auto"; None takes RAY_ADDRESS (set inside a Ray job), else embeds a cluster.
        code_dir: folder of jobs, ops, service; actors import them from there.

    Raises:
        ClusterError: the cluster at the address cannot be joined.
        SpecError: an embedded cluster would be too large for this machine.
    """
    prepare_ray_environment()
    address = address or get_env("RAY_ADDRESS")
    options: dict[str, Any] = {
        "logging_level": "warning",
        "log_to_driver": False,
        "namespace": "packtrain",
        "include_dashboard": False,
    }
    if address:
        del options["include_dashboard"]
        if not is_inside_ray_job():  # a job's workers have the working directory that the job was sent with
            options["runtime_env"] = {"working_dir": str(code_dir), "excludes": EXCLUDES}
        _refuse_silent(address)
        try:
            ray.init(address=address, **options)
        except (RuntimeError, ConnectionError, ValueError) as error:
            raise connection_error(address, error) from error
        return address
    n_cores = os.cpu_count() or 1
    n_cpus = embedded_cpus(spec, n_cores)
    prepare_embedded_cluster()
    try:
        ray.init(
            address="local",
            num_cpus=n_cpus,
            object_store_memory=200_000_000,
            runtime_env={"env_vars": {"PYTHONPATH": str(code_dir)}},
            **options,
        )
    except Exception as error:  # Ray has no class of its own for a part that does not come up
        raise ClusterError(
            f"Ray did not start on this machine (load average {os.getloadavg()[0]:.0f} on {n_cores} cores): "
            f"{_first_line(error)} Nothing is lost: try again when less runs here, or name a "
            "cluster with --address"
        ) from error
    _step_aside()
    return "local"


def _step_aside() -> None:
    """Put this driver and the services of its own cluster behind the ranks, which use the same cores.

    Not the raylet: Ray's workers, and so the ranks, take their priority from it. What a cluster of one node
    and one driver does not use is ended: the process that carries logs to drivers (this one does not
    listen), the autoscaler's monitor, the dashboard's head that Ray starts without a dashboard.
    """
    own = psutil.Process()
    for process in (own, *own.children()):
        with contextlib.suppress(psutil.Error):
            if process.name() != "raylet":
                process.nice(max(process.nice(), SERVICE_NICENESS))
            if any(word.endswith(UNUSED_SERVICES) for word in process.cmdline()):
                process.kill()  # on SIGTERM one of them prints a traceback


def _refuse_silent(address: str) -> None:
    """Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return  # "auto", or a scheme of Ray's own
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT_S).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"nothing answers at --address {address} ({error}); start a cluster with `ray start --head`, or "
            "leave --address out for an embedded one"
        ) from error


def connection_error(address: str, error: Exception) -> ClusterError:
    """Ray's refusal in one sentence: both sides' versions where they differ, else its own first line."""
    text = str(error)
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if "Version mismatch" in text and len(versions) == 2:
        theirs, ours = (f"Ray {ray_version} and Python {python}" for ray_version, python in versions)
        return ClusterError(
            f"environment mismatch: the cluster at {address} runs {theirs}, this process {ours}; use one "
            "environment for both. Nothing was started, and trying again cannot help"
        )
    return ClusterError(f"no Ray cluster takes us in at {address}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """Of the error's text; its type's name where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


EXCLUDES = [".git", ".venv", "runs", "tests", "docs", "build", "**/__pycache__"]
"""What a working_dir upload leaves out."""


def capacity() -> Capacity:
    """What the cluster has now."""
    total = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    return Capacity(
        cpus=sum(r.get("CPU", 0.0) for r in total),
        gpus=sum(r.get("GPU", 0.0) for r in total),
        free_cpus=free.get("CPU", 0.0),
        free_gpus=free.get("GPU", 0.0),
    )


def is_own_node_alive() -> bool:
    """Ray still works on the node of this process; False also where Ray cannot be asked any more.

    The control store hears of a dead raylet seconds later; its port is closed at once.
    """
    try:
        own = ray.get_runtime_context().get_node_id()
        (node,) = [node for node in ray.nodes() if node["NodeID"] == own and node["Alive"]]
        raylet = (node["NodeManagerAddress"], node["NodeManagerPort"])
        socket.create_connection(raylet, timeout=CONNECT_LIMIT_S).close()
    except Exception:
        return False
    return True


def release_placement_groups() -> int:
    """Give back what earlier attempts of this driver still hold; returns how many groups were removed.

    A Ray Train controller that was killed leaves its placement group behind, and the next attempt would
    wait for those very resources. Ray's own cleaner needs the dashboard's state API, which an embedded
    cluster does not run. The last four bytes of a placement group's id are its job's, so other drivers'
    groups are left alone. Call it between attempts only.
    """
    own_job = ray.get_runtime_context().get_job_id()
    held = [
        group_id
        for group_id, entry in placement_group_table().items()
        if entry["state"] != "REMOVED" and group_id.endswith(own_job)
    ]
    for group_id in held:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
    return len(held)
