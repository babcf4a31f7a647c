"""Sequence parallelism: tensor parallelism that also cuts what lies between its products (arXiv 2205.05198).

    tensor parallel      x [T, D] whole on every rank: norm, residual and dropout are computed n times over
    with the sequence    x [T/n, D]: rank r keeps tokens of its part only
    cut                  norm(x) -> all-gather -> [T, D] columns, gelu, rows -> reduce-scatter -> + x

f and g become all-gather and reduce-scatter, which together move as much as the one all-reduce that they
replace (all-reduce = reduce-scatter + all-gather), and each is the other's backward. The price: a norm's
gain sees only this rank's tokens, so its gradient has to be summed over the ranks.

Block: x + gelu(norm(x) @ A) @ B, with a gain for each norm. Rows of the batch are the tokens T.
"""

import torch
import torch.nn.functional as F

from jobs.comm.collectives import gather, leave, scatter_sum, sum_in_place
from jobs.comm.groups import Groups
from jobs.lessons.tell import Tell
from jobs.lessons.toy import (
    Piece,
    Whole,
    adamw,
    begin,
    cut,
    dtype_of,
    gradient_of,
    initial_weight,
    sample_data,
    summary,
    trained,
)
from jobs.spec.lesson import LessonSpec


def alone(spec: LessonSpec) -> Whole:
    """The blocks on one process."""
    data = sample_data(spec)
    weights = trained([initial_weight(spec)] * spec.model.n_layers)
    gains = trained([torch.ones(spec.model.d_model, dtype=dtype_of(spec))] * (spec.model.n_layers // 2))
    optimizer = adamw([*weights, *gains], spec)
    found: Whole = {}
    for step in range(spec.train.steps):
        x = data
        for gain, first, second in zip(gains, weights[::2], weights[1::2], strict=True):
            x = x + F.gelu(F.rms_norm(x, gain.shape, gain) @ first) @ second
        loss = x.square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if step == 0:
            found |= {f"gradient of layer {i}": gradient_of(weight) for i, weight in enumerate(weights)}
            found |= {f"gradient of norm {i}": gradient_of(gain) for i, gain in enumerate(gains)}
        optimizer.step()
        found[f"loss of step {step}"] = loss.detach()
    return found


def lesson(spec: LessonSpec, groups: Groups, tell: Tell) -> list[Piece]:
    """Train; returns losses and first gradients."""
    axis = groups.tp
    data = cut(
        sample_data(spec), axis, dim=0
    )  # [T/n, D]: tokens are cut where tensor parallelism copies them
    dims = [1, 0] * (spec.model.n_layers // 2)
    weights = trained([cut(initial_weight(spec), axis, dim) for dim in dims])
    gains = trained([torch.ones(spec.model.d_model, dtype=dtype_of(spec))] * (spec.model.n_layers // 2))
    optimizer = adamw([*weights, *gains], spec)
    found: list[Piece] = []
    start = begin(spec.model.d_model, axis)
    tell.title(f"tokens cut over {axis.size} ranks between the products, matrices inside them")
    for step in range(spec.train.steps):
        x = data
        for gain, first, second in zip(gains, weights[::2], weights[1::2], strict=True):
            whole = gather(F.rms_norm(x, gain.shape, gain), axis, dim=0)  # [T, D]
            x = x + scatter_sum(F.gelu(whole @ first) @ second, axis, dim=0)  # [T/n, D]
        loss = leave(x.square().sum(), axis) / (data.numel() * axis.size)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for gain in gains:
            assert gain.grad is not None
            sum_in_place(gain.grad, axis)  # forget this and every norm trains on a part of the tokens
        if step == 0:
            for i, (weight, dim) in enumerate(zip(weights, dims, strict=True)):
                offsets = (0, start) if dim == 1 else (start, 0)
                found.append(Piece(f"gradient of layer {i}", gradient_of(weight), offsets))
            found += [Piece(f"gradient of norm {i}", gradient_of(gain)) for i, gain in enumerate(gains)]
        optimizer.step()
        tell.line(f"step = {step}, holds activations {summary(x)}, loss = {loss.item()}")
        found.append(Piece(f"loss of step {step}", loss.detach()))
    tell.title("what it saves")
    between = data.numel() * data.element_size()
    tell.first(
        f"each tensor between the products: {between:,} bytes a rank, {between * axis.size:,} without the cut"
    )
    tell.first("elements moved: the same as with f and g (all-gather + reduce-scatter = all-reduce)")
    return found
