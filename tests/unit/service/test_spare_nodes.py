"""Which nodes are held as spares, and how many are wanted. No Ray."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.spec.job import ResilienceSection
from service.room import Place
from service.spare_nodes import choose_spares, wanted_spares
from tests.support.runs import tiny_spec

HAVE = [Place(f"id-{i}", f"n{i}", 8, free) for i, free in enumerate((0, 0, 8, 8, 3, 6))]
RANKS_ON = {"id-0": 6, "id-1": 6}


def chosen(
    n_wanted: int, *, held: frozenset[str] = frozenset(), out: frozenset[str] = frozenset()
) -> list[str]:
    return [place.address for place in choose_spares(HAVE, RANKS_ON, held, out, n_wanted)]


def test_a_spare_can_take_the_place_of_the_fullest_node_of_the_run() -> None:
    assert chosen(0) == []
    assert chosen(2) == ["n2", "n3"]
    assert chosen(9) == ["n2", "n3", "n5"]
    assert chosen(2, held=frozenset({"id-2"})) == ["n3"]
    assert chosen(9, out=frozenset({"n2"})) == ["n3", "n5"]
    leaving = [replace(place, is_leaving=place.node_id == "id-3") for place in HAVE]
    assert [p.address for p in choose_spares(leaving, RANKS_ON, set(), set(), 9)] == ["n2", "n5"]
    twin = [*HAVE, Place("id-9", "n0", 8, 8)]
    assert "n0" not in [p.address for p in choose_spares(twin, RANKS_ON, set(), set(), 9)]


@pytest.mark.parametrize(
    ("spares", "n_nodes", "wanted"), [(0, 128, 0), (3, 128, 3), ("auto", 128, 4), ("auto", 1024, 13)]
)
def test_the_spec_says_how_many_or_leaves_it_to_the_plan(
    spares: int | str, n_nodes: int, wanted: int
) -> None:
    resilience = ResilienceSection(spares=spares)
    spec = tiny_spec(Path("runs")).model_copy(update={"resilience": resilience})
    assert wanted_spares(spec, n_nodes) == wanted
