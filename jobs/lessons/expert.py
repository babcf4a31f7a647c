"""Expert parallelism: experts on different ranks; tokens travel to the experts that their router chose.

    rank r: its tokens [T/n, D] -> router: the top_k experts of each token and their weights
        all-to-all: each (token, choice) row to the rank of its expert; how many go where differs every time
        each rank: its experts on the rows that came, from whichever rank
        all-to-all back -> weighted sum of a token's choices

The matrices are not cut, activations are routed (arXiv 1701.06538, 2006.16668). An expert's gradient is
complete where the expert is, because all tokens came there. The router is on every rank and sees only this
rank's tokens: its gradient is summed. Every rank takes part in every all-to-all, also when it has no row to
send.
"""

import torch
import torch.nn.functional as F

from jobs.comm.collectives import exchange, exchange_plain, leave, sum_in_place
from jobs.comm.groups import Axis, Groups
from jobs.lessons.tell import Tell
from jobs.lessons.toy import (
    Piece,
    Whole,
    adamw,
    cut,
    gradient_of,
    initial_weight,
    sample_data,
    summary,
    trained,
)
from jobs.spec.lesson import LessonSpec

ROUTER_SEED = 1000


def route(x: torch.Tensor, router: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, D] -> weights [T, K] of the chosen experts and their numbers [T, K]."""
    chosen = (x @ router).softmax(dim=1).topk(top_k, dim=1)
    return chosen.values, chosen.indices


def alone(spec: LessonSpec) -> Whole:
    """One layer of experts on one process, each expert over the tokens that chose it."""
    data = sample_data(spec)
    experts = trained([initial_weight(spec, seed=e) for e in range(spec.model.n_experts)])
    (router,) = trained([initial_weight(spec, spec.model.n_experts, ROUTER_SEED)])
    optimizer = adamw([*experts, router], spec)
    found: Whole = {}
    for step in range(spec.train.steps):
        weights, numbers = route(data, router, spec.model.top_k)
        out = torch.zeros_like(data)
        for number, expert in enumerate(experts):
            tokens, choices = torch.nonzero(numbers == number, as_tuple=True)
            rows = F.gelu(data[tokens] @ expert) * weights[tokens, choices, None]
            out = out.index_add(0, tokens, rows)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if step == 0:
            found |= {f"gradient of expert {i}": gradient_of(expert) for i, expert in enumerate(experts)}
            found["gradient of router"] = gradient_of(router)
        optimizer.step()
        found[f"loss of step {step}"] = loss.detach()
    return found


def lesson(spec: LessonSpec, groups: Groups, tell: Tell) -> list[Piece]:
    """Train; returns losses, the own experts' first gradients and the router's."""
    axis = groups.ep
    data = cut(sample_data(spec), axis, dim=0)  # [T/n, D]
    n_own = spec.model.n_experts // axis.size
    own = range(axis.rank * n_own, (axis.rank + 1) * n_own)
    experts = trained([initial_weight(spec, seed=e) for e in own])
    (router,) = trained([initial_weight(spec, spec.model.n_experts, ROUTER_SEED)])
    optimizer = adamw([*experts, router], spec)
    tell.title(f"{spec.model.n_experts} experts on {axis.size} ranks, {spec.model.top_k} for each token")
    found: list[Piece] = []
    for step in range(spec.train.steps):
        out, counts = _layer(data, router, experts, spec, axis)
        loss = leave(out.square().sum(), axis) / (data.numel() * axis.size)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        assert router.grad is not None
        sum_in_place(router.grad, axis)
        if step == 0:
            found += [
                Piece(f"gradient of expert {e}", _or_zeros(w)) for e, w in zip(own, experts, strict=True)
            ]
            found.append(Piece("gradient of router", gradient_of(router)))
        optimizer.step()
        tell.line(
            f"step = {step}, tokens {summary(data)}, rows sent {counts[0]}, received {counts[1]}, "
            f"loss = {loss.item()}"
        )
        found.append(Piece(f"loss of step {step}", loss.detach()))
    tell.title("what it costs")
    rows = data.shape[0] * spec.model.top_k
    tell.first(
        f"{rows} rows of {spec.model.d_model} go out from each rank and come back, forward and backward, less"
    )
    tell.first(
        "those whose expert is at home. The rank that receives the most rows is the slowest: hence the"
    )
    tell.first("losses that balance a router")
    return found


def _layer(
    x: torch.Tensor, router: torch.Tensor, experts: list[torch.nn.Parameter], spec: LessonSpec, axis: Axis
) -> tuple[torch.Tensor, tuple[list[int], list[int]]]:
    """[T/n, D] -> [T/n, D], and how many rows were sent to and received from each rank."""
    top_k, n_own = spec.model.top_k, len(experts)
    weights, numbers = route(x, router, top_k)  # [T/n, K] each
    # One row for each (token, choice), ordered by expert and so by rank as well.
    order = numbers.flatten().argsort(stable=True)
    rows = x[order // top_k]  # [T/n K, D]
    per_expert = torch.bincount(numbers.flatten(), minlength=spec.model.n_experts)
    # Each rank tells the others how many rows come for each of their experts.
    one = [n_own] * axis.size
    arriving = exchange_plain(per_expert, axis, one, one).view(axis.size, n_own)
    n_sent = per_expert.view(axis.size, n_own).sum(dim=1).tolist()
    n_received = arriving.sum(dim=1).tolist()
    received = exchange(rows, axis, n_sent, n_received)  # rank by rank, and in each expert by expert
    expert_of_row = torch.arange(n_own).repeat(axis.size).repeat_interleave(arriving.flatten())
    done = torch.zeros_like(received)
    for number, expert in enumerate(experts):
        mine = torch.nonzero(expert_of_row == number).flatten()
        done = done.index_add(0, mine, F.gelu(received[mine] @ expert))
    back = exchange(done, axis, n_received, n_sent)  # [T/n K, D], in the order in which they left
    weighted = back * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // top_k, weighted), (n_sent, n_received)


def _or_zeros(weight: torch.nn.Parameter) -> torch.Tensor:
    """The gradient; zeros where no token came."""
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
