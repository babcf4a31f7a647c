"""ZeRO (arXiv 1910.02054): data parallelism that stops keeping n copies of what only one rank needs.

    all-reduce = reduce-scatter + all-gather. So with n ranks and P parameters:

    stage   each rank keeps                     a step moves (each times (n-1)/n)
    0       weights  gradients  moments         all-reduce gradients                        2 P
    1       weights  gradients  moments/n       reduce-scatter gradients, all-gather weights   2 P
    2       weights  gradients/n  moments/n     the same, layer by layer during backward       2 P
    3       weights/n  gradients/n  moments/n   all-gather weights twice, reduce-scatter once  3 P

Stages 1 and 2 cost nothing. Stage 3 gathers each layer's weight before its forward pass, drops it, and
gathers it again before its backward pass; here torch's checkpointing does that, by running the layer's
forward once more.

Each rank's part of a weight [D, D] is D/n of its rows; its AdamW knows only these.
"""

import torch
from torch.utils.checkpoint import checkpoint

from jobs.comm.collectives import gather, gather_plain, scatter_sum_plain, sum_in_place
from jobs.comm.groups import Axis, Groups
from jobs.lessons.tell import Tell
from jobs.lessons.toy import (
    Piece,
    Whole,
    adamw,
    begin,
    cut,
    forward,
    gradient_of,
    initial_weight,
    sample_data,
    train_alone,
    trained,
)
from jobs.spec.lesson import LessonSpec

STAGES = (1, 2, 3)


def alone(spec: LessonSpec) -> Whole:
    """One process, which each stage has to equal."""
    return {f"stage {stage}, {name}": value for name, value in train_alone(spec).items() for stage in STAGES}


def lesson(spec: LessonSpec, groups: Groups, tell: Tell) -> list[Piece]:
    """Train under stages 1, 2 and 3; returns losses and the own rows of the first gradients of each."""
    found: list[Piece] = []
    for stage in STAGES:
        tell.title(f"stage {stage}")
        found += _train(spec, groups.dp, tell, stage)
    return found


def _train(spec: LessonSpec, axis: Axis, tell: Tell, stage: int) -> list[Piece]:
    data = cut(sample_data(spec), axis, dim=0)  # [B/n, D]
    start = begin(spec.model.d_model, axis)
    whole = [initial_weight(spec)] * spec.model.n_layers
    weights = trained(whole) if stage < 3 else []
    # [D/n, D], what this rank updates: a view of the weight, where all of it is here.
    parts = [torch.nn.Parameter(cut(weight.data, axis, dim=0)) for weight in weights]
    parts = parts or trained([cut(weight, axis, dim=0) for weight in whole])
    optimizer = adamw(parts, spec)
    peak = Peak()
    if stage == 2:
        _reduce_during_backward(weights, parts, axis, peak)
    found: list[Piece] = []
    for step in range(spec.train.steps):
        optimizer.zero_grad()
        x = data
        if stage == 3:
            for part in parts:
                x = checkpoint(_gathered_layer, x, part, axis, use_reentrant=False)
        else:
            x = forward(data, weights)
        # The mean over the whole batch: this rank's share of it, so that summed gradients are its gradients.
        loss = x.square().sum() / (data.numel() * axis.size)
        loss.backward()  # type: ignore[no-untyped-call]
        if stage == 1:
            peak.see(weights)  # all gradients are there at once
            for weight, part in zip(weights, parts, strict=True):
                part.grad = scatter_sum_plain(gradient_of(weight), axis, dim=0)
                weight.grad = None
        peak.see(parts)
        if step == 0:
            found += [
                Piece(f"stage {stage}, gradient of layer {i}", gradient_of(part), (start, 0))
                for i, part in enumerate(parts)
            ]
        optimizer.step()
        for weight, part in zip(weights, parts if weights else [], strict=True):
            weight.data.copy_(gather_plain(part.detach(), axis, dim=0))  # the other ranks' rows
        total = sum_in_place(loss.detach().clone(), axis)
        found.append(Piece(f"stage {stage}, loss of step {step}", total))
        tell.line(f"step = {step}, loss of its rows x 1/{axis.size} = {loss.item()}, of all = {total.item()}")
    n_weights = sum(w.numel() for w in weights) or sum(p.numel() for p in parts)
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    size = data.element_size()
    tell.line(
        f"bytes of parameters {n_weights * size:,}, of gradients at most {peak.n_elements * size:,}, "
        f"of optimizer state {sum(t.numel() for t in moments) * size:,}"
    )
    return found


def _gathered_layer(x: torch.Tensor, part: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A layer whose weight exists only while it is used; gather's backward is a reduce-scatter."""
    return forward(x, [gather(part, axis, dim=0)])


def _reduce_during_backward(
    weights: list[torch.nn.Parameter], parts: list[torch.nn.Parameter], axis: Axis, peak: "Peak"
) -> None:
    """As soon as a weight has its gradient, reduce-scatter it and drop it."""
    for weight, part in zip(weights, parts, strict=True):

        def reduce(done: torch.Tensor, part: torch.nn.Parameter = part) -> None:
            assert done.grad is not None
            peak.see([*weights, *parts])
            part.grad = scatter_sum_plain(done.grad, axis, dim=0)
            done.grad = None

        weight.register_post_accumulate_grad_hook(reduce)  # type: ignore[no-untyped-call]


class Peak:
    """The most elements of gradients that were alive together when somebody looked."""

    def __init__(self) -> None:
        self.n_elements = 0

    def see(self, parameters: list[torch.nn.Parameter]) -> None:
        """Look at the gradients of these parameters."""
        alive = sum(p.grad.numel() for p in parameters if p.grad is not None)
        self.n_elements = max(self.n_elements, alive)
