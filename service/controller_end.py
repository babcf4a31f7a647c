"""What runs in Ray Train's controller process. Apart from bare_trainer.py, since that imports torch."""

from typing import Any

from ray.train.v2._internal.execution.callback import ControllerCallback

from service.lifetime import end_with_raylet


class EndWithRaylet(ControllerCallback):
    """The controller leaves nothing behind when the cluster goes."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Tie this process to its node."""
        end_with_raylet()
