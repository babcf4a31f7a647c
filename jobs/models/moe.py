"""Routed experts as single-device maths (arXiv 1701.06538, 2401.06066). Knows no mesh axis.

Shapes: T tokens, D d_model, E experts, K experts a token visits, F hidden.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from jobs.spec.model import MoeSpec

if TYPE_CHECKING:
    from jobs.models.operations import Operations


class Expert(nn.Module):
    """The matrices of one expert, a SwiGLU network."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        hidden = F.silu(F.linear(x, self.gate_proj.weight)) * F.linear(x, self.up_proj.weight)
        return F.linear(hidden, self.down_proj.weight)


class Moe(nn.Module):
    """Router, routed experts, shared experts."""

    def __init__(self, d_model: int, moe: MoeSpec, operations: "Operations", experts: range) -> None:
        super().__init__()
        self.moe = moe
        self.operations = operations
        self.gate = nn.Linear(d_model, moe.n_experts, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert(d_model, moe.d_ff) for i in experts})
        if moe.n_shared_experts:
            self.shared_experts = Expert(d_model, moe.n_shared_experts * moe.d_ff)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        raise NotImplementedError
