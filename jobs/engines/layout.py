"""How this rank computes under its layout: the operations of each parallelism, one put over the other.

    one device -> tensor -> fp8 products -> context -> experts -> recomputation

Each of them replaces some of the functions in Operations and calls those below for the rest; over one rank it
replaces none. Shared by all engines; holds no state of any.
"""

from collections.abc import Sequence

import torch

from jobs.comm.groups import Groups
from jobs.models.operations import Operations
from jobs.parallel.context import context_operations
from jobs.parallel.expert import expert_operations
from jobs.parallel.float8 import float8_operations, fp8_refusal
from jobs.parallel.recompute import recompute_operations
from jobs.parallel.tensor import tensor_operations
from jobs.spec.job import JobSpec
from jobs.spec.strategy import DeepspeedPipelineStrategy, Recompute


def operations_for(spec: JobSpec, groups: Groups, device: torch.device, stage: int = 0) -> Operations:
    """The operations of one pipeline stage. Local.

    Args:
        spec: the run.
        groups: this rank's groups.
        device: this rank's device.
        stage: index of the stage, for recomputation by stage.

    Raises:
        ValueError: fp8 on a device that has none.
    """
    operations = Operations()
    strategy = spec.strategy
    if not isinstance(strategy, DeepspeedPipelineStrategy):
        operations = tensor_operations(operations, groups.tp, strategy.sequence_parallel)
        if spec.train.precision == "fp8":
            refusal = fp8_refusal(device)
            if refusal is not None:
                raise ValueError(refusal)
            operations = float8_operations(operations, groups.tp, strategy.sequence_parallel)
        operations = context_operations(operations, strategy.context_method, groups.cp, spec.data.seq_len)
        operations = expert_operations(operations, spec, groups)
    return recompute_operations(operations, _of_stage(strategy.recompute, stage))


def _of_stage(recompute: Recompute | Sequence[Recompute], stage: int) -> Recompute:
    return recompute if isinstance(recompute, str) else recompute[stage]
