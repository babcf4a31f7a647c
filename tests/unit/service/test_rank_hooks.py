"""The figures of a step line, and the peak that MFU is measured against."""

import json
import logging
from pathlib import Path

import pytest
import torch

from jobs.spec.data import DataSpec
from jobs.spec.model import ModelSpec
from service.rank_hooks import PEAK_MIN_PRODUCTS, MetricsHook, measure_peak_tflops
from tests.support.runs import step_record, tiny_spec

LLAMA_8B = ModelSpec(
    vocab_size=128_256, n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=14_336,
    max_seq_len=8192,
)  # fmt: skip


def lines_of_steps(folder: Path, peak_tflops: float, *rates: int) -> list[dict[str, float]]:
    """What one rank with the published model writes for steps of so many tokens, each in half a second."""
    spec = tiny_spec(folder).model_copy(update={"model": LLAMA_8B, "data": DataSpec(seq_len=8192)})
    assert (spec.world_size, spec.tracking.flops_convention) == (1, "causal_half")
    hook = MetricsHook(spec, folder / "metrics.jsonl", 0, 0, peak_tflops)
    for step, n_tokens in enumerate(rates, 1):
        hook.after_step(step_record(step, n_tokens=n_tokens, step_time_s=0.5), None)
    hook.on_end("finished", None, None)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_published_rate_is_written_as_published(tmp_path: Path) -> None:
    """14,451 tokens/s of an 8B model at 8k: 743.8 TFLOP/s a device."""
    (line,) = lines_of_steps(tmp_path, 989.0, 14_451 // 2)
    assert line["tokens_per_s"] == 14_450.0
    assert line["tflops_per_rank"] == pytest.approx(743.8, abs=0.1)
    assert line["mfu_frac"] == pytest.approx(743.8 / 989.0, abs=2e-4)


def test_a_step_above_the_peak_raises_it_and_no_mfu_is_above_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        lines = lines_of_steps(tmp_path, 400.0, 3000, 6000, 3000)
    slow, fast = lines[0]["tflops_per_rank"], lines[1]["tflops_per_rank"]
    assert slow < 400.0 < fast
    assert [line["mfu_frac"] for line in lines] == pytest.approx([slow / 400.0, 1.0, 0.5])
    (message,) = caplog.messages
    assert message.startswith("step 2 ran at 617.6 TFLOP/s a rank, above the peak of 400 ")


def test_the_peak_is_the_best_of_many_products_and_draws_no_random_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine that is busy for a while the first products are slow: each later one may be the best."""
    device, before = torch.device("cpu"), torch.get_rng_state()
    now_s, n_products = 0.0, 0

    def clock() -> float:
        nonlocal now_s, n_products
        now_s += 0.010 if n_products < 2 * PEAK_MIN_PRODUCTS else 0.001
        n_products += 0.5
        return now_s

    monkeypatch.setattr("service.rank_hooks.PEAK_MATRIX_SIZES", {"cpu": 8})
    monkeypatch.setattr("service.rank_hooks.time.perf_counter", clock)
    assert measure_peak_tflops(device, torch.float32) == pytest.approx(2 * 8**3 / 0.001 / 1e12)
    assert torch.equal(torch.get_rng_state(), before)
