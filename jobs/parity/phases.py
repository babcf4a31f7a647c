"""What is trained in a comparison: three short runs of one spec that differ in the optimizer. No torch.

gradient   AdamW with beta1 = 0 and no clipping, one step: its first moment then is the mean gradient,
           whatever engine holds it; its weights are those after one AdamW step
sgd        SGD with clipping, one step: unlike AdamW it sees a gradient that is off by a constant factor
losses     AdamW with clipping over some steps
"""

from jobs.spec.job import JobSpec
from jobs.spec.optim import Constant, OptimSpec

CLIP_NORM = 0.25
"""Below the norm of every tiny model's gradient, so that clipping always acts."""
EPS = 1e-4
"""AdamW divides by the root of the second moment + eps: with a tiny eps a gradient of a few roundings would
move a weight as far as any other, and the comparison would be of roundings."""


def gradient_phase(spec: JobSpec) -> JobSpec:
    """The spec with AdamW, beta1 = 0, no clipping."""
    return _with_optim(
        spec, OptimSpec(lr=1e-2, beta1=0.0, eps=EPS, grad_clip_norm=None, schedule=Constant(kind="constant"))
    )


def sgd_phase(spec: JobSpec) -> JobSpec:
    """The spec with SGD and clipping."""
    return _with_optim(
        spec, OptimSpec(kind="sgd", lr=1.0, grad_clip_norm=CLIP_NORM, schedule=Constant(kind="constant"))
    )


def losses_phase(spec: JobSpec) -> JobSpec:
    """The spec with AdamW and clipping."""
    return _with_optim(
        spec,
        OptimSpec(
            lr=3e-3, eps=EPS, grad_clip_norm=CLIP_NORM, schedule=Constant(kind="constant", warmup_steps=2)
        ),
    )


def _with_optim(spec: JobSpec, optim: OptimSpec) -> JobSpec:
    return spec.model_copy(update={"optim": optim})
