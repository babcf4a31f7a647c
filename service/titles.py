"""Titles of Ray's worker processes."""

from typing import Any

import ray


def keep_title(title: str) -> None:
    """Name this Ray worker for good: Ray puts its own title back after each call of the actor's.

    By Ray's own function, since setproctitle's finds no room for a title once Ray has written one.
    """
    raylet: Any = ray._raylet
    raylet.setproctitle(title)
    raylet.setproctitle = lambda other: None
