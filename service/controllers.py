"""Ray Train's controllers: one for the attempt that runs, and one that waits with everything imported.

    run()   the attempt's controller, which starts its workers
            meanwhile a standby: the next attempt need not wait for a process and its imports

Imports no torch: so does none of these processes.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import ray
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray.train.v2._internal.constants import (
    DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE,
    get_env_vars_to_propagate,
)
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import state, worker_group

from ops.quarantine import NODE_ID_LABEL
from service.lifetime import end_with_raylet
from service.titles import keep_title

STANDBY_AFTER_S = 20.0
"""After the start of an attempt: until then its own processes start."""
READY_LIMIT_S = 5.0


class Controllers:
    """The controllers of one run, on the driver's node."""

    def __init__(self) -> None:
        """Starts nothing."""
        self._standby: Any = None

    def run(self, title: str, settings: Mapping[str, Any]) -> Any:
        """Run one attempt's controller to its end. Blocks.

        Args:
            title: of its process.
            settings: arguments of Ray's TrainController.

        Returns:
            Its ray.train.Result.

        Raises:
            ray.exceptions.RayError: the controller was lost.
        """
        ended = self._take().run.remote(title, dict(settings))
        if not ray.wait([ended], timeout=STANDBY_AFTER_S)[0]:
            with contextlib.suppress(Exception):  # of Ray; the attempt goes on, the next starts its own
                self._standby = _start()
        return ray.get(ended)

    def _take(self) -> Any:
        waiting, self._standby = self._standby, None
        if waiting is not None:
            with contextlib.suppress(ray.exceptions.RayError):  # killed, or it still starts
                ray.get(waiting.is_ready.remote(), timeout=READY_LIMIT_S)
                return waiting
        return _start()


class AttemptController:
    """The actor's class: Ray's controller, once it is told for what."""

    def __init__(self) -> None:
        """Tie this process to its node."""
        end_with_raylet()

    async def is_ready(self) -> None:
        """Answers when everything is imported."""

    async def run(self, title: str, settings: dict[str, Any]) -> Any:
        """Run the controller; see Controllers.run."""
        keep_title(title)
        _do_without_synchronization()
        controller = TrainController(**settings)
        await controller.run()
        return controller.get_result()


def _start() -> Any:
    variables = get_env_vars_to_propagate()
    variables.setdefault(
        RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR, DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE
    )
    here = {NODE_ID_LABEL: ray.get_runtime_context().get_node_id()}
    actor = ray.remote(AttemptController)
    return actor.options(num_cpus=0, label_selector=here, runtime_env={"env_vars": variables}).remote()


class _Nobody:
    """Stands for Ray's SynchronizationActor, whose process would share the cores with the ranks.

    Workers meet there in ray.train.report and in Ray Train's collectives: shells use neither.
    """

    @classmethod
    def options(cls, **options: Any) -> type["_Nobody"]:
        """As an actor class has it."""
        return cls

    @classmethod
    def remote(cls, **arguments: Any) -> str:
        """No actor, but something: Ray sees whether there is one."""
        return "nobody"


def _do_without_synchronization() -> None:
    """In this process, which has one attempt and no other."""
    group: Any = worker_group
    group.SynchronizationActor = _Nobody
    of_group: Any = state
    of_group._shutdown_sync_actor = lambda actor: None
