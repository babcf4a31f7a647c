"""The native engine's sharded updates and its precisions: against a plain loop, and saved and restored."""

import math
from pathlib import Path

import pytest
import torch

from jobs.engines.build import build_engine
from jobs.models.init import build_llama
from jobs.models.losses import cross_entropy_sum
from jobs.optim.schedule import lr_at
from jobs.state import Chunk
from ops.checkpoint.layout import folder_name
from ops.checkpoint.reader import load_into, open_checkpoint
from tests.support.checkpoints import save_ranks
from tests.support.ranks import run_ranks
from tests.support.tiny_runs import engine_step, n_valid, plain_loop, tiny_model, tiny_spec, whole_batch

pytestmark = pytest.mark.parity
CPU = torch.device("cpu")
N_STEPS = 8


def _spec(dp, precision="fp32", zero_stage=1, accum=1, **changes):
    spec = tiny_spec(dp, accum, precision, **changes)
    strategy = spec.strategy.model_copy(update={"zero_stage": zero_stage})
    return spec.model_copy(update={"strategy": strategy})


def _chunks(engine):
    return [(c.name, c.global_shape, c.offsets, c.tensor.clone(), c.is_writer) for c in engine.chunks()]


def _box(offsets, tensor):
    return tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))


def _assemble(ranks):
    """Whole tensors from what is written, which must tile each tensor exactly once."""
    whole, count = {}, {}
    for name, shape, offsets, tensor, is_writer in (chunk for chunks in ranks for chunk in chunks):
        if is_writer:
            box = _box(offsets, tensor)
            whole.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[box] = tensor
            count.setdefault(name, torch.zeros(shape, dtype=torch.int64))[box] += 1
    assert all(bool((found == 1).all()) for found in count.values())
    return whole


def _fill(engine, whole, lr):
    for chunk in engine.chunks():
        chunk.tensor.copy_(whole[chunk.name][_box(chunk.offsets, chunk.tensor)])
    engine.after_load(lr)


def _bytes(engine):
    """Bytes on this rank, by what they are for: each storage once."""
    parts = {
        "weights": [bucket.weights for bucket in engine._buckets],
        "masters": [bucket.masters for bucket in engine._buckets],
        "gradients": [bucket.gradients for bucket in engine._buckets],
        **engine._optimizer.state,
    }
    seen, found = set(), {}
    for kind, tensors in parts.items():
        new = [t for t in tensors if t.untyped_storage().data_ptr() not in seen]
        seen.update(t.untyped_storage().data_ptr() for t in new)
        found[kind] = sum(t.untyped_storage().nbytes() for t in new)
    return found


def _train(groups, spec, steps, saved):
    engine = build_engine(spec, groups, CPU)
    if isinstance(saved, Path):
        load_into(open_checkpoint(saved), engine.chunks(), strict=False)
        engine.after_load(spec.optim.lr)
    elif saved is not None:
        _fill(engine, saved, spec.optim.lr)
    results = [engine_step(engine, spec, groups.dp.rank, step) for step in steps]
    weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "weights": weights,
        "chunks": _chunks(engine),
        "bytes": _bytes(engine),
    }


def _run(tmp_path, spec, steps=range(N_STEPS), saved=None):
    """Ranks that begin anew, or where whole tensors or a checkpoint folder say."""
    return run_ranks(_train, spec.strategy.dp, tmp_path, spec, steps, saved)


def _check(ranks, spec, n_steps, tolerance):
    losses, norms, model = plain_loop(spec, n_steps)
    for found in ranks:
        assert found["losses"] == pytest.approx(losses, abs=tolerance, rel=0)
        assert found["norms"] == pytest.approx(norms, rel=tolerance)
        for name, parameter in model.named_parameters():
            assert (parameter - found["weights"][name]).abs().max() < tolerance, name


@pytest.mark.parametrize(("dp", "accum"), [(2, 3), (4, 1)])
def test_sharded_updates_equal_a_plain_loop(tmp_path, dp, accum):
    spec = _spec(dp, accum=accum)
    ranks = _run(tmp_path, spec)
    _check(ranks, spec, N_STEPS, 1e-5)
    losses = ranks[0]["losses"]
    assert losses[-1] < losses[0]
    for found in ranks:
        n_moments = found["bytes"]["optim/exp_avg"]
        assert n_moments * dp == found["bytes"]["weights"], "moments are this rank's part only"
    whole = _assemble([found["chunks"] for found in ranks])
    assert all(torch.equal(whole[f"model/{n}"], w) for n, w in ranks[0]["weights"].items())


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_fp64_equals_a_plain_loop_to_the_last_digits(tmp_path, zero_stage):
    spec = _spec(2, "fp64", zero_stage, accum=3, model=tiny_model(tie_embeddings=True))
    _check(_run(tmp_path, spec), spec, N_STEPS, 1e-11)


