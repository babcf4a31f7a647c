"""Pipeline parallelism: every rank holds some of the layers; activations go on, gradients come back.

    rank 0   layers 0 1   x0 x1 x2 x3 ------------------> g0 g1 g2 g3
    rank 1   layers 2 3      x0 x1 x2 x3 -> loss -> g0 g1 g2 g3

Naively the whole batch passes stage after stage: one rank works, the others wait, a share (p-1)/p of the
time is lost. Cut into m micro-batches all stages are busy once the pipeline has filled: (p-1)/(m+p-1) is
lost. Here all forward passes come first, then all backward passes (GPipe, arXiv 1811.06965); the gradients
of the micro-batches add up in .grad, and the step comes after the last. 1F1B (arXiv 2104.04473) starts
backward passes as early as it can: the same bubble, but at most p micro-batches' activations are kept
instead of m.
"""

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from jobs.comm.collectives import gather_plain
from jobs.comm.groups import Axis, Groups
from jobs.lessons.tell import Tell
from jobs.lessons.toy import (
    Piece,
    Whole,
    adamw,
    forward,
    gradient_of,
    initial_weight,
    sample_data,
    summary,
    train_alone,
    trained,
)
from jobs.spec.lesson import LessonSpec

WIDTH = 72
"""Characters of the timeline."""
WAYS = ("naive", "micro-batches")


@dataclass
class Clock:
    """When this rank computed what: (begin, end, sign), in seconds of a clock that all processes share."""

    spans: list[tuple[float, float, str]] = field(default_factory=list)

    def add(self, began_s: float, sign: str) -> None:
        """Note a piece of work that ends now."""
        self.spans.append((began_s, time.perf_counter(), sign))


def alone(spec: LessonSpec) -> Whole:
    """One process, which both ways have to equal."""
    return {f"{way}, {name}": value for name, value in train_alone(spec).items() for way in WAYS}


def lesson(spec: LessonSpec, groups: Groups, tell: Tell) -> list[Piece]:
    """Train with one micro-batch, then with several; returns losses and first gradients of the own layers."""
    tell.title("naive: the whole batch passes stage after stage")
    found = _train(spec, groups.pp, tell, 1, WAYS[0])
    m = spec.train.micro_batches
    tell.title(f"{m} micro-batches")
    return found + _train(spec, groups.pp, tell, m, WAYS[1])


def _train(spec: LessonSpec, axis: Axis, tell: Tell, m: int, way: str) -> list[Piece]:
    n_own = spec.model.n_layers // axis.size
    first_layer = axis.rank * n_own
    weights = trained([initial_weight(spec)] * n_own)
    optimizer = adamw(weights, spec)
    found: list[Piece] = []
    for step in range(spec.train.steps):
        clock = Clock()
        optimizer.zero_grad()
        loss = _forward_backward(spec, axis, tell if step == 0 else None, weights, m, clock)
        if step == 0:
            for i, weight in enumerate(weights):
                found.append(Piece(f"{way}, gradient of layer {first_layer + i}", gradient_of(weight)))
        optimizer.step()
        if axis.rank == axis.size - 1:  # only the last stage knows it
            tell.line(f"step = {step}, loss = {loss.item()}")
            found.append(Piece(f"{way}, loss of step {step}", loss))
    _draw(axis, tell, clock, m)
    return found


def _forward_backward(
    spec: LessonSpec, axis: Axis, tell: Tell | None, weights: list[torch.nn.Parameter], m: int, clock: Clock
) -> torch.Tensor:
    """All forward passes, then all backward passes; returns the loss, which is right on the last stage."""
    is_first, is_last = axis.rank == 0, axis.rank == axis.size - 1
    micro_batches = list(sample_data(spec).chunk(m))  # [B/m, D] each
    n_elements = spec.train.batch_size * spec.model.d_model
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    total = micro_batches[0].new_zeros(())
    for i, x in enumerate(micro_batches):
        if not is_first:
            x = torch.empty_like(x)
            dist.recv(x, axis.neighbour(-1), group=axis.group)
            x.requires_grad_()  # a leaf: backward ends here, at what the stage before waits for
        began_s = time.perf_counter()
        out = forward(x, weights)
        if is_last:
            out = out.square().sum() / n_elements  # micro-batches' shares of the mean add up to it
            total += out.detach()
        clock.add(began_s, str(i % 10))
        kept.append((x, out))
        if not is_last:
            if tell:
                tell.line(f"sending {summary(out)} to rank {axis.rank + 1}")
            dist.send(out.detach(), axis.neighbour(1), group=axis.group)
    for i, (x, out) in enumerate(kept):
        gradient = None
        if not is_last:
            gradient = torch.empty_like(out)
            dist.recv(gradient, axis.neighbour(1), group=axis.group)
        began_s = time.perf_counter()
        out.backward(gradient)  # type: ignore[no-untyped-call]
        clock.add(began_s, chr(ord("a") + i % 26))
        if not is_first:
            assert x.grad is not None
            if tell:
                tell.line(f"sending gradient {summary(x.grad)} back to rank {axis.rank - 1}")
            dist.send(x.grad, axis.neighbour(-1), group=axis.group)
    return total


def _draw(axis: Axis, tell: Tell, clock: Clock, m: int) -> None:
    """The last step's timeline, as measured, with one scale for all ranks."""
    tell.title(f"the last of these steps, as measured: m = {m}")
    began_s, ended_s = clock.spans[0][0], clock.spans[-1][1]
    busy_s = sum(end - begin for begin, end, _ in clock.spans)
    own = torch.tensor([[began_s, ended_s, busy_s]], dtype=torch.float64)
    ranks = gather_plain(own, axis, dim=0)  # [p, 3]
    origin_s, length_s = ranks[:, 0].min().item(), (ranks[:, 1].max() - ranks[:, 0].min()).item()
    row = ["."] * WIDTH
    for begin, end, sign in clock.spans:
        left = int((begin - origin_s) / length_s * WIDTH)
        right = max(left + 1, round((end - origin_s) / length_s * WIDTH))
        row[left:right] = [sign] * (min(right, WIDTH) - left)
    tell.line(f"|{''.join(row[:WIDTH])}|")
    idle = 1 - ranks[:, 2].sum().item() / (axis.size * length_s)
    tell.first("0 1 2: forward of that micro-batch; a b c: its backward; dots: waiting")
    tell.first(
        f"measured {idle:.0%} of {axis.size} x {length_s * 1e3:.1f} ms; (p-1)/(m+p-1) = "
        f"{(axis.size - 1) / (m + axis.size - 1):.0%} with p = {axis.size} stages, m = {m} micro-batches"
    )
