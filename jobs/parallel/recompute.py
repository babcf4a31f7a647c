"""Activation recomputation: what the backward pass computes again instead of having kept it.

    mode        kept of a layer                              computed again (arXiv 2205.05198, 5)
    none        all that backward wants                      nothing
    attention   all but the attention core's inside          scores and their sum with the values
    ops         inputs, products, fused attention            norms, rotations, silu, sums over ranks
    full        its input                                    the whole layer, communication included

Values do not change, so gradients stay bitwise what they are without. No random state is kept: nothing in the
model draws. Whoever recomputes also sends again what the layer sends; all ranks of a line do so in one order.

A fused attention keeps no scores, so "attention" then saves only q, k, v and the output; it is for layouts
and devices whose attention is not fused. Does not decide where recomputation pays.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from jobs.models.attention import local_attention
from jobs.models.operations import Operations
from jobs.spec.strategy import Recompute

_ATEN = torch.ops.aten
PRODUCTS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN._scaled_mm.default,
        _ATEN._grouped_mm.default,
        torch.ops.jobs.grouped_swiglu_products.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)
"""Kept in the mode "ops". Not bmm: an attention that is not fused would keep its scores."""


def recompute_operations(base: Operations, mode: Recompute) -> Operations:
    """Operations that keep less for the backward pass. Local.

    Args:
        base: how the layout computes; nothing is put over the result.
        mode: see the table above.
    """
    match mode:
        case "none":
            return base
        case "attention":
            return replace(base, attention=partial(_again, base.attention))
        case "full":
            return replace(base, layer=partial(_again, base.layer))
        case "ops":
            return _keep_products(base)
    assert_never(mode)


def _again(
    compute: Callable[..., torch.Tensor],
    *arguments: Any,
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = noop_context_fn,
) -> torch.Tensor:
    out: torch.Tensor = checkpoint(
        compute, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
    return out


def _keep_products(base: Operations) -> Operations:
    choice = _Choice()

    def without(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def keeping_nothing(*arguments: Any) -> torch.Tensor:
            with choice.keep_nothing():
                return compute(*arguments)

        return keeping_nothing

    contexts = partial(create_selective_checkpoint_contexts, choice)
    # What ranks add up is not worth keeping: backward wants the sum, and that is made in the memory of the
    # parts (row products over tp, blocks of attention over cp).
    return replace(
        base,
        layer=partial(_again, base.layer, contexts=contexts),
        row=base.row if base.row is F.linear else without(base.row),
        attention=base.attention if base.attention is local_attention else without(base.attention),
    )


class _Choice:
    """Which operators' results are kept. The same answers come when the layer is computed again."""

    def __init__(self) -> None:
        self._keeps = True

    @contextmanager
    def keep_nothing(self) -> Iterator[None]:
        """Inside, products are computed again too."""
        self._keeps = False
        try:
            yield
        finally:
            self._keeps = True

    def __call__(
        self, _: SelectiveCheckpointContext, operator: Any, *arguments: Any, **named: Any
    ) -> CheckpointPolicy:
        del arguments, named
        is_kept = self._keeps and operator in PRODUCTS
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
