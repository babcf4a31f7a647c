"""Which engine executes a run. Imports an engine only when the spec asks for it.

Which layouts fit a run is decided in jobs/planner/legality.py, not here.
"""

from typing import assert_never

import torch

from jobs.comm.groups import Groups
from jobs.engines.base import Engine
from jobs.engines.native import NativeEngine
from jobs.planner.legality import refusal_text
from jobs.spec.job import JobSpec
from jobs.spec.strategy import DeepspeedPipelineStrategy, DeepspeedZeroStrategy, NativeStrategy


def build_engine(spec: JobSpec, groups: Groups, device: torch.device) -> Engine:
    """The engine of spec.strategy, with start weights by name and seed. Collective over all ranks.

    Args:
        spec: the run.
        groups: this rank's groups; their mesh is the spec's.
        device: this rank's device.

    Raises:
        ValueError: the layout is not legal for this run, or the groups are of another size.
    """
    if groups.world_size != spec.world_size:
        raise ValueError(f"the spec asks for {spec.world_size} ranks, the groups hold {groups.world_size}")
    refused = refusal_text(spec)
    if refused is not None:
        raise ValueError(refused)
    match spec.strategy:
        case NativeStrategy():
            return NativeEngine(spec, groups, device)
        case DeepspeedZeroStrategy():
            from jobs.engines.deepspeed_zero import DeepspeedZeroEngine

            return DeepspeedZeroEngine(spec, groups, device)
        case DeepspeedPipelineStrategy():
            from jobs.engines.deepspeed_pipeline import DeepspeedPipelineEngine

            return DeepspeedPipelineEngine(spec, groups, device)
    assert_never(spec.strategy)
