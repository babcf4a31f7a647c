"""What a resume may change, the announced learning rate, and the fingerprint of a model."""

import math

import pytest

from jobs.optim.schedule import lr_at
from jobs.spec.compare import announce_lr, compare_for_resume, model_changes, model_fingerprint
from jobs.spec.load import load_spec
from tests.unit.jobs.spec.conftest import VALID


@pytest.fixture
def load(write_spec):
    def load(*overrides: str):
        return load_spec(write_spec(VALID), overrides)

    return load


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("model.d_model=256", "model.d_model: 128 -> 256"),
        ("model.n_layers=2", "model.n_layers: 4 -> 2"),
        ("model.rope_theta=500000.0", "model.rope_theta: 10000.0 -> 500000.0"),
        (
            "model.rope_scaling={kind: llama3}",
            'model.rope_scaling: null -> {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, '
            '"high_freq_factor": 4.0, "original_max_seq_len": 8192}',
        ),
        ("model.norm_eps=1e-6", "model.norm_eps: 1e-05 -> 1e-06"),
        ("model.tie_embeddings=true", "model.tie_embeddings: false -> true"),
        ("data.seq_len=32", "data.seq_len: 64 -> 32"),
        ("data.packing=pad", "data.packing: concat -> pad"),
        ("data.mask_documents=false", "data.mask_documents: true -> false"),
        ("data.validation_frac=0.5", "data.validation_frac: 0.01 -> 0.5"),
        ("data.tokenizer={kind: bpe, vocab_size: 300}", "data.tokenizer.kind: bytes -> bpe"),
        ("data.sources=[{kind: python, weight: 2}]", "data.sources.0.weight: 1.0 -> 2.0"),
        ("data.sources=[{kind: text, path: /a}]", "data.sources.0.kind: python -> text"),
        ("run.seed=1", "run.seed: 0 -> 1"),
        ("optim.kind=sgd", "optim.kind: adamw -> sgd"),
    ],
)
def test_breaking(load, override, change):
    found = compare_for_resume(load(), load(override))
    assert change in [str(one) for one in found.breaking]
    refusal = found.refusal()
    assert refusal is not None
    assert change in refusal
    assert "start a new run under another run.name" in refusal


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("train.steps=20", "train.steps: 10 -> 20"),
        ("optim.lr=1e-3", "optim.lr: 0.0003 -> 0.001"),
        ("optim.weight_decay=0.0", "optim.weight_decay: 0.1 -> 0.0"),
        ("train.global_batch_size=16", "train.global_batch_size: 8 -> 16"),
        ("train.precision=bf16", "train.precision: fp32 -> bf16"),
        ("strategy.dp=4", "strategy.dp: 2 -> 4"),
        ("strategy={kind: deepspeed_zero, stage: 3, dp: 2}", "strategy.kind: native -> deepspeed_zero"),
        ("checkpoint.every_steps=5", "checkpoint.every_steps: null -> 5"),
        ("model.max_seq_len=2048", "model.max_seq_len: 1024 -> 2048"),
        ("model.init_std=0.01", "model.init_std: 0.02 -> 0.01"),
    ],
)
def test_announced(load, override, change):
    found = compare_for_resume(load(), load(override))
    assert found.breaking == ()
    assert found.refusal() is None
    assert change in [str(one) for one in found.announced]


def test_equal_specs_have_no_change(load):
    found = compare_for_resume(load(), load())
    assert (found.breaking, found.announced) == ((), ())


def test_where_values_came_from_is_no_change(load, write_spec):
    model = load().model
    keys = model.model_dump(exclude={"preset", "hf_config"})
    written = "\n".join(f"  {key}: {'null' if value is None else value}" for key, value in keys.items())
    plain = load_spec(write_spec(VALID.replace("  preset: tiny", written.replace("False", "false"))))
    assert plain.model.preset is None
    found = compare_for_resume(load(), plain)
    assert (found.breaking, found.announced) == ((), ())


def test_several_breaking_keys_are_all_named(load):
    refusal = compare_for_resume(load(), load("model.n_layers=2", "run.seed=7", "optim.lr=1.0")).refusal()
    assert refusal is not None
    assert "run.seed: 0 -> 7; model.n_layers: 4 -> 2" in refusal
    assert "optim.lr" not in refusal


def test_changed_total_is_announced_with_both_rates(load):
    """NVIDIA-NeMo/Automodel#763: warm-up 10, cosine to 100, stopped at 50, resumed with 200."""
    base = ["optim.schedule={kind: cosine, warmup_steps: 10}", "train.steps=100"]
    old, new = load(*base), load(*base, "train.steps=200")
    before, after = lr_at(old.optim, 100, 50), lr_at(new.optim, 200, 50)
    assert announce_lr(old, new, 50) == (
        f"train.steps: 100 -> 200: the learning rate of step 51 is {after:.6g}, it would have been "
        f"{before:.6g}"
    )
    # step 51 is 40 steps behind the warm-up, of 90 and of 190
    assert before == pytest.approx(3e-4 * (0.1 + 0.9 * (1 + math.cos(math.pi * 40 / 90)) / 2))
    assert after == pytest.approx(3e-4 * (0.1 + 0.9 * (1 + math.cos(math.pi * 40 / 190)) / 2))


def test_changed_total_says_nothing_where_the_rate_is_the_same(load):
    constant = "optim.schedule={kind: constant}"
    assert announce_lr(load(constant), load(constant, "train.steps=200"), 5) is None
    warm = "optim.schedule={kind: cosine, warmup_steps: 8}"
    assert announce_lr(load(warm), load(warm, "train.steps=200"), 5) is None
    changed = announce_lr(load(warm), load(warm, "optim.lr=6e-4", "train.steps=20"), 5)
    assert changed == (
        "optim.lr: 0.0003 -> 0.0006; train.steps: 10 -> 20: "
        "the learning rate of step 6 is 0.00045, it would have been 0.000225"
    )


@pytest.mark.parametrize(
    "override",
    [
        "model.d_model=256",
        "model.rope_theta=500000.0",
        "model.norm_eps=1e-6",
        "model.rope_scaling={kind: llama3}",
        "model.tie_embeddings=true",
        "model.head_dim=64",
        "model.vocab_size=513",
    ],
)
def test_fingerprint_tells_models_apart(load, override):
    """NVIDIA-NeMo/Automodel#836: also where all shapes are equal (rope base, epsilon)."""
    old, new = load(), load(override)
    assert model_fingerprint(old.model) != model_fingerprint(new.model)
    assert override.split("=")[0] in [change.key for change in model_changes(old, new)]


@pytest.mark.parametrize(
    "override", ["run.seed=3", "model.init_std=0.01", "model.max_seq_len=512", "optim.lr=1.0"]
)
def test_fingerprint_ignores_what_does_not_change_the_meaning(load, override):
    old, new = load(), load(override)
    assert model_fingerprint(old.model) == model_fingerprint(new.model)
    assert model_changes(old, new) == ()
