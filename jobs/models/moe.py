"""Routed experts as single-device maths (arXiv 1701.06538, 2401.06066). Knows no mesh axis.

    x -> router: logits (fp32) -> scores -> the K highest, with the selection bias added -> weights
      -> capacity (if any) drops choices -> experts, each on its tokens -> weighted sum (+ shared experts)

Where the experts are and how tokens reach them is the layout's affair (Operations.experts), and so is what
the other parts of a cut sequence say (Operations.sequences).

Shapes: B micro-batch, S sequence (this rank's part where it is cut), D d_model, E experts, K experts a token
visits, F hidden.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, cast

import torch
import torch.nn.functional as F
from torch import nn

from jobs.models.experts import ExpertWeights
from jobs.models.router_losses import attach, balance_loss, z_loss
from jobs.spec.model import MoeSpec

if TYPE_CHECKING:
    from jobs.models.operations import Operations


class Router(nn.Linear):
    """The router's matrix, and where selection is balanced by a bias: that bias and this step's load."""

    e_score_correction_bias: torch.Tensor
    """[E] fp32: added to the scores for the selection only (arXiv 2408.15664). State, not trained."""
    load: torch.Tensor
    """[E] int64: choices of each expert since the last update, on this rank."""

    def __init__(self, d_model: int, n_experts: int, *, has_bias: bool) -> None:
        super().__init__(d_model, n_experts, bias=False)
        self.has_bias = has_bias
        if has_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(n_experts, dtype=torch.float32))
            self.register_buffer("load", torch.zeros(n_experts, dtype=torch.int64), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """A cast of the module leaves the bias fp32: steps of 0.001 get lost in bf16."""
        kept = self.e_score_correction_bias if self.has_bias else None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if kept is not None and self.e_score_correction_bias.dtype != kept.dtype:
            self.e_score_correction_bias = kept.to(self.e_score_correction_bias.device)
        return self


class Expert(nn.Module):
    """The matrices of one expert, a SwiGLU network; Operations multiply with them."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    @property
    def matrices(self) -> ExpertWeights:
        """gate, up, down."""
        return self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight


class Moe(nn.Module):
    """Router, routed experts, shared experts."""

    def __init__(self, d_model: int, moe: MoeSpec, operations: "Operations", experts: range) -> None:
        super().__init__()
        self.moe = moe
        self.operations = operations
        self.gate = Router(d_model, moe.n_experts, has_bias=moe.bias_update_rate > 0)
        self.experts = nn.ModuleDict({str(i): Expert(d_model, moe.d_ff) for i in experts})
        if moe.n_shared_experts:
            self.shared_experts = Expert(d_model, moe.n_shared_experts * moe.d_ff)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight = self.operations.replicated(self.gate.weight)
        logits = F.linear(x.to(wide), weight.to(wide))  # [B, S, E]
        scores = logits.softmax(-1) if self.moe.router == "softmax" else logits.sigmoid()
        chosen = self._choose(scores)  # [B, S, K]
        weights = self._weights(scores, chosen)  # [B, S, K]
        matrices = [cast(Expert, expert).matrices for expert in self.experts.values()]
        kept = self._without_overflow(chosen, weights)
        flat = (x.flatten(0, 1), kept.flatten(0, 1), weights.flatten(0, 1))
        out = self.operations.experts(*flat, matrices).view_as(x)
        if self.moe.n_shared_experts:
            out = out + self._shared(x)
        return self._with_losses(out, logits, scores, chosen)

    @torch.no_grad()
    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        biased = scores + self.gate.e_score_correction_bias if self.gate.has_bias else scores
        return biased.topk(self.moe.top_k, dim=-1).indices

    def _weights(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        weights = scores.gather(-1, chosen)
        if self.moe.normalize_weights:
            # The small number matters only where all K sigmoids are zero.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.moe.routed_scale

    @torch.no_grad()
    def _without_overflow(self, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The choices, n_experts where an expert has taken its share of the sequence already."""
        if self.moe.capacity_factor is None:
            return chosen
        sequences, n_experts = self.operations.sequences, self.moe.n_experts
        whole_chosen, whole_weights = sequences.whole(chosen), sequences.whole(weights)
        share = self.moe.capacity_factor * whole_chosen.shape[1] * self.moe.top_k / n_experts
        is_kept = within_capacity(whole_chosen, whole_weights, n_experts, math.ceil(share))
        return chosen.where(sequences.part(is_kept), n_experts)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.shared_experts.matrices
        gated, raised = self.operations.columns(x, (gate, up))  # [B, S, F]
        return self.operations.row(F.silu(gated) * raised, down)

    def _with_losses(
        self, out: torch.Tensor, logits: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """`out`, with the router's losses in the gradient and the load counted (no value changes)."""
        scale = self.operations.router_losses
        terms: list[torch.Tensor] = []
        if scale is not None and self.moe.balance_loss_coef:
            highest = scores.topk(self.moe.top_k, dim=-1).indices if self.gate.has_bias else chosen
            counts = self.operations.sequences.total(count_by_sequence(highest, self.moe.n_experts))
            shares = scores if self.moe.router == "softmax" else scores / scores.sum(-1, keepdim=True)
            terms.append(self.moe.balance_loss_coef * balance_loss(shares, counts, scale))
        if scale is not None and self.moe.z_loss_coef:
            terms.append(self.moe.z_loss_coef * z_loss(logits, scale))
        if not terms and not self.gate.has_bias:
            return out
        counts = torch.bincount(chosen.flatten(), minlength=self.moe.n_experts)
        loss = torch.stack(terms).sum() if terms else None
        factor = 1.0 if scale is None else scale.factor
        return attach(out, loss, factor, counts, self.gate.load if self.gate.has_bias else None)


@torch.no_grad()
def count_by_sequence(chosen: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Choices of each expert.

    Args:
        chosen: [B, S, K].
        n_experts: E.

    Returns:
        [B, E] int64.
    """
    flat = chosen.flatten(1)  # [B, S * K]
    return flat.new_zeros(len(flat), n_experts).scatter_add_(1, flat, torch.ones_like(flat))


def within_capacity(
    chosen: torch.Tensor, weights: torch.Tensor, n_experts: int, capacity: int
) -> torch.Tensor:
    """Which choices an expert accepts: the `capacity` heaviest of each sequence, of equal ones the earlier.

    The choice is made for each whole sequence, so it is the same whatever batch the sequence is in and
    however it is cut over ranks.

    Args:
        chosen: [B, S, K], whole sequences in order.
        weights: [B, S, K].
        n_experts: E.
        capacity: tokens that an expert takes of one sequence.

    Returns:
        [B, S, K] bool.
    """
    first = torch.arange(len(chosen), device=chosen.device)[:, None, None] * n_experts
    queue_of = (chosen + first).flatten()  # one queue for each sequence and expert
    by_weight = weights.flatten().argsort(descending=True, stable=True)
    order = by_weight[queue_of[by_weight].argsort(stable=True)]
    lengths = torch.bincount(queue_of, minlength=len(chosen) * n_experts)
    starts = lengths.cumsum(0) - lengths
    places = torch.arange(len(order), device=order.device) - starts[queue_of[order]]
    accepted = torch.empty_like(order, dtype=torch.bool)
    accepted[order] = places < capacity
    return accepted.view_as(chosen)
