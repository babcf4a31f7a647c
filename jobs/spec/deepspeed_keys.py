"""What becomes of each key of a DeepSpeed JSON, as tables. The reading is in deepspeed_json.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from jobs.spec.tree import Json


@dataclass(frozen=True)
class ZeroOption:
    """A key of zero_optimization that is handed to DeepSpeed as it is."""

    kind: Literal["bool", "int"]
    stages: tuple[int, ...]
    """Stages at which it acts."""


ZERO_OPTIONS: Final[Mapping[str, ZeroOption]] = {
    "contiguous_gradients": ZeroOption("bool", (1, 2, 3)),
    "reduce_scatter": ZeroOption("bool", (1, 2, 3)),
    "reduce_bucket_size": ZeroOption("int", (1, 2, 3)),
    "overlap_comm": ZeroOption("bool", (1, 2, 3)),
    "allgather_bucket_size": ZeroOption("int", (1, 2)),
    "allgather_partitions": ZeroOption("bool", (1, 2)),
    "use_multi_rank_bucket_allreduce": ZeroOption("bool", (1, 2)),
    "round_robin_gradients": ZeroOption("bool", (1, 2)),
    "parameter_alignment": ZeroOption("bool", (1, 2)),
    "ignore_unused_parameters": ZeroOption("bool", (2,)),
    "sub_group_size": ZeroOption("int", (3,)),
    "stage3_prefetch_bucket_size": ZeroOption("int", (3,)),
    "stage3_param_persistence_threshold": ZeroOption("int", (3,)),
    "stage3_model_persistence_threshold": ZeroOption("int", (3,)),
    "stage3_max_live_parameters": ZeroOption("int", (3,)),
    "stage3_max_reuse_distance": ZeroOption("int", (3,)),
    "stage3_module_granularity_threshold": ZeroOption("int", (3,)),
    "stage3_use_all_reduce_for_fetch_params": ZeroOption("bool", (3,)),
    "stage3_allgather_sequential": ZeroOption("bool", (3,)),
    "memory_efficient_linear": ZeroOption("bool", (3,)),
}

ZERO_ALIASES: Final[Mapping[str, str]] = {
    name.removeprefix("stage3_"): name for name in ZERO_OPTIONS if name.startswith("stage3_")
}
"""DeepSpeed also takes the stage3_ options without their prefix."""

_OFFLOAD: Final = (
    "off-loading to CPU or NVMe needs DeepSpeed's CPUAdam, which is compiled at run time; nothing is built "
    "while a run starts (a killed build leaves a lock that hangs every later rank)"
)
_QUANTISED: Final = "weights and gradients are communicated unquantised"
_OWN_FILES: Final = (
    "checkpoints are Packtrain's own format, and `packtrain checkpoint export` gathers the weights"
)

ZERO_REFUSED: Final[Mapping[str, tuple[tuple[Json, ...], str]]] = {
    "offload_optimizer": ((None, {"device": "none"}), _OFFLOAD),
    "offload_param": ((None, {"device": "none"}), _OFFLOAD),
    "cpu_offload": ((None, False), _OFFLOAD),
    "cpu_offload_param": ((None, False), _OFFLOAD),
    "zenflow": ((None,), f"ZenFlow updates off-loaded states, and {_OFFLOAD}"),
    "compute_grad_norm": ((True,), "the gradient norm is recorded at every step"),
    "legacy_stage1": ((False,), "stage 1 is DeepSpeed's present one"),
    "zero_hpz_partition_size": ((1, 0), "parameters have no secondary partition (hpZ)"),
    "zero_quantized_weights": ((False,), _QUANTISED),
    "zero_quantized_nontrainable_weights": ((False,), _QUANTISED),
    "zero_quantized_gradients": ((False,), _QUANTISED),
    "leaf_module": ((None, {}), "leaf modules are for mixtures of experts, and the model is a plain Llama"),
    "mics_shard_size": ((-1, 0), "parameters are sharded over all data-parallel ranks (no MiCS)"),
}
"""Keys whose only supported values are those named, with the reason for anything else."""

ZERO_IGNORED: Final[Mapping[str, str]] = {
    "gather_16bit_weights_on_model_save": _OWN_FILES,
    "stage3_gather_16bit_weights_on_model_save": _OWN_FILES,
    "stage3_gather_fp16_weights_on_model_save": _OWN_FILES,
    "load_from_fp32_weights": _OWN_FILES,
    "elastic_checkpoint": _OWN_FILES,
    "pipeline_loading_checkpoint": _OWN_FILES,
    "cpu_offload_use_pin_memory": "nothing is off-loaded",
    "override_module_apply": "the model initialises its weights without Module.apply",
    "log_trace_cache_warnings": "only prints",
    "enable_sanity_checks": "only checks DeepSpeed itself",
    "save_muon_momentum_buffer_in_memory": "the optimizer is not Muon",
    "mics_hierarchical_params_gather": "there is no MiCS",
}

IGNORED: Final[Mapping[str, str]] = {
    "steps_per_print": "tracking.log_every_steps says how often a line is printed",
    "wall_clock_breakdown": "step and data times are always recorded",
    "memory_breakdown": "memory is always recorded",
    "dump_state": "only prints",
    "log_level": "only prints",
    "vocabulary_size": "only a warning in DeepSpeed; model.vocab_size holds it",
    "zero_allow_untested_optimizer": "the optimizer is torch.optim's, which ZeRO is tested with",
    "zero_force_ds_cpu_optimizer": "nothing is off-loaded",
    "dataloader_drop_last": "Packtrain reads the data itself",
    "disable_python_gc": "the trainer looks after garbage collection",
    "checkpoint": _OWN_FILES,
    "nebula": _OWN_FILES,
    "datastates_ckpt": _OWN_FILES,
    "data_parallel_group": "groups are made from strategy.dp",
    "aio": "nothing is off-loaded to NVMe",
    "activation_checkpointing": "it only sets up an interface that the model would have to call",
    "pipeline": "the strategy has no pipeline stages",
    "timers": "step times are always recorded",
    "tensorboard": "figures go to metrics.jsonl and MLflow",
    "wandb": "figures go to metrics.jsonl and MLflow",
    "csv_monitor": "figures go to metrics.jsonl and MLflow",
    "comet": "figures go to metrics.jsonl and MLflow",
    "comms_logger": "only prints",
    "flops_profiler": "FLOPs and MFU are always recorded",
    "use_data_before_expert_parallelism": "there are no experts",
    "seq_parallel_communication_data_type": "there is no sequence parallelism",
}

MUST_BE: Final[Mapping[str, tuple[tuple[Json, ...], str]]] = {
    "prescale_gradients": ((False,), "gradients are divided by the global count of valid tokens"),
    "gradient_predivide_factor": ((1, 1.0), "gradients are divided by the global count of valid tokens"),
    "gradient_allreduce_op": (("mean",), "gradients are divided by the global count of valid tokens"),
    "communication_data_type": ((None, "fp32", "float32"), "gradients are reduced in fp32"),
    "sparse_gradients": ((False,), "embedding gradients are dense"),
    "disable_allgather": ((False,), "updated parameters are gathered with all-gather"),
    "managed_gradient_accumulation": ((True,), "micro-batches are accumulated by the engine"),
    "sequence_parallel_size": ((1,), "there is no sequence parallelism"),
    "expert_parallel": ((None, {}), "there are no experts"),
    "weight_quantization": ((None, {}), "weights are not quantised"),
    "quantize_training": ((None, {}), "weights are not quantised"),
    "compression_training": ((None, {}), "weights are not compressed"),
    "graph_harvesting": ((False,), "DeepSpeed has removed it"),
    "compile": ((None, {}, {"deepcompile": False}), "the model is not compiled by DeepSpeed"),
}
"""Keys whose only supported values are those named: they say what happens anyway; others are refused."""

SWITCHES: Final[Mapping[str, str]] = {
    "fp16": "fp16 needs loss scaling; train.precision is fp32, or bf16 with fp32 master weights",
    "amp": "Apex mixed precision is not used; train.precision is fp32 or bf16",
    "torch_autocast": "train.precision is fp32, or bf16 with fp32 master weights; autocast is neither",
    "autotuning": "it would start jobs of its own; `packtrain plan` ranks layouts",
    "curriculum_learning": "the data order is the sampler's, one sequence length for the whole run",
    "data_efficiency": "the data order is the sampler's, one sequence length for the whole run",
    "progressive_layer_drop": "every layer runs at every step",
    "eigenvalue": "there is no quantisation schedule that would use it",
    "sparse_attention": "attention is exact",
    "elasticity": "the global batch is fixed by the spec, whatever the number of ranks",
    "hybrid_engine": "there is no generation in training",
}
"""Sections with `enabled`: refused with the reason when on, ignored when off."""

BF16_MUST_BE: Final[Mapping[str, tuple[tuple[Json, ...], str]]] = {
    "bf16_master_weights_and_grads": ((False,), "master weights and gradient reduction are fp32"),
    "bf16_optimizer_states": ((False,), "the optimizer's moments are fp32"),
    "check_grad_overflow": ((True,), "a step with a non-finite gradient is always skipped"),
    "check_overflow": ((True,), "a step with a non-finite gradient is always skipped"),
    "immediate_grad_update": ((False, True), "only an order of work inside DeepSpeed"),
}

KNOWN_TOP: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "zero_optimization",
    "bf16",
    "bfloat16",
    "data_types",
    "tensor_parallel",
    *IGNORED,
    *MUST_BE,
    *SWITCHES,
)
