"""What DeepSpeed is told, and the shares of state that ranks write at stage 0."""

import pytest
import torch

from jobs.engines.deepspeed_state import (
    Fragment,
    Piece,
    create_moments,
    fragment_chunks,
    replicated_fragments,
)
from jobs.engines.deepspeed_zero import zero_config
from jobs.parallel.placement import Placement
from tests.support.deepspeed_runs import zero_spec


def test_batch_numbers_are_all_told_and_multiply_to_the_global_batch() -> None:
    config = zero_config(zero_spec(3, 1))
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 3
    assert config["train_batch_size"] == product == 24


def test_users_options_win_over_defaults_but_not_over_the_stage() -> None:
    options = {"overlap_comm": True, "reduce_bucket_size": 10**9, "stage": 2}
    section = zero_config(zero_spec(2, 1, options))["zero_optimization"]
    assert section == {"overlap_comm": True, "reduce_bucket_size": 10**9, "stage": 1}
    whole_model = 2 * (20 * 6 * (8 + 4) + 3 * 20 * 27 + 2 * 20) + 20 + 2 * 67 * 20
    assert zero_config(zero_spec(2, 1))["zero_optimization"]["reduce_bucket_size"] == whole_model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_reduced_and_accumulated_in_fp32(precision: str) -> None:
    config = zero_config(zero_spec(2, 2, precision=precision))
    assert config["communication_data_type"] == "fp32"
    assert config.get("data_types") == ({"grad_accum_dtype": "fp32"} if precision == "bf16" else None)


def test_fragment_across_rows_gives_live_boxes_of_master_and_moments() -> None:
    flat = torch.arange(20.0, requires_grad=True)
    optimizer = torch.optim.AdamW([flat], fused=True)
    create_moments(optimizer, [flat])
    # Rows 2..5 and columns 3..7 of w; elements 3..11 of that piece are at 10..18 of the flat tensor.
    piece = Placement("w", (9, 8), (2, 3), (4, 5), "data", 1)
    chunks = fragment_chunks([Fragment(piece, 3, 9, flat, 10, True)], optimizer)
    boxes = [((2, 6), (1, 2)), ((3, 3), (1, 5)), ((4, 3), (1, 2))]
    assert [(c.name, c.offsets, tuple(c.tensor.shape)) for c in chunks] == [
        (name, offsets, sizes)
        for name in ("model/w", "optim/exp_avg/w", "optim/exp_avg_sq/w")
        for offsets, sizes in boxes
    ]
    assert chunks[1].tensor.tolist() == [[12.0, 13.0, 14.0, 15.0, 16.0]]
    chunks[1].tensor.zero_()
    chunks[4].tensor.fill_(7.0)
    assert flat[12:17].tolist() == [0.0] * 5
    assert optimizer.state[flat]["exp_avg"].nonzero().flatten().tolist() == [12, 13, 14, 15, 16]


def test_ranks_write_equal_shares_of_replicated_state() -> None:
    pieces = {
        torch.zeros(shape): Piece(Placement(name, shape, (0,) * len(shape), shape, "data", 2), True)
        for name, shape in {"a": (7, 3), "b": (11,)}.items()
    }
    shares = [replicated_fragments(pieces, rank, 2) for rank in range(2)]
    written = [sum(f.n_elements for f in share if f.is_writer) for share in shares]
    assert sum(written) == 7 * 3 + 11
    assert all(abs(n_elements - 16) < 3 for n_elements in written), "equal within one row"
    held = [sum(f.n_elements for f in share) for share in shares]
    assert held == [32, 32], "every rank restores everything"