def test_one_sharded_sgd_step(tmp_path):
    """SGD's step is the gradient itself: a wrong scale, which AdamW forgives, shows at once."""
    spec = _spec(2, "fp64", kind="sgd", lr=4.0)
    _check(_run(tmp_path, spec, range(1)), spec, 1, 1e-12)


def test_sharded_state_goes_on_whole_and_whole_state_sharded(tmp_path):
    """Moments included: four ranks with a part each, two with all, and back."""
    unbroken = _run(tmp_path, _spec(4), range(6))
    saved = _assemble([found["chunks"] for found in _run(tmp_path, _spec(4), range(2))])
    replicated = _run(tmp_path, _spec(2, zero_stage=0), range(2, 4), saved)
    saved = _assemble([found["chunks"] for found in replicated])
    sharded = _run(tmp_path, _spec(2), range(4, 6), saved)
    losses = replicated[0]["losses"] + sharded[0]["losses"]
    assert losses == pytest.approx(unbroken[0]["losses"][2:], abs=1e-5, rel=0)
    assert _assemble([found["chunks"] for found in sharded])["optim/step"].tolist() == [6]


@pytest.mark.parametrize("precision", ["bf16", "bf16_kahan"])
def test_a_sharded_run_resumes_bitwise_from_files(tmp_path, precision):
    spec = _spec(2, precision)
    unbroken = _run(tmp_path, spec, range(6))
    states = [[Chunk(*chunk) for chunk in rank["chunks"]] for rank in _run(tmp_path, spec, range(3))]
    manifest = save_ranks(tmp_path / "checkpoints", 3, states)
    assert manifest.tensors["model/norm.weight"].dtype == ("F32" if precision == "bf16" else "BF16")
    assert any(name.startswith("optim/kahan/") for name in manifest.tensors) == (precision != "bf16")
    resumed = _run(tmp_path, spec, range(3, 6), tmp_path / "checkpoints" / folder_name(3))
    assert resumed[0]["losses"] == unbroken[0]["losses"][3:]
    one, other = (_assemble([found["chunks"] for found in ranks]) for ranks in (unbroken, resumed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(unbroken[1]["weights"][n], w) for n, w in resumed[0]["weights"].items())


# Pure bf16


def test_pure_bf16_takes_12_bytes_a_parameter(tmp_path):
    found = _run(tmp_path, _spec(1, "bf16_kahan", bucket_mib=1.0), range(1))[0]["bytes"]
    n_params = found["weights"] / 2  # the padding of the buckets included
    assert n_params == pytest.approx(tiny_model().n_params, rel=0.001)
    per_param = {kind: n_bytes / n_params for kind, n_bytes in found.items()}
    assert per_param == {
        "weights": 2,
        "masters": 0,
        "gradients": 2,
        "optim/exp_avg": 2,
        "optim/exp_avg_sq": 4,
        "optim/kahan": 2,
    }
    assert sum(per_param.values()) == 12


def _rounded_loop(spec, n_steps):
    """Pure bf16 without compensation: torch's AdamW on bf16 weights. Distance is what rounding loses."""
    model = build_llama(spec.model, spec.run.seed, CPU, torch.bfloat16)
    optim = spec.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=0.0, foreach=False
    )
    for step in range(n_steps):
        batch = whole_batch(step)
        logits = model(batch.tokens, batch.positions, batch.document_ids)
        loss = cross_entropy_sum(logits, batch.labels) / n_valid(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = lr_at(optim, spec.train.steps, step)
        optimizer.step()
    return {f"model/{name}": p.detach().float() for name, p in model.named_parameters()}


def test_compensated_bf16_follows_fp32_masters_where_rounding_loses_the_way(tmp_path):
    """Updates far below a weight's last bit: 20 steps of 2e-5 on weights of about 0.1."""
    changes = {"lr": 2e-5, "weight_decay": 0.0, "grad_clip_norm": None}
    steps = range(20)
    start = _assemble([_run(tmp_path, _spec(1, "bf16", **changes), range(0))[0]["chunks"]])
    masters = _assemble([_run(tmp_path, _spec(1, "bf16", **changes), steps)[0]["chunks"]])
    kahan = _assemble([_run(tmp_path, _spec(1, "bf16_kahan", **changes), steps)[0]["chunks"]])
    rounded = _rounded_loop(_spec(1, **changes), len(steps))
    squares = {"moved": 0.0, "kahan": 0.0, "rounded": 0.0}
    for name in (name for name in start if name.startswith("model/")):
        begun = start[name].bfloat16().float()
        moved = masters[name] - start[name]
        compensated = kahan[name].float() + kahan[name.replace("model/", "optim/kahan/")].float() - begun
        squares["moved"] += moved.square().sum().item()
        squares["kahan"] += (compensated - moved).square().sum().item()
        squares["rounded"] += (rounded[name] - begun - moved).square().sum().item()
    distance = {kind: math.sqrt(square / squares["moved"]) for kind, square in squares.items()}
    assert distance["kahan"] < 0.2
    assert distance["rounded"] > 5 * distance["kahan"]
