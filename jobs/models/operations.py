"""How a layout computes: functions that the model's maths calls. The defaults are one device's.

The model owns the weights (this rank's pieces of them) and says which product is taken; a layout hands in
how. Communication, if any, is inside these functions, so the model knows no mesh axis.

Shapes: B micro-batch, S sequence (this rank's part where it is cut), D d_model, F hidden, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from jobs.models.attention import AttentionFn, MaskFn, document_mask, local_attention
from jobs.models.experts import ExpertsFn, local_experts
from jobs.models.losses import cross_entropy_sum
from jobs.models.router_losses import RouterLossScale

ColumnsFn = Callable[[torch.Tensor, Sequence[torch.Tensor]], list[torch.Tensor]]
"""(x [B, S, in], weights [out_i, in]) -> x @ weight_i^T for each: projections that share an input."""
RowFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [B, S, in], weight [out, in]) -> [B, S, out]: a projection that ends on the residual stream."""
EmbedFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens [B, S], weight [V, D]) -> [B, S, D]."""
LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [B, S, V], labels [B, S]) -> scalar fp32: the sum of cross entropies over valid labels."""
ReplicatedFn = Callable[[torch.Tensor], torch.Tensor]
"""Applied to each weight that every tp rank holds whole (norms, routers) where it is used."""
LayerFn = Callable[..., torch.Tensor]
"""(layer, *arguments) -> layer(*arguments), with whatever activations it wants to keep."""


def linears(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One product a weight."""
    return [F.linear(x, weight) for weight in weights]


def embed(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of a whole embedding matrix."""
    return F.embedding(tokens, weight)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """The argument."""
    return tensor


def run_layer(layer: Callable[..., torch.Tensor], *arguments: torch.Tensor | None) -> torch.Tensor:
    """Keep all activations for the backward pass."""
    return layer(*arguments)


@dataclass(frozen=True)
class Sequences:
    """What is known of the parts of this rank's sequences that other ranks hold. Not differentiable."""

    total: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    """Counts of this rank's part, any shape -> those of the whole sequences."""
    whole: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    """This rank's part [B, S, ...] -> the whole sequences, in order."""
    part: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    """Whole sequences in order [B, S, ...] -> this rank's part."""


@dataclass(frozen=True)
class Operations:
    """One layout's way of computing."""

    attention: AttentionFn = local_attention
    mask: MaskFn = document_mask
    columns: ColumnsFn = linears
    row: RowFn = F.linear
    embed: EmbedFn = embed
    loss: LossFn = cross_entropy_sum
    replicated: ReplicatedFn = as_it_is
    layer: LayerFn = run_layer
    experts: ExpertsFn = local_experts
    sequences: Sequences = Sequences()
    router_losses: RouterLossScale | None = None
    """None leaves the router's losses out of the gradient: there is no step whose mean they could be."""
