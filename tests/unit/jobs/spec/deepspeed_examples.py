"""Specs that name a DeepSpeed JSON, and public examples of such JSONs, of the kinds that users bring."""

PLAIN = """\
model: {preset: tiny}
data: {seq_len: 64}
optim: {}
train: {steps: 10}
strategy: {kind: deepspeed_zero, dp: 2, deepspeed_config: ds.json}
"""
FULL = """\
model: {preset: tiny}
data: {seq_len: 64}
optim: {lr: 3e-4}
train: {steps: 10, global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: deepspeed_zero, dp: 2, stage: 1, deepspeed_config: ds.json}
"""

ALMOST_EMPTY = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 100}
AUTOTP = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {"stage": 2, "gather_16bit_weights_on_model_save": True},
    "tensor_parallel": {"autotp_size": 4},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 1,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
BF16_FULL = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 100,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 0,
    },
    "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"},
}
FP16_OFFLOAD = {
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "sub_group_size": 1e14,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_fp16_weights_on_model_save": True,
    },
    "train_batch_size": "auto",
}
PIPELINE = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8}},
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}
UNIVERSAL = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 16,
    "steps_per_print": 1,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "wall_clock_breakdown": False,
}
ZENFLOW = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
}
EXAMPLES = {
    "almost_empty": ALMOST_EMPTY,
    "autotp": AUTOTP,
    "bf16_full": BF16_FULL,
    "fp16_offload": FP16_OFFLOAD,
    "pipeline": PIPELINE,
    "universal": UNIVERSAL,
    "zenflow": ZENFLOW,
}
