"""The only file that reads or writes the process environment."""

import os
from pathlib import Path


def get_env(name: str) -> str | None:
    """Value of one variable, None where it is not set."""
    return os.environ.get(name)


def set_env(name: str, value: str) -> None:
    """Set one variable for this process and its children."""
    os.environ[name] = value


def kernel_log_path() -> Path:
    """This node's kernel log: PACKTRAIN_KERNEL_LOG where the node sets it, else /dev/kmsg."""
    return Path(os.environ.get("PACKTRAIN_KERNEL_LOG") or "/dev/kmsg")


def health_lines_path() -> Path | None:
    """PACKTRAIN_HEALTH_LINES: a file to which this node's own health checks write JSON lines, if any."""
    named = os.environ.get("PACKTRAIN_HEALTH_LINES")
    return Path(named) if named else None


def environment(**changes: str) -> dict[str, str]:
    """A copy of the environment with changes, for a child process."""
    return {**os.environ, **changes}


def visible_devices() -> dict[str, str]:
    """The variables by which Ray tells a worker its devices."""
    return {name: value for name, value in os.environ.items() if name.endswith("_VISIBLE_DEVICES")}


def prepare_ray_environment() -> None:
    """Set what Ray must find explicitly before it is imported or started.

    RAY_AUTH_MODE decides who may join: left unset, Ray's parts guess differently and nodes fail to join. A
    value of the user's wins; without one, `token` where this user has a token already, else `disabled` (an
    embedded cluster listens on loopback only).
    """
    if "RAY_AUTH_MODE" not in os.environ:
        has_token = "RAY_AUTH_TOKEN" in os.environ or (Path.home() / ".ray" / "auth_token").exists()
        os.environ["RAY_AUTH_MODE"] = "token" if has_token else "disabled"
    for name, value in RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)


RAY_DEFAULTS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Defaults for Ray, each overridable by the user's environment; nothing is sent to Ray's usage statistics.

Nodes that are announced to go are the supervisor's affair (node_watch.py), not that of Ray's watcher.
"""

EMBEDDED_DEFAULTS = {
    "RAY_enable_metrics_collection": "false",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "false",
}
"""What only a cluster of our own wants, each overridable as well.

Its processes share the cores with the ranks, and nobody reads these: figures for a dashboard that does not
run. With Ray's watcher for preemptions they cost a third of the CPU time that Ray takes beside a step.
"""


def prepare_embedded_cluster() -> None:
    """Set EMBEDDED_DEFAULTS; call it before that cluster starts.

    Ray starts its workers with niceness 15. A shell gives its rank the node's own priority back, which only
    a privileged user may do: for others Ray must not take it away.
    """
    for name, value in EMBEDDED_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if os.geteuid() != 0:
        os.environ.setdefault("RAY_worker_niceness", "0")


def is_inside_ray_job() -> bool:
    """This process is the entry point of a Ray job: its working directory is a copy that Ray deletes."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


RANK_MEMORY = ":".join(
    (
        "glibc.cpu.x86_non_temporal_threshold=3145728",
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_threshold=33554432",
        "glibc.malloc.trim_threshold=1073741824",
    )
)
"""GLIBC_TUNABLES of rank processes; glibc reads them when a process starts.

Copies of 3 MiB and more (a checkpoint to its buffer) go past the cache: a save blocks training for less time
then. Blocks below 32 MiB (the largest value) come from the heap, and it keeps up to 1 GiB that is free:
otherwise a step's large tensors are given back to the kernel and their pages cleared anew, step after step.
The heap asks for huge pages: fewer misses of the TLB.
"""
