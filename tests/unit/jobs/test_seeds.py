import torch

from jobs.seeds import derive_seed, rng_state, seed_rank, set_rng_state

CPU = torch.device("cpu")


def test_seeds_differ_by_seed_and_by_every_name():
    seeds = [
        derive_seed(0),
        derive_seed(1),
        derive_seed(0, "a"),
        derive_seed(0, "a", 1),
        derive_seed(0, "a", 2),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_in_every_process_and_release():
    assert derive_seed(0, "init", "norm.weight") == 7880316769018514316


def test_dropout_goes_on_bit_for_bit_from_a_saved_state():
    seed_rank(3, 1)
    torch.nn.functional.dropout(torch.ones(1000), 0.5)
    saved = rng_state(CPU).clone()
    unbroken = torch.nn.functional.dropout(torch.ones(1000), 0.5)
    seed_rank(4, 0)
    assert not torch.equal(torch.nn.functional.dropout(torch.ones(1000), 0.5), unbroken)
    set_rng_state(saved, CPU)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(1000), 0.5), unbroken)


def test_ranks_have_streams_of_their_own():
    draws = []
    for rank in range(3):
        seed_rank(0, rank)
        draws.append(torch.rand(4))
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
