"""Ray's TorchTrainer without what Packtrain does itself or does not use.

Importing it imports torch, which takes seconds.
"""

from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from service.controllers import Controllers


class BareTrainer(TorchTrainer):
    """A TorchTrainer that leaves its placement group to its caller and serves no Ray datasets.

    Ray's cleaner of placement groups asks any cluster that it finds on its machine whether the controller
    lives. Beside another cluster it asks the wrong one, hears of no such controller, and takes the workers
    away from a healthy run. What a dead controller leaves behind is given back by
    cluster.release_placement_groups. For datasets Ray would run one more actor beside the ranks, which read
    their own shards. Its controller is one of controllers.py.
    """

    title: str
    """Of the controller's process."""
    controllers: Controllers

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        return self.controllers.run(self.title, settings)

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]
        unwanted = (PlacementGroupCleanerCallback, DatasetsCallback)
        return [callback for callback in callbacks if not isinstance(callback, unwanted)]
