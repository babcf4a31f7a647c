"""The bubble of known traces, and the closed forms."""

import pytest

from jobs.planner.bubble import Action, bubble_frac, busy_s, ideal_bubble, span_s


def one_f_one_b(pp: int, n_micro_batches: int, backward_s: float = 2.0):
    """Traces of 1F1B in an ideal world: a forward lasts 1 s, a backward 2 s, sending nothing."""
    forward_end, backward_end = {}, {}
    traces = [[] for _ in range(pp)]
    free_at = [0.0] * pp
    todo = []
    for rank in range(pp):
        warmup = min(pp - rank, n_micro_batches)
        order = [("forward", i) for i in range(warmup)]
        for i in range(n_micro_batches):
            order.append(("backward", i))
            if warmup + i < n_micro_batches:
                order.append(("forward", warmup + i))
        todo.append(order)
    while any(todo):
        for rank in range(pp):
            if not todo[rank]:
                continue
            kind, i = todo[rank][0]
            if kind == "forward":
                ready = 0.0 if rank == 0 else forward_end.get((rank - 1, i))
            else:
                ready = forward_end[rank, i] if rank == pp - 1 else backward_end.get((rank + 1, i))
            if ready is None:
                continue
            start = max(ready, free_at[rank])
            end = start + (1.0 if kind == "forward" else backward_s)
            (forward_end if kind == "forward" else backward_end)[rank, i] = end
            free_at[rank] = end
            traces[rank].append(Action(kind, rank, i, start, end))
            todo[rank].pop(0)
    return [tuple(trace) for trace in traces]


@pytest.mark.parametrize(("pp", "m"), [(2, 2), (2, 4), (2, 8), (4, 4), (4, 9), (8, 8)])
def test_an_ideal_trace_has_the_ideal_bubble(pp, m):
    traces = one_f_one_b(pp, m)
    assert bubble_frac(traces) == pytest.approx(ideal_bubble("1f1b", pp, m), abs=1e-12)


def test_figures_of_a_trace():
    trace = (Action("forward", 0, 0, 0.5, 1.5), Action("backward", 0, 0, 3.0, 5.0))
    assert busy_s(trace) == 3.0
    assert span_s(trace) == 5.0
    assert bubble_frac([trace, ()]) == pytest.approx(1 - 3 / 10)


def test_nothing_ran():
    assert bubble_frac([(), ()]) == 0.0


def test_ideal_figures():
    """(p - 1) / m of the busy time is (p - 1) / (m + p - 1) of the span; v stages divide the first by v."""
    assert ideal_bubble("gpipe", 4, 12) == ideal_bubble("1f1b", 4, 12) == 3 / 15
    interleaved = ideal_bubble("interleaved_1f1b", 4, 12, 3)
    assert interleaved / (1 - interleaved) == pytest.approx(3 / 12 / 3)
    assert ideal_bubble("interleaved_zero_bubble", 4, 12, 2) < ideal_bubble("interleaved_1f1b", 4, 12, 2)
    assert ideal_bubble("zbv_zero_bubble", 4, 7, 2) == 0.0
    assert ideal_bubble("zbv_zero_bubble", 4, 4, 2) > 0.0
