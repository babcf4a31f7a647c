"""Optimizer and scheduler of a DeepSpeed JSON as the optim section, where they mean the same.

A named optimizer or scheduler brings DeepSpeed's defaults for the parameters that it leaves out. DeepSpeed's
schedules climb and fall along the same lines as ours, one or two steps later (its first two have rate 0;
ours has no step of rate 0). The rest of the JSON is deepspeed_json.py's.
"""

from collections.abc import Mapping
from typing import Final

from jobs.spec.deepspeed_reading import Reading
from jobs.spec.tree import Json, KeyPath, describe, did_you_mean, nearest

_OPTIMIZERS: Final[Mapping[str, str]] = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}
_OTHER_OPTIMIZERS: Final = (
    "lamb", "onebitadam", "zerooneadam", "onebitlamb", "lion", "muon", "adagrad", "cpuadam", "fusedadam",
)  # fmt: skip
_DEFAULTS: Final[Mapping[str, Mapping[str, Json]]] = {
    "adamw": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "weight_decay": 0.0},
}
_OPTIMIZER_MUST_BE: Final[Mapping[str, tuple[tuple[Json, ...], str]]] = {
    "adam_w_mode": ((True,), "weight decay is decoupled (AdamW)"),
    "bias_correction": ((True,), "moments are bias-corrected"),
    "amsgrad": ((False,), "AMSGrad is not implemented"),
    "momentum": ((0, 0.0), "SGD has no momentum"),
    "nesterov": ((False,), "SGD has no momentum"),
    "dampening": ((0, 0.0), "SGD has no momentum"),
    "maximize": ((False,), "the loss is minimised"),
    "max_grad_norm": ((0, 0.0), "DeepSpeed does not read it here either; write gradient_clipping"),
}
_OPTIMIZER_IGNORED: Final[Mapping[str, str]] = {
    "torch_adam": "the optimizer is always torch.optim's",
    "fused": "only how the update is computed",
    "foreach": "only how the update is computed",
    "set_grad_none": "gradients are always freed",
    "fp32_optimizer_states": "moments are always fp32",
}
_SCHEDULES: Final[Mapping[str, str]] = {
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
_OTHER_SCHEDULES: Final = ("OneCycle", "LRRangeTest")
_SCHEDULE_PARAMS: Final[Mapping[str, tuple[str, ...]]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupCosineLR": (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
    ),
}
_OPTIM: Final = "optim"


def _type_and_params(reading: Reading, section: Json, name: str) -> tuple[str, dict[str, Json]] | None:
    """Type and params of an optimizer or scheduler section; None (and refusals) where it is malformed."""
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        reading.refuse((name,), f"wants a section with type and params, got {describe(section)}")
        return None
    for key in section:
        if key == "legacy_fusion":
            reading.must_be((name, key), section[key], (False,), "the optimizer is torch.optim's")
        elif key not in ("type", "params"):
            reading.refuse((name, key), f"unknown key{did_you_mean(key, ('type', 'params'))}")
    params = section.get("params")
    if params is not None and not isinstance(params, dict):
        reading.refuse((name, "params"), f"wants a section, got {describe(params)}")
        return None
    if not params and "params" in section:
        reading.note(reading.ignored, (name, "params"), "says nothing")
    return str(section["type"]), params or {}


def read_optimizer(reading: Reading, section: Json) -> None:
    """Take over `optimizer`: kind, lr, betas, eps, weight decay."""
    if section is None:
        return
    found = _type_and_params(reading, section, "optimizer")
    if found is None:
        return
    name, params = found
    kind = _OPTIMIZERS.get(name.lower())
    if kind is None:
        if name.lower() in _OTHER_OPTIMIZERS:
            reading.refuse(("optimizer", "type"), f"{name} is not implemented; optim.kind is adamw or sgd")
        else:
            near = nearest(name.lower(), _OPTIMIZERS)
            hint = f"; did you mean {near}?" if near else "; known: AdamW, Adam, SGD"
            reading.refuse(("optimizer", "type"), f"unknown optimizer {name}{hint}")
        return
    reading.honour(("optimizer", "type"), kind, (_OPTIM, "kind"))
    for key, value in params.items():
        _optimizer_param(reading, key, value, kind)
    filled = []
    for key, value in _DEFAULTS[kind].items():
        written = "betas" if key.startswith("beta") else key
        if written not in params and not reading.tree.has((_OPTIM, key)):
            reading.fill(("optimizer", "type"), value, (_OPTIM, key))
            filled.append(f"{key}={value}")
    if filled:
        text = f"DeepSpeed's defaults for what it leaves out: {', '.join(filled)}"
        reading.note(reading.honoured, ("optimizer", "params"), text)


