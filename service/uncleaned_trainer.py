"""Ray's TorchTrainer without its placement group cleaner. Importing it imports torch, which takes seconds."""

from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback


class UncleanedTrainer(TorchTrainer):
    """A TorchTrainer that leaves its placement group to its caller.

    Ray's cleaner asks any cluster that it finds on its machine whether the controller lives. Beside another
    cluster it asks the wrong one, hears of no such controller, and takes the workers away from a healthy run.
    What a dead controller leaves behind is given back by cluster.release_placement_groups.
    """

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]
        return [callback for callback in callbacks if not isinstance(callback, PlacementGroupCleanerCallback)]
