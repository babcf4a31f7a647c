from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jobs.state import boxes_of_flat_range

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_tile_the_range_in_order(shape, data):
    n = prod(shape)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    whole = torch.arange(n).view(shape)
    boxes = boxes_of_flat_range(shape, start, stop)
    assert len(boxes) <= 2 * len(shape) - 1
    found = [
        whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
        for offsets, sizes in boxes
    ]
    assert torch.equal(torch.cat(found) if found else torch.empty(0), torch.arange(start, stop))


def test_a_range_outside_is_refused():
    with pytest.raises(ValueError, match="not inside a tensor of 6 elements"):
        boxes_of_flat_range((2, 3), 4, 7)
