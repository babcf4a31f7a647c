"""A user's DeepSpeed JSON, taken over into the spec: each key is honoured, refused, or named as ignored.

A key that the YAML leaves out is filled in from the JSON; one that both give must agree; "auto" means the
spec's value. A section that the JSON does not have says nothing: the spec's own defaults hold. Once resolved,
the spec holds everything and the JSON is not read again. The tables of keys are in deepspeed_keys.py, the
optimizer and scheduler in deepspeed_optim.py. Does not import deepspeed.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from jobs.errors import SpecError
from jobs.spec import deepspeed_keys as keys
from jobs.spec.deepspeed_optim import read_optimizer, read_scheduler
from jobs.spec.deepspeed_reading import DeepspeedReport, Reading
from jobs.spec.tree import Json, KeyPath, Tree, describe, did_you_mean, nearest
from jobs.spec.yaml_tree import key_lines, read_text

MICRO = "train_micro_batch_size_per_gpu"
ACCUM = "gradient_accumulation_steps"
PRODUCT = f"{MICRO} x {ACCUM} x data-parallel ranks"


def merge_deepspeed_json(tree: Tree, path: Path) -> DeepspeedReport:
    """Take a DeepSpeed JSON over into a spec's tree; what is refused becomes a problem of the tree.

    Args:
        tree: the spec as written, strategy of kind deepspeed_zero.
        path: the JSON file.

    Raises:
        SpecError: the file cannot be read, or is no JSON object.
    """
    config, lines = _read_json(path)
    reading = Reading(tree, str(path), lines)
    for key, value in config.items():
        if value is None or (value == {} and key not in ("optimizer", "scheduler")):
            reading.note(
                reading.ignored, (key,), f"{'null' if value is None else 'an empty section'} says nothing"
            )
        elif key not in ("optimizer", "scheduler", MICRO, ACCUM, "train_batch_size"):
            _top_level(reading, key, value, config)
    read_optimizer(reading, config.get("optimizer"))
    read_scheduler(reading, config.get("scheduler"))
    _batch(reading, config)
    return DeepspeedReport(str(path), tuple(reading.honoured), tuple(reading.ignored), tuple(reading.refused))


def _read_json(path: Path) -> tuple[dict[str, Json], dict[str, int]]:
    text = read_text(path)

    def without_repeats(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found: dict[str, Json] = {}
        for key, value in pairs:
            if key in found:
                raise SpecError(
                    f"{path}: the key {key!r} is written twice in one section; keep one of the two"
                )
            found[key] = value
        return found

    try:
        config = json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise SpecError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise SpecError(f"{path}:1: a DeepSpeed configuration is an object, got {describe(config)}")
    return config, key_lines(text)


def _top_level(reading: Reading, key: str, value: Json, config: Mapping[str, Json]) -> None:
    if key == "zero_optimization":
        _zero(reading, value)
    elif key in ("bf16", "bfloat16"):
        _bf16(reading, key, value)
    elif key == "gradient_clipping":
        norm = reading.number((key,), value, whole=False)
        if value == "auto" or norm is not None:
            reading.honour((key,), value if norm is None else (norm or None), ("optim", "grad_clip_norm"))
    elif key == "data_types":
        _data_types(reading, value)
    elif key == "tensor_parallel":
        size = value.get("autotp_size", 1) if isinstance(value, dict) else value
        if size in (0, 1):
            reading.ignore((key,), value, "there is no tensor parallelism")
        else:
            reading.refuse((key,), f"autotp_size={describe(size)}: AutoTP is not used; set strategy.tp")
    elif key in keys.SWITCHES:
        _switch(reading, key, value, config)
    elif key in keys.MUST_BE:
        allowed, reason = keys.MUST_BE[key]
        reading.must_be((key,), value, allowed, reason)
    elif key in keys.IGNORED:
        reading.ignore((key,), value, keys.IGNORED[key])
    else:
        reading.refuse((key,), f"unknown key{_near(key, keys.KNOWN_TOP)}")


def _near(key: str, known: tuple[str, ...]) -> str:
    near = nearest(key, known)
    return f"; did you mean {near}?" if near else " of a DeepSpeed configuration"


def _switch(reading: Reading, key: str, value: Json, config: Mapping[str, Json]) -> None:
    enabled = value.get("enabled", False) if isinstance(value, dict) else value
    if enabled in (False, "auto"):
        reading.ignore((key,), value, "not enabled")
        return
    reason = keys.SWITCHES[key]
    bf16 = config.get("bf16", config.get("bfloat16"))
    if key == "torch_autocast" and isinstance(bf16, dict) and bf16.get("enabled") is True:
        reason = f"together with bf16 it would cast twice; {reason}"
    reading.refuse((key, "enabled") if isinstance(value, dict) else (key,), reason)
    if isinstance(value, dict):
        reading.ignore((key,), {k: v for k, v in value.items() if k != "enabled"}, f"{key} is refused")


def _bf16(reading: Reading, key: str, value: Json) -> None:
    if not isinstance(value, dict):
        reading.refuse((key,), f"wants a section with enabled, got {describe(value)}")
        return
    for name, below in value.items():
        here = (key, name)
        if name == "enabled":
            if below == "auto" or isinstance(below, bool):
                precision = below if below == "auto" else ("bf16" if below else "fp32")
                reading.honour(here, precision, ("train", "precision"))
            else:
                reading.refuse(here, f'wants true, false or "auto", got {describe(below)}')
        elif name not in keys.BF16_MUST_BE:
            reading.refuse(here, f"unknown key{did_you_mean(name, ('enabled', *keys.BF16_MUST_BE))}")
        elif value.get("enabled", False) is False:
            reading.ignore(here, below, "bf16 is not enabled")
        else:
            allowed, reason = keys.BF16_MUST_BE[name]
            reading.must_be(here, below, allowed, reason)


def _data_types(reading: Reading, value: Json) -> None:
    known = ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules")
    if not isinstance(value, dict):
        reading.refuse(("data_types",), f"wants a section, got {describe(value)}")
        return
    for name, below in value.items():
        here = ("data_types", name)
        if name == "grad_accum_dtype":
            reading.must_be(
                here, below, (None, "fp32", "float32"), "gradients are accumulated and reduced in fp32"
            )
        elif name in known:
            reading.must_be(
                here, below, (None,), "the types of parameters and buffers follow train.precision"
            )
        else:
            reading.refuse(here, f"unknown key{did_you_mean(name, known)}")


def _zero(reading: Reading, value: Json) -> None:
    if not isinstance(value, dict):
        reading.refuse(("zero_optimization",), f"wants a section with stage, got {describe(value)}")
        return
    if "stage" in value:
        here = ("zero_optimization", "stage")
        stage = reading.number(here, value["stage"], whole=True)
        if stage is not None or value["stage"] == "auto":
            reading.honour(here, value["stage"] if stage is None else stage, ("strategy", "stage"))
    stage_now = reading.tree.get(("strategy", "stage"))
    known = ("stage", *keys.ZERO_OPTIONS, *keys.ZERO_REFUSED, *keys.ZERO_IGNORED, *keys.ZERO_ALIASES)
    for name, below in value.items():
        here = ("zero_optimization", name)
        option = keys.ZERO_ALIASES.get(name, name)
        if option in keys.ZERO_OPTIONS:
            _zero_option(reading, here, below, option, stage_now)
        elif name in keys.ZERO_REFUSED:
            allowed, reason = keys.ZERO_REFUSED[name]
            if below == {"device": "none"} or (isinstance(below, dict) and below.get("device") == "none"):
                reading.ignore(here, below, "nothing is off-loaded")
            else:
                reading.must_be(here, below, allowed, reason)
        elif name in keys.ZERO_IGNORED:
            reading.ignore(here, below, keys.ZERO_IGNORED[name])
        elif name != "stage":
            reading.refuse(here, f"unknown key{_near(name, known)}")


def _zero_option(reading: Reading, here: KeyPath, value: Json, option: str, stage: Json) -> None:
    known = keys.ZERO_OPTIONS[option]
    if value is None or value == "auto":
        reading.note(reading.honoured, here, "auto: DeepSpeed's default")
        return
    if known.kind == "bool" and not isinstance(value, bool):
        reading.refuse(here, f"wants true or false, got {describe(value)}")
        return
    taken = value if known.kind == "bool" else reading.number(here, value, whole=True)
    if taken is None:
        return
    if isinstance(taken, int) and taken < 0:
        reading.refuse(here, f"must be at least 0; got {taken}")
    elif isinstance(stage, int) and stage not in known.stages:
        acts = " and ".join(str(s) for s in known.stages)
        reading.note(reading.ignored, here, f"acts at stage {acts} only, and strategy.stage={stage}")
    else:
        reading.honour(here, taken, ("strategy", "zero_options", option))


def check_zero_options(tree: Tree) -> None:
    """Complain about keys and values of strategy.zero_options, whoever wrote them."""
    options = tree.get(("strategy", "zero_options"))
    if not isinstance(options, dict):
        return
    for name, value in options.items():
        path: KeyPath = ("strategy", "zero_options", name)
        known = keys.ZERO_OPTIONS.get(name)
        if known is None:
            near = keys.ZERO_ALIASES.get(name)
            hint = f"; did you mean {near}?" if near else did_you_mean(name, keys.ZERO_OPTIONS)
            tree.complain(path, f"unknown option of zero_optimization{hint}")
        elif (known.kind == "bool") != isinstance(value, bool) or not isinstance(value, int) or value < 0:
            wanted = "true or false" if known.kind == "bool" else "a whole number of at least 0"
            tree.complain(path, f"wants {wanted}, got {describe(value)}")


def _batch(reading: Reading, config: Mapping[str, Json]) -> None:
    """The three batch numbers: two give the third, and all must agree with the ranks."""
    whole_at: KeyPath = ("train", "global_batch_size")
    micro_at: KeyPath = ("train", "micro_batch_size")
    numbers: dict[str, int] = {}
    for key, target in (("train_batch_size", whole_at), (MICRO, micro_at), (ACCUM, None)):
        value = config.get(key)
        found = reading.number((key,), value, whole=True)
        if found is not None and found < 1:
            reading.refuse((key,), f"must be at least 1; got {found}")
        elif found is not None:
            numbers[key] = int(found)
        if target is not None and (value == "auto" or key in numbers):
            reading.honour((key,), numbers.get(key, value), target)
        elif value == "auto":
            reading.note(reading.honoured, (key,), "auto: global_batch_size / (micro_batch_size x dp)")
    dp = reading.tree.get(("strategy", "dp")) if reading.tree.has(("strategy", "dp")) else 1
    whole, micro, accum = reading.tree.get(whole_at), reading.tree.get(micro_at), numbers.get(ACCUM)
    if not numbers or not isinstance(dp, int) or dp < 1 or reading.is_refused(numbers):
        return
    at: KeyPath = (next(key for key in (ACCUM, "train_batch_size", MICRO) if key in numbers),)
    if not isinstance(micro, int) and isinstance(whole, int) and MICRO not in config:
        micro = max(1, whole // ((accum or 1) * dp))
        reading.fill(at, micro, micro_at)
    if not isinstance(whole, int) and isinstance(micro, int) and "train_batch_size" not in config:
        whole = micro * (accum or 1) * dp
        reading.fill(at, whole, whole_at)
    if not isinstance(whole, int) or not isinstance(micro, int) or micro < 1:
        return
    steps = accum or max(1, whole // (micro * dp))
    if whole != micro * steps * dp:
        reading.refuse(at, f"the batch does not add up: {whole} != {micro} x {steps} x {dp} ({PRODUCT})")
        # the numbers are made to fit, so that the schema does not say the same again
        reading.fill(at, micro * steps * dp, whole_at)
    elif accum:
        reading.note(reading.honoured, (ACCUM,), f"{whole} = {micro} x {accum} x {dp} ({PRODUCT})")
