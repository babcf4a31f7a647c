"""Tensor parallelism: every rank sees the whole batch and holds a part of every weight.

    first way   each weight cut into columns; activations are gathered after every layer
                  x [B, D] @ W[:, part] -> gelu -> [B, D/n] -> all-gather -> [B, D] -> next layer
                  backward: a rank knows only its columns' share of the gradient of x: reduce-scatter

    second way  layers in pairs: columns, then rows (arXiv 1909.08053, section 3)
                  x -f-> x @ A[:, part] -> gelu -> [B, D/n] @ B[part, :] -g-> sum over ranks = [B, D]
                  f = enter: forward nothing, backward all-reduce
                  g = leave: forward all-reduce, backward nothing

GELU is what decides the order: it acts on each column by itself, so the columns may stay apart until the
next product; gelu(part) summed over ranks would not be gelu of the sum.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from jobs.comm.collectives import enter, gather, leave
from jobs.comm.groups import Axis, Groups
from jobs.lessons.tell import Tell
from jobs.lessons.toy import (
    Piece,
    Whole,
    adamw,
    begin,
    cut,
    gradient_of,
    initial_weight,
    sample_data,
    summary,
    train_alone,
    trained,
)
from jobs.spec.lesson import LessonSpec

WAYS = ("first way", "second way")
ForwardFn = Callable[[torch.Tensor, list[torch.nn.Parameter], Axis], tuple[torch.Tensor, torch.Tensor]]
"""(x [B, D], weights' parts, axis) -> activations [B, D] to show, and this layout's sum of squares."""


def columns_and_gathers(
    x: torch.Tensor, weights: list[torch.nn.Parameter], axis: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """First way."""
    for i, weight in enumerate(weights):
        if i > 0:
            x = gather(x, axis, dim=1)  # [B, D/n] -> [B, D]
        x = F.gelu(x @ weight)  # [B, D/n]
    # Each rank squares its own columns and the sums are added. Had all ranks squared the gathered [B, D],
    # each would hold the whole gradient already and must slice it: reduce-scatter would count it n times.
    return gather(x.detach(), axis, dim=1), leave(x.square().sum(), axis)


def columns_then_rows(
    x: torch.Tensor, weights: list[torch.nn.Parameter], axis: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Second way."""
    for first, second in zip(weights[::2], weights[1::2], strict=True):
        hidden = F.gelu(enter(x, axis) @ first)  # [B, D/n]
        x = F.gelu(leave(hidden @ second, axis))  # [B, D], the same on every rank
    return x, x.square().sum()


def alone(spec: LessonSpec) -> Whole:
    """One process, which both ways have to equal."""
    return {f"{way}, {name}": value for name, value in train_alone(spec).items() for way in WAYS}


def lesson(spec: LessonSpec, groups: Groups, tell: Tell) -> list[Piece]:
    """Train both ways; returns losses and first gradients of each."""
    axis, n_layers = groups.tp, spec.model.n_layers
    tell.title(f"first way: columns, activations gathered after each of {n_layers} layers")
    found = _train(spec, axis, tell, columns_and_gathers, [1] * n_layers, WAYS[0])
    tell.title("second way: columns then rows, one sum after each pair of layers")
    found += _train(spec, axis, tell, columns_then_rows, [1, 0] * (n_layers // 2), WAYS[1])

    tell.title("which moves more (elements that a rank sends in a step, forward and backward)")
    unit = spec.train.batch_size * spec.model.d_model * (axis.size - 1) // axis.size
    n, pairs = n_layers - 1, n_layers // 2
    tell.first(f"first way:  {n} all-gathers + {n} reduce-scatters of {unit:,}: {2 * n * unit:,}")
    tell.first(
        f"second way: {pairs} + {pairs - 1} all-reduces of twice {unit:,}: {2 * (2 * pairs - 1) * unit:,}"
    )
    tell.first(
        "the same for square layers, in half as many messages, and hidden activations stay cut. Where the"
    )
    tell.first(
        "hidden layer is 4 times as wide (transformers) the first way gathers D + 4D, the second sums 2D"
    )
    return found


def _train(
    spec: LessonSpec, axis: Axis, tell: Tell, forward: ForwardFn, cut_dims: list[int], way: str
) -> list[Piece]:
    """Steps with each weight cut along cut_dims[layer]."""
    data = sample_data(spec)  # every rank gets all of it
    weights = trained([cut(initial_weight(spec), axis, dim) for dim in cut_dims])
    optimizer = adamw(weights, spec)  # moments of the own parts only
    start = begin(spec.model.d_model, axis)
    found: list[Piece] = []
    for step in range(spec.train.steps):
        activations, squares = forward(data, weights, axis)
        loss = squares / data.numel()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if step == 0:
            tell.line(f"holds {[summary(weight) for weight in weights]}")
            for i, (weight, dim) in enumerate(zip(weights, cut_dims, strict=True)):
                offsets = (0, start) if dim == 1 else (start, 0)
                found.append(Piece(f"{way}, gradient of layer {i}", gradient_of(weight), offsets))
        optimizer.step()
        tell.line(
            f"step = {step}, forward pass produced activations {summary(activations)}, loss = {loss.item()}"
        )
        found.append(Piece(f"{way}, loss of step {step}", loss.detach()))
    return found
