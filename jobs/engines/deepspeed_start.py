"""How the DeepSpeed engines start DeepSpeed: no compiler, no print, and the run's own process groups.

The engines hand over a torch optimizer object and no schedule. Holds no step and no state.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from jobs.comm.groups import Axis, Groups, make_group
from jobs.engines.deepspeed_import import import_deepspeed
from jobs.optim.param_groups import is_decayed
from jobs.spec.job import JobSpec
from jobs.spec.optim import OptimSpec

deepspeed = import_deepspeed()

DEEPSPEED_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default of reduce_bucket_size."""
GROUP_MAKER = "new_group"
"""What DeepSpeed makes process groups with, in deepspeed.comm."""


class GroupBook:
    """Answers DeepSpeed's requests for groups: with the run's own where the ranks are the same.

    DeepSpeed's own groups would be second connections between the same ranks, and would have torch's
    default time limit instead of the run's: a rank whose peer has failed would wait half an hour.
    """

    def __init__(self, groups: Groups, timeout_s: float) -> None:
        self._rank = groups.rank
        self._timeout_s = timeout_s
        lines = (groups.world, groups.dp, groups.pp, groups.cp, groups.tp, *groups.sums.values())
        self._known = {line.ranks: line.group for line in lines if line.group is not None}

    def group_of(self, ranks: Sequence[int]) -> Any:
        """What DeepSpeed gets where it asks for a new group. Collective over `ranks`; waits for no others."""
        line = tuple(ranks)
        if self._rank not in line:
            return dist.GroupMember.NON_GROUP_MEMBER
        if line not in self._known:
            self._known[line] = make_group(line, self._timeout_s)
        return self._known[line]

    def of(self, axis: Axis) -> dist.ProcessGroup:
        """The axis' group: a real one for one rank too, where DeepSpeed must not take the whole world."""
        group = self.group_of(axis.ranks)
        assert isinstance(group, dist.ProcessGroup)
        return group


@contextlib.contextmanager
def quiet_start(book: GroupBook, device: torch.device) -> Iterator[None]:
    """Around the construction of DeepSpeed's objects: what they compile, print and make groups of."""
    # Its table of usable compiled ops. Left alone, it is filled by running compilers, and an op found usable
    # is built at run time; a build that is killed leaves a lock that hangs every later rank.
    deepspeed.ops.__compatible_ops__ = {}
    # The bf16 stage 1 optimizer prints memory readings through this, each after a full garbage collection.
    deepspeed.runtime.bf16_optimizer.see_memory_usage = say_nothing
    warnings.filterwarnings(
        "ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    if device.type == "cpu":
        # Stage 3 asks at every gradient reduction, and is answered by a program that lists NUMA nodes.
        deepspeed.get_accelerator().device_count = _one_device
    # An engine leaves its mesh behind in a global, which one without a mesh would take for its own.
    deepspeed.utils.groups.mpu = None
    level, its_own = deepspeed.utils.logger.level, getattr(deepspeed.comm, GROUP_MAKER)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    setattr(deepspeed.comm, GROUP_MAKER, book.group_of)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            # A PipelineModule asks for it before deepspeed.initialize attaches to the process group.
            backend = deepspeed.get_accelerator().communication_backend_name()
            deepspeed.init_distributed(backend, auto_mpi_discovery=False)
            yield
    finally:
        setattr(deepspeed.comm, GROUP_MAKER, its_own)
        deepspeed.utils.logger.setLevel(level)


def initialize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    device: torch.device,
    mpu: Any = None,
) -> Any:
    """deepspeed.initialize, inside quiet_start. Collective over all ranks.

    Args:
        model: the module, or a PipelineModule.
        optimizer: a torch optimizer over its parameters.
        config: DeepSpeed's.
        device: of this rank.
        mpu: which ranks hold other parts of the model; None where there are none, or a PipelineModule knows.
    """
    place = SimpleNamespace(device_rank=device.index or 0)
    engine, zero_optimizer, _, _ = deepspeed.initialize(place, model, optimizer, mpu=mpu, config=config)
    if type(zero_optimizer).__name__ == "DeepSpeedZeroOptimizer":
        # Drop a step whose gradient is not finite in bf16 too: by the norm that step() computes anyway, and
        # not by another pass over the gradients.
        zero_optimizer.check_grad_overflow = True
        zero_optimizer.check_overflow = say_nothing
    return engine


def deepspeed_config(
    spec: JobSpec, stage: int, n_data_ranks: int, zero_options: Mapping[str, bool | int | float]
) -> dict[str, Any]:
    """The configuration that deepspeed.initialize is given. Pure.

    The batch numbers are all given, so DeepSpeed itself checks their product against its ranks.

    Args:
        spec: the run.
        stage: of ZeRO.
        n_data_ranks: ranks with equal pieces, dp x cp: to DeepSpeed they all have samples of their own.
        zero_options: the user's keys of zero_optimization.
    """
    micro, accum = spec.train.micro_batch_size, spec.grad_accum_steps
    # A larger bucket than the model only reserves memory.
    bucket = min(DEEPSPEED_BUCKET_ELEMENTS, spec.model.n_params)
    config: dict[str, Any] = {
        "train_batch_size": micro * accum * n_data_ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accum,
        # At stage 0 DeepSpeed would compute a norm and not tell it, and over a pipeline it would count the
        # first stage only: the engines clip.
        "gradient_clipping": (spec.optim.grad_clip_norm or 0.0) if stage else 0.0,
        "zero_optimization": {"reduce_bucket_size": bucket, **zero_options, "stage": stage},
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
    }
    if spec.train.precision == "bf16":
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def build_optimizer(model: torch.nn.Module, spec: OptimSpec) -> torch.optim.Optimizer:
    """A torch optimizer over the module's parameters, in two groups: decayed and not."""
    decayed = [parameter for parameter in model.parameters() if is_decayed(tuple(parameter.shape))]
    others = [parameter for parameter in model.parameters() if not is_decayed(tuple(parameter.shape))]
    param_groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, spec.weight_decay), (others, 0.0))
        if params
    ]
    if spec.kind == "sgd":
        return torch.optim.SGD(param_groups, lr=spec.lr, fused=True)
    betas = (spec.beta1, spec.beta2)
    return torch.optim.AdamW(param_groups, lr=spec.lr, betas=betas, eps=spec.eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def say_nothing(*_: object, **__: object) -> None:
    """Stands in for a DeepSpeed function that only reports."""


def _one_device() -> int:
    return 1
