"""What a backward pass that is taken apart asks of an autograd function. Knows no schedule and no mesh."""

from typing import Any

import torch


def wanted_gradients(ctx: Any) -> list[bool]:
    """Which tensor arguments of an autograd function this backward pass wants a gradient of.

    `ctx.needs_input_grad` says what forward knew. Zero-bubble schedules (arXiv 2401.10241) go through one
    graph twice, for the gradients of inputs and then of weights, and would each time pay for both,
    communication included.

    Args:
        ctx: the context of a backward method that is running.

    Returns:
        One entry a tensor argument, in order; arguments that are no tensors have none.
    """
    return [node is not None and _is_executed(node) for node, _ in ctx.next_functions]


def _is_executed(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # How autograd answers for a leaf that autograd.grad was asked for: its gradient is wanted.
        return True
