"""Where a run's code and machine come from: git state, versions, host. Looks, and changes nothing."""

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("packtrain", "torch", "ray", "deepspeed", "mlflow", "numpy", "tokenizers")
GIT_LIMIT_S = 5.0


def collect_environment(source_dir: Path) -> dict[str, Any]:
    """What the driver's side of a run looks like, as plain values; what cannot be found is left out.

    Args:
        source_dir: the folder whose git state counts.
    """
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "versions": _versions(),
    }
    git = git_state(source_dir)
    return {**found, "git": git} if git else found


def git_state(folder: Path) -> dict[str, Any]:
    """Commit, branch and whether anything tracked differs from the commit; empty outside a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "branch": branch or "", "is_dirty": bool(changes)}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=GIT_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
