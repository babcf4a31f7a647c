"""What a DeepSpeed JSON may not ask for: one line each, with the JSON's line and the reason."""

import pytest

from tests.unit.jobs.spec.deepspeed_examples import (
    AUTOTP,
    BF16_FULL,
    FP16_OFFLOAD,
    FULL,
    PLAIN,
    UNIVERSAL,
)


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (
            AUTOTP,
            ("optim.lr=1e-3", "train.global_batch_size=8", "train.micro_batch_size=4"),
            [
                "ds.json:16: scheduler.params: refused: leaves out warmup_type, so DeepSpeed warms up "
                "along a "
                'logarithm; write "warmup_type": "linear"',
                "ds.json:27: tensor_parallel: refused: autotp_size=4: AutoTP is not used; set strategy.tp",
            ],
        ),
        (
            BF16_FULL,
            (),
            [
                "ds.json:19: bf16.bf16_master_weights_and_grads: refused: true is not supported: master "
                "weights and "
                "gradient reduction are fp32",
                "ds.json:20: bf16.bf16_optimizer_states: refused: true is not supported: the optimizer's "
                "moments are fp32",
                "ds.json:30: torch_autocast.enabled: refused: together with bf16 it would cast twice; "
                "train.precision "
                "is fp32, or bf16 with fp32 master weights; autocast is neither",
            ],
        ),
        (
            FP16_OFFLOAD,
            ("optim.lr=1e-3", "train.global_batch_size=8", "train.micro_batch_size=4"),
            [
                "ds.json:3: fp16.enabled: refused: fp16 needs loss scaling; train.precision is fp32, or "
                "bf16 with fp32 "
                "master weights",
                *(
                    f"ds.json:{line}: zero_optimization.{key}: refused: a section with device, pin_memory "
                    f"is not "
                    "supported: off-loading to CPU or NVMe needs DeepSpeed's CPUAdam, which is compiled "
                    "at run time; "
                    "nothing is built while a run starts (a killed build leaves a lock that hangs every "
                    "later rank)"
                    for line, key in ((9, "offload_optimizer"), (13, "offload_param"))
                ),
            ],
        ),
        (
            UNIVERSAL,
            ("optim.lr=1e-3",),
            [
                "ds.json:2: train_batch_size: refused: the batch does not add up: 16 != 16 x 1 x 2 "
                "(train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks)"
            ],
        ),
    ],
)
def test_examples_are_refused_with_the_reason(refused_json, config, overrides, expected):
    assert refused_json(config, PLAIN, *overrides) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"zero_optimization": {"stage": 3}},
            "ds.json:3: zero_optimization.stage: refused: says 3, but strategy.stage=1 at spec.yaml:5; "
            "make them agree "
            "or leave one of the two out",
        ),
        (
            {"train_batch_size": 16},
            "ds.json:2: train_batch_size: refused: says 16, but train.global_batch_size=8 at "
            "spec.yaml:4; make them "
            "agree or leave one of the two out",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}},
            "ds.json:5: optimizer.params.lr: refused: says 0.001, but optim.lr=0.0003 at spec.yaml:3; "
            "make them agree "
            "or leave one of the two out",
        ),
        (
            {"gradient_accumulation_steps": 4},
            "ds.json:2: gradient_accumulation_steps: refused: the batch does not add up: 8 != 2 x 4 x 2 "
            "(train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks)",
        ),
        (
            {"train_batch_sise": 8},
            "ds.json:2: train_batch_sise: refused: unknown key; did you mean train_batch_size?",
        ),
        ({"qqq": 8}, "ds.json:2: qqq: refused: unknown key of a DeepSpeed configuration"),
        (
            {"zero_optimization": {"reduce_buckt_size": 8}},
            "ds.json:3: zero_optimization.reduce_buckt_size: refused: unknown key; did you mean "
            "reduce_bucket_size?",
        ),
        (
            {"zero_optimization": {"overlap_comm": "yes"}},
            "ds.json:3: zero_optimization.overlap_comm: refused: wants true or false, got the text 'yes'",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": -1}},
            "ds.json:3: zero_optimization.reduce_bucket_size: refused: must be at least 0; got -1",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 0.5}},
            'ds.json:3: zero_optimization.reduce_bucket_size: refused: wants a whole number or "auto", '
            "got 0.5",
        ),
        (
            {"zero_optimization": True},
            "ds.json:2: zero_optimization: refused: wants a section with stage, got true",
        ),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "ds.json:3: zero_optimization.zero_quantized_weights: refused: true is not supported: "
            "weights and gradients "
            "are communicated unquantised",
        ),
        (
            {"train_batch_size": "8"},
            "ds.json:2: train_batch_size: refused: wants a whole number or \"auto\", got the text '8'",
        ),
        (
            {"train_micro_batch_size_per_gpu": 0},
            "ds.json:2: train_micro_batch_size_per_gpu: refused: must be at least 1; got 0",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}},
            "ds.json:3: optimizer.type: refused: OneBitAdam is not implemented; optim.kind is adamw or sgd",
        ),
        (
            {"optimizer": {"type": "AdmW"}},
            "ds.json:3: optimizer.type: refused: unknown optimizer AdmW; did you mean adamw?",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "ds.json:5: optimizer.params.adam_w_mode: refused: false is not supported: weight decay is "
            "decoupled (AdamW)",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}},
            "ds.json:5: optimizer.params.momentum: refused: 0.9 is not supported: SGD has no momentum",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"beta": [0.9, 0.95]}}},
            "ds.json:5: optimizer.params.beta: refused: unknown parameter of adamw; did you mean betas?",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {}}},
            "ds.json:3: scheduler.type: refused: OneCycle is not implemented; optim.schedule has cosine, "
            "wsd, linear "
            "and constant",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}},
            "ds.json:5: scheduler.params.warmup_type: refused: the text 'log' is not supported: warm-up "
            "is linear",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_min_lr": 1e-5}}},
            "ds.json:6: scheduler.params.warmup_min_lr: refused: 1e-05 is not supported: warm-up starts "
            "from 0",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}}},
            "ds.json:4: scheduler.params: refused: leaves out warmup_max_lr, and DeepSpeed then climbs "
            "to 0.001, not to "
            "the lr of 0.0003; write it",
        ),
        (
            {"communication_data_type": "fp16"},
            "ds.json:2: communication_data_type: refused: the text 'fp16' is not supported: gradients "
            "are reduced in fp32",
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "ds.json:3: data_types.grad_accum_dtype: refused: the text 'bf16' is not supported: "
            "gradients are "
            "accumulated and reduced in fp32",
        ),
        (
            {"curriculum_learning": {"enabled": True, "min_difficulty": 8}},
            "ds.json:3: curriculum_learning.enabled: refused: the data order is the sampler's, one "
            "sequence length for "
            "the whole run",
        ),
        (
            '{"steps_per_print": 1, "steps_per_print": 2}',
            "spec.yaml:5: strategy.deepspeed_config: "
            "ds.json: the key "
            "'steps_per_print' is written twice in one section; keep one of the two",
        ),
        (
            '{\n"steps_per_print": }',
            "spec.yaml:5: strategy.deepspeed_config: ds.json:2: not JSON: Expecting value",
        ),
        (
            "[]",
            "spec.yaml:5: strategy.deepspeed_config: ds.json:1: a DeepSpeed configuration is an "
            "object, got a list of 0",
        ),
    ],
)
def test_refused(refused_json, config, expected):
    assert refused_json(config, FULL) == [expected]
