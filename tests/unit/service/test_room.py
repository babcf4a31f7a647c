"""Room on a cluster, given as values: what fits, what a run keeps off, what it shrinks to. No Ray."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from jobs.spec.job import JobSpec, ResilienceSection, TrainSection
from jobs.spec.strategy import NativeStrategy
from ops.decision import Action, Decision
from ops.quarantine import ChangeKind, Fleet, NodeChange, Owner, fold
from ops.situation import decide_growth
from service.room import SETTLE_S, Place, Room
from tests.support.runs import tiny_spec

SHRINK = Decision(Action.SHRINK, "too few", n_ranks=2)
AWAY = Decision(Action.RESTART_WITHOUT_NODE, "broken")


def spec_of(dp: int, frac: float = 0.5) -> JobSpec:
    return tiny_spec(Path("runs")).model_copy(
        update={
            "strategy": NativeStrategy(dp=dp),
            "train": TrainSection(steps=10, global_batch_size=8, micro_batch_size=1),
            "resilience": ResilienceSection(shrink_to_frac=frac),
        }
    )


def nodes(*free: int) -> list[Place]:
    return [Place(f"id-{i}", f"n{i}", 4, n) for i, n in enumerate(free)]


def out(*names: str) -> Fleet:
    return fold(NodeChange(1.0, name, ChangeKind.CORDON, Owner.HUMAN) for name in names)


def test_only_what_is_free_on_nodes_that_may_be_used_counts() -> None:
    room = Room(spec_of(4))
    assert room.start(nodes(2, 1), out(), None, 0.0) is None
    start = room.start(nodes(2, 2), out(), None, 0.0)
    assert start is not None
    assert (start.spec.world_size, start.selector, start.off) == (4, {}, ())
    assert room.start(nodes(2, 2), out("n1"), None, 99.0) is None
    start = room.start(nodes(2, 2, 2), out("n1", "gone"), None, 0.0)
    assert start is not None
    assert start.selector == {"ray.io/node-id": "!in(id-1)"}
    assert start.off == ("n1",)
    leaving = [replace(place, is_leaving=True) for place in nodes(4)]
    assert room.start(leaving, out(), None, 99.0) is None


def test_a_node_that_was_left_is_used_again_only_after_it_was_started_anew_and_without_other_room() -> None:
    room = Room(spec_of(4))
    room.keep_off(["n1"], nodes(2, 2))
    assert room.start(nodes(2, 2), out(), AWAY, 99.0) is None
    spare = room.start(nodes(2, 2, 2), out(), AWAY, 0.0)
    assert spare is not None
    assert spare.off == ("n1",)
    back = [nodes(2)[0], Place("id-new", "n1", 4, 2)]
    again = room.start(back, out(), AWAY, 0.0)
    assert again is not None
    assert again.off == ()
    assert room.start(back, out("n1"), AWAY, 99.0) is None
    beside_a_spare = room.start([*back, Place("id-2", "n2", 4, 2)], out(), AWAY, 0.0)
    assert beside_a_spare is not None
    assert beside_a_spare.off == ("n1",)


def test_a_shrunk_run_keeps_its_global_batch_and_waits_a_moment_for_what_was_promised() -> None:
    room = Room(spec_of(4))
    assert room.can_shrink_to == 2
    assert room.start(nodes(3), out(), AWAY, 99.0) is None
    start = room.start(nodes(3), out(), SHRINK, 0.0)
    assert start is not None
    assert (start.spec.world_size, start.spec.train.global_batch_size, start.spec.grad_accum_steps) == (
        2,
        8,
        4,
    )
    promised = replace(SHRINK, n_ranks=3)
    assert Room(spec_of(8, 0.2)).start(nodes(2), out(), replace(promised, n_ranks=4), 0.0) is None
    late = Room(spec_of(8, 0.2)).start(nodes(2), out(), replace(promised, n_ranks=4), SETTLE_S + 1)
    assert late is not None
    assert late.spec.world_size == 2
    assert room.start(nodes(1), out(), SHRINK, 99.0) is None
    assert Room(spec_of(4, 1.0)).can_shrink_to == 4


def test_places_of_the_run_itself_are_room_and_leaving_nodes_are_none() -> None:
    room = Room(spec_of(4))
    have = [*nodes(0, 1), Place("id-2", "n2", 4, 4, is_leaving=True)]
    assert room.nodes(have, {"id-0": 2, "id-1": 9}).slots == {"n0": 2, "n1": 4, "n2": 0}


def test_a_node_that_was_left_is_no_room_to_grow_into_before_a_checkpoint() -> None:
    room = Room(spec_of(4))
    room.keep_off(["n1"], nodes(2, 2))
    for has_progressed, slots in ((False, {"n0": 2}), (True, {"n0": 2, "n1": 2})):
        found = room.growth(nodes(0, 2), {"id-0": 2}, out(), has_progressed=has_progressed)
        assert found.slots == slots
        assert (decide_growth(2, found) is not None) == has_progressed
    back = [nodes(0)[0], Place("id-new", "n1", 4, 2)]
    assert decide_growth(2, room.growth(back, {"id-0": 2}, out(), has_progressed=False)) is not None
    assert decide_growth(2, room.growth(back, {"id-0": 2}, out("n1"), has_progressed=True)) is None


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.sets(st.integers(0, 4)),
    st.sets(st.integers(0, 4)),
    st.sampled_from([None, SHRINK, AWAY]),
    st.floats(0, 20),
)
def test_no_start_is_on_a_node_out_of_service_nor_larger_than_the_room(
    free: list[int], held: set[int], left: set[int], decision: Decision | None, waited_s: float
) -> None:
    room = Room(spec_of(4))
    have = nodes(*free)
    room.keep_off([f"n{i}" for i in left], have)
    fleet = out(*(f"n{i}" for i in held))
    start = room.start(have, fleet, decision, waited_s)
    if start is None:
        return
    banned = {f"n{i}" for i in held | left if i < len(free)}
    text = start.selector.get("ray.io/node-id", "!in()")
    assert set(text.removeprefix("!in(").removesuffix(")").split(",")) - {""} == {
        place.node_id for place in have if place.address in banned
    }
    usable = sum(place.free for place in have if place.address not in banned)
    assert room.can_shrink_to <= start.spec.world_size <= usable
    assert start.spec.world_size == 4 or decision is SHRINK