def _optimizer_param(reading: Reading, key: str, value: Json, kind: str) -> None:
    here: KeyPath = ("optimizer", "params", key)
    if value is None:
        reading.note(reading.ignored, here, "null says nothing")
    elif key == "betas" and kind == "adamw":
        if value == "auto":
            reading.note(reading.honoured, here, "auto: optim.beta1 and optim.beta2")
        elif isinstance(value, list) and len(value) == 2:
            for index, beta in enumerate(value):
                number = reading.number(here, beta, whole=False)
                if number is not None:
                    reading.honour(here, number, (_OPTIM, f"beta{index + 1}"))
        else:
            reading.refuse(here, f"wants a list of two numbers, got {describe(value)}")
    elif key in _DEFAULTS[kind]:
        number = reading.number(here, value, whole=False)
        if number is not None or value == "auto":
            reading.honour(here, value if number is None else number, (_OPTIM, key))
    elif key in _OPTIMIZER_MUST_BE:
        allowed, reason = _OPTIMIZER_MUST_BE[key]
        reading.must_be(here, value, allowed, reason)
    elif key in _OPTIMIZER_IGNORED:
        reading.ignore(here, value, _OPTIMIZER_IGNORED[key])
    else:
        known = ["betas", *_DEFAULTS[kind], *_OPTIMIZER_MUST_BE, *_OPTIMIZER_IGNORED]
        reading.refuse(here, f"unknown parameter of {kind}{did_you_mean(key, known)}")


def read_scheduler(reading: Reading, section: Json) -> None:
    """Take over `scheduler`: linear warm-up, then constant, linear or cosine; anything else is refused."""
    if section is None:
        return
    found = _type_and_params(reading, section, "scheduler")
    if found is None:
        return
    name, params = found
    if name not in _SCHEDULES:
        if name in _OTHER_SCHEDULES:
            reason = f"{name} is not implemented; optim.schedule has cosine, wsd, linear and constant"
        else:
            reason = f"unknown scheduler {name}{did_you_mean(name, _SCHEDULES)}"
        reading.refuse(("scheduler", "type"), reason)
        return
    schedule: KeyPath = (_OPTIM, "schedule")
    reading.honour(("scheduler", "type"), _SCHEDULES[name], (*schedule, "kind"))
    for key, value in params.items():
        here: KeyPath = ("scheduler", "params", key)
        if key not in _SCHEDULE_PARAMS[name]:
            reading.refuse(here, f"unknown parameter of {name}{did_you_mean(key, _SCHEDULE_PARAMS[name])}")
        else:
            _scheduler_param(reading, key, value)
    if "warmup_type" not in params:
        reading.refuse(
            ("scheduler", "params"),
            'leaves out warmup_type, so DeepSpeed warms up along a logarithm; write "warmup_type": "linear"',
        )
    _scheduler_defaults(reading, name, params)


def _scheduler_defaults(reading: Reading, name: str, params: Mapping[str, Json]) -> None:
    here: KeyPath = ("scheduler", "params")
    defaults: dict[str, Json] = {"warmup_num_steps": 1000}
    if name == "WarmupCosineLR":
        defaults["cos_min_ratio"] = 0.0001
    for key, value in defaults.items():
        if key not in params and not reading.tree.has(_TARGETS[key]):
            reading.fill(here, value, _TARGETS[key])
            reading.note(
                reading.honoured, here, f"DeepSpeed's default for {key}, which it leaves out: {value}"
            )
    lr = reading.tree.get((_OPTIM, "lr"))
    if name == "WarmupDecayLR" and "warmup_max_lr" not in params and lr not in (None, 1e-3):
        reading.refuse(
            here,
            f"leaves out warmup_max_lr, and DeepSpeed then climbs to 0.001, not to the lr of {lr}; write it",
        )


_TARGETS: Final[Mapping[str, KeyPath]] = {
    "total_num_steps": ("train", "steps"),
    "warmup_max_lr": (_OPTIM, "lr"),
    "warmup_num_steps": (_OPTIM, "schedule", "warmup_steps"),
    "cos_min_ratio": (_OPTIM, "schedule", "min_lr_frac"),
}


def _scheduler_param(reading: Reading, key: str, value: Json) -> None:
    here: KeyPath = ("scheduler", "params", key)
    if key == "warmup_type":
        reading.must_be(here, value, ("linear",), "warm-up is linear")
    elif key in ("warmup_min_lr", "warmup_min_ratio"):
        reading.must_be(here, value, (0, 0.0), "warm-up starts from 0")
    else:
        number = reading.number(here, value, whole=key.endswith("_steps"))
        if number is not None or value == "auto":
            reading.honour(here, value if number is None else number, _TARGETS[key])
