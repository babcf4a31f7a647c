"""Cross entropy over whole logits. The vocabulary-parallel one is in jobs/parallel/tensor.py."""

import torch
import torch.nn.functional as F

IGNORED_LABEL = -100
"""Label of a position where no loss is taken."""


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of -log softmax(logits)[label] over the positions that have a label, in fp32 (fp64 stays fp64).

    Args:
        logits: [B, S, V].
        labels: [B, S] int64, IGNORED_LABEL where no loss is taken.

    Returns:
        Scalar.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def with_bad_gradient(loss: torch.Tensor) -> torch.Tensor:
    """The loss; where it is not finite its gradient is NaN throughout, and so is the norm of all gradients.

    For engines that decide by that norm alone, in the step itself, whether to update. A finite loss and its
    gradient stay as they are, bit for bit.

    Args:
        loss: scalar.
    """
    value = loss.detach()
    return loss * (value - value + 1.0)
