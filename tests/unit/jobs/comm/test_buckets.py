from math import prod

from hypothesis import given
from hypothesis import strategies as st

from jobs.comm.buckets import ALIGN, plan_buckets, plan_writers

SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12
).map(lambda shapes: {f"p{i}": shape for i, shape in enumerate(shapes)})


@given(SHAPES, st.integers(4, 2000))
def test_every_parameter_has_one_aligned_place_and_runs_are_sorted_by_decay(shapes, bucket_bytes):
    buckets = plan_buckets(shapes, bucket_bytes)
    assert sorted(slot.name for bucket in buckets for slot in bucket.slots) == sorted(shapes)
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.start >= end
            assert slot.start % ALIGN == 0
            assert slot.shape == shapes[slot.name]
            assert (slot.stop <= bucket.decayed_stop) == (len(slot.shape) > 1)
            end = slot.stop
        assert end <= bucket.stop < end + ALIGN
        n_bytes = sum(4 * prod(slot.shape) for slot in bucket.slots)
        assert n_bytes <= bucket_bytes or len(bucket.slots) == 1


def test_buckets_come_in_backward_order():
    shapes = {"embed": (10, 4), "layer": (4, 4), "norm": (4,), "head": (10, 4)}
    buckets = plan_buckets(shapes, 90)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [
        ["head"],
        ["layer", "norm"],
        ["embed"],
    ]


@given(SHAPES, st.integers(1, 7))
def test_writers_tile_each_tensor_once_in_equal_shares(shapes, n_writers):
    plan = plan_writers(shapes, n_writers)
    written = [0] * n_writers
    for name, shape in shapes.items():
        end = 0
        for rows in plan[name]:
            assert rows.start == end
            assert rows.stop > rows.start
            written[rows.writer] += (rows.stop - rows.start) * prod(shape[1:])
            end = rows.stop
        assert end == shape[0]
    widest_row = max(prod(shape[1:]) for shape in shapes.values())
    fair = sum(prod(shape) for shape in shapes.values()) / n_writers
    assert all(abs(n - fair) <= 2 * widest_row for n in written)


def test_a_bucket_divides_into_the_parts_that_are_asked_for():
    for n_parts in (1, 3, 4, 7):
        for bucket in plan_buckets({"a": (5, 7), "b": (3,), "c": (100,)}, 200, n_parts):
            assert bucket.stop % (n_parts * ALIGN) == 0
            assert bucket.slots[-1].stop <= bucket.stop < bucket.slots[-1].stop + ALIGN * (n_parts + 1)
