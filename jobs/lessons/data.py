"""Data parallelism: every rank holds all weights and sees a part of the batch; gradients are averaged.

    rank 0: rows B0 -> loss 0 -> gradient 0 --+
    rank 1: rows B1 -> loss 1 -> gradient 1 --+-- all-reduce, / ranks --> the same gradient on every rank
    ...                                       |                       --> the same step on every rank

The mean over the batch is the mean of the parts' means because the parts are equally long. (With a
different number of valid tokens in each part it is not: sum losses and counts, then divide. The engines do
that.)
"""

from jobs.comm.collectives import sum_in_place
from jobs.comm.groups import Groups
from jobs.lessons.tell import Tell
from jobs.lessons.toy import (
    Piece,
    adamw,
    cut,
    forward,
    gradient_of,
    initial_weight,
    sample_data,
    summary,
    trained,
)
from jobs.spec.lesson import LessonSpec


def lesson(spec: LessonSpec, groups: Groups, tell: Tell) -> list[Piece]:
    """Train; returns the mean losses and the first step's gradients."""
    axis = groups.dp
    data = cut(sample_data(spec), axis, dim=0)  # [B / dp, D]
    weights = trained([initial_weight(spec)] * spec.model.n_layers)
    optimizer = adamw(weights, spec)
    tell.title(f"each of {axis.size} ranks: {len(data)} rows of the batch, all {len(weights)} layers")
    found: list[Piece] = []
    for step in range(spec.train.steps):
        loss = forward(data, weights).square().mean()
        optimizer.zero_grad()  # without this, step 1 would add to the averaged gradients of step 0
        loss.backward()  # type: ignore[no-untyped-call]

        # The only difference to a single process:
        for weight in weights:
            assert weight.grad is not None
            sum_in_place(weight.grad, axis).div_(axis.size)

        if step == 0:
            found += [Piece(f"gradient of layer {i}", gradient_of(w)) for i, w in enumerate(weights)]
        optimizer.step()
        tell.line(f"step = {step}, loss = {loss.item()}, params = {[summary(weight) for weight in weights]}")
        found.append(Piece(f"loss of step {step}", sum_in_place(loss.detach().clone(), axis) / axis.size))
    n_params = sum(weight.numel() for weight in weights)
    tell.title("what it costs")
    tell.first(
        f"losses differ (other rows), parameters do not: the gradients are the same on {axis.size} ranks"
    )
    tell.first(
        f"each step all-reduces {n_params:,} elements: a rank sends 2 (n-1)/n of them, "
        f"{2 * (axis.size - 1) * n_params // axis.size:,}"
    )
    tell.first("memory is not shared out: every rank holds all weights, gradients and moments (see zero.py)")
    return found
