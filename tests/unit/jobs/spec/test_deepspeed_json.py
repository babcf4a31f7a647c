"""A user's DeepSpeed JSON: every key honoured, refused with the reason, or named as ignored."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import SpecError
from jobs.spec.deepspeed_keys import KNOWN_TOP, ZERO_ALIASES, ZERO_IGNORED, ZERO_OPTIONS, ZERO_REFUSED
from jobs.spec.load import LoadedSpec, load_spec, load_spec_with_report, resolved_json, spec_from_json
from jobs.spec.tree import dotted, iter_leaves
from tests.unit.jobs.spec.deepspeed_examples import ALMOST_EMPTY, EXAMPLES, FULL, PIPELINE, PLAIN, UNIVERSAL


def notes(group) -> dict[str, str]:
    return {note.key: note.text for note in group}


def test_numbers_come_from_the_json(load_json):
    spec = load_json(ALMOST_EMPTY, PLAIN, "optim.lr=1e-3", "strategy.stage=2").spec
    assert (spec.train.global_batch_size, spec.train.micro_batch_size, spec.grad_accum_steps) == (256, 16, 8)


def test_a_whole_config_is_honoured(load_json, tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 100,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": 0.01},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": 50,
                "warmup_min_lr": 0,
                "warmup_max_lr": 1e-4,
                "warmup_num_steps": 5,
                "warmup_type": "linear",
            },
        },
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 5e7,
            "stage3_param_persistence_threshold": 0,
            "prefetch_bucket_size": 1e6,
            "allgather_bucket_size": 2e8,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    loaded = load_json(config, PLAIN.replace("{steps: 10}", "{}"))
    spec, report = loaded.spec, loaded.deepspeed
    assert (spec.train.steps, spec.train.global_batch_size, spec.train.micro_batch_size) == (50, 16, 4)
    assert spec.train.precision == "bf16"
    assert (spec.optim.kind, spec.optim.lr, spec.optim.beta1, spec.optim.beta2) == ("adamw", 1e-4, 0.9, 0.98)
    assert (spec.optim.eps, spec.optim.weight_decay, spec.optim.grad_clip_norm) == (1e-9, 0.01, 0.5)
    assert spec.optim.schedule.model_dump() == {"kind": "linear", "warmup_steps": 5, "min_lr_frac": 0.0}
    assert spec.strategy.stage == 3
    assert spec.strategy.zero_options == {
        "overlap_comm": True,
        "reduce_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 1_000_000,
    }
    assert all(type(v) is not float for v in spec.strategy.zero_options.values())
    assert report.refused == ()
    assert notes(report.ignored) == {
        "steps_per_print": "tracking.log_every_steps says how often a line is printed",
        "zero_optimization.allgather_bucket_size": "acts at stage 1 and 2 only, and strategy.stage=3",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": "checkpoints are "
        "Packtrain's own format, and `packtrain checkpoint export` gathers the weights",
    }
    assert notes(report.honoured)["zero_optimization.reduce_bucket_size"] == (
        "strategy.zero_options.reduce_bucket_size=50000000"
    )
    path = tmp_path / "ds.json"
    assert f"{path}:5: gradient_clipping: honoured: optim.grad_clip_norm=0.5" in report.lines()
    # the JSON is not needed again
    text = resolved_json(spec)
    path.unlink()
    assert spec_from_json(text) == spec


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_key_is_dropped_in_silence(tmp_path, name):
    from jobs.spec.deepspeed_json import merge_deepspeed_json
    from jobs.spec.yaml_tree import read_yaml

    (tmp_path / "ds.json").write_text(json.dumps(EXAMPLES[name]))
    (tmp_path / "spec.yaml").write_text(PLAIN)
    report = merge_deepspeed_json(read_yaml(tmp_path / "spec.yaml"), tmp_path / "ds.json")
    said = {note.key for note in (*report.honoured, *report.ignored, *report.refused)}
    for path, _ in iter_leaves(EXAMPLES[name]):
        assert any(dotted(path[:depth]) in said for depth in range(1, len(path) + 1)), dotted(path)
    assert len(report.lines()) == len(report.honoured) + len(report.ignored) + len(report.refused)


def test_universal_example_trains_on_one_rank(load_json):
    loaded = load_json(UNIVERSAL, PLAIN.replace("dp: 2", "dp: 1"), "optim.lr=1e-3")
    assert (loaded.spec.train.precision, loaded.spec.strategy.stage, loaded.spec.grad_accum_steps) == (
        "bf16",
        1,
        1,
    )
    assert "data_types.grad_accum_dtype" in notes(loaded.deepspeed.honoured)


def test_pipeline_example_is_adamw_with_deepspeeds_defaults(load_json):
    loaded = load_json(PIPELINE, PLAIN, "strategy.stage=1")
    optim = loaded.spec.optim
    assert (optim.kind, optim.lr, optim.beta2, optim.weight_decay) == ("adamw", 1e-3, 0.999, 0.0)
    assert notes(loaded.deepspeed.honoured)["optimizer.params"] == (
        "DeepSpeed's defaults for what it leaves out: weight_decay=0.0"
    )
    assert loaded.spec.grad_accum_steps == 16


@pytest.mark.parametrize(("dp", "works"), [(3, True), (2, False)])
def test_three_ranks_or_two(load_json, refused_json, dp, works):
    """deepspeedai/DeepSpeed#3982: batch 9, micro batch 3, accumulation 1."""
    config = {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    text = PLAIN.replace("dp: 2", f"dp: {dp}, stage: 1").replace("optim: {}", "optim: {lr: 1e-3}")
    if works:
        spec = load_json(config, text).spec
        assert (spec.world_size, spec.train.global_batch_size, spec.grad_accum_steps) == (3, 9, 1)
    else:
        assert refused_json(config, text) == [
            "ds.json:4: gradient_accumulation_steps: refused: the batch does not add up: 9 != 3 x 1 x 2 "
            "(train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks)"
        ]


@pytest.mark.parametrize(
    ("config", "train", "expected"),
    [
        ({"train_batch_size": 12}, "", (12, 6, 1)),
        ({"train_micro_batch_size_per_gpu": 3}, "", (6, 3, 1)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, "", (12, 3, 2)),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, "", (12, 3, 2)),
        (
            {"train_batch_size": 12, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 3},
            "",
            (12, 3, 2),
        ),
        ({"gradient_accumulation_steps": 2}, "global_batch_size: 8, micro_batch_size: 2", (8, 2, 2)),
        ({"gradient_accumulation_steps": 2}, "micro_batch_size: 2", (8, 2, 2)),
        ({"train_batch_size": 8}, "micro_batch_size: 2", (8, 2, 2)),
        ({"train_batch_size": "auto"}, "global_batch_size: 8, micro_batch_size: 2", (8, 2, 2)),
    ],
)
def test_two_batch_numbers_give_the_third(load_json, config, train, expected):
    text = FULL.replace("global_batch_size: 8, micro_batch_size: 2", train)
    spec = load_json(config, text).spec
    assert (spec.train.global_batch_size, spec.train.micro_batch_size, spec.grad_accum_steps) == expected


def test_odd_batch_without_accumulation(refused_json):
    text = FULL.replace("global_batch_size: 8, micro_batch_size: 2", "")
    [line] = refused_json({"train_batch_size": 13}, text)
    assert line.startswith(
        "ds.json:2: train_batch_size: refused: the batch does not add up: 13 != 6 x 1 x 2 ("
    )


def test_no_json_there(tmp_path):
    (tmp_path / "spec.yaml").write_text(FULL.replace("ds.json", str(tmp_path / "no.json")))
    with pytest.raises(SpecError, match=r"spec.yaml:5: strategy.deepspeed_config: .*no.json: no such file$"):
        load_spec(tmp_path / "spec.yaml")


def test_values_of_the_json_are_checked_where_they_stand(refused_json):
    lines = refused_json(
        {"optimizer": {"type": "AdamW", "params": {"lr": -1.0}}}, FULL.replace("{lr: 3e-4}", "{}")
    )
    assert lines == ["ds.json:5: optim.lr: must be greater than 0; got -1.0"]


def test_auto_takes_the_specs_values(load_json):
    config = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
    }
    loaded = load_json(config, FULL)
    plain = load_spec_of_full(loaded)
    assert loaded.spec.model_copy(update={"strategy": plain.strategy}) == plain
    assert loaded.spec.strategy.zero_options == {}
    assert notes(loaded.deepspeed.honoured)["train_batch_size"] == "auto: train.global_batch_size=8"
    assert (
        notes(loaded.deepspeed.honoured)["gradient_clipping"] == "auto: the default of optim.grad_clip_norm"
    )


def load_spec_of_full(loaded: LoadedSpec):
    folder = Path(loaded.deepspeed.path).parent
    (folder / "plain.yaml").write_text(FULL.replace(", deepspeed_config: ds.json", ""))
    return load_spec(folder / "plain.yaml")


def test_no_clipping(load_json):
    assert load_json({"gradient_clipping": 0.0}, FULL).spec.optim.grad_clip_norm is None


def test_tabs_in_the_json(load_json):
    loaded = load_json('{\n\t"train_batch_size":\t8,\n\t"steps_per_print": 1\n}', FULL)
    assert notes(loaded.deepspeed.honoured)["train_batch_size"].startswith(
        "agrees with train.global_batch_size=8 at "
    )
    assert loaded.deepspeed.honoured[0].line == 2


def test_stage_0_in_bf16_is_refused(refused_json):
    config = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}
    [line] = refused_json(config, FULL.replace("stage: 1, ", ""))
    assert line.startswith("ds.json:3: strategy.stage=0 with train.precision=bf16: ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("{reduce_buckt_size: 3}", "unknown option of zero_optimization; did you mean reduce_bucket_size?"),
        (
            "{param_persistence_threshold: 3}",
            "unknown option of zero_optimization; did you mean stage3_param_persistence_threshold?",
        ),
        ("{overlap_comm: 1}", "wants true or false, got 1"),
        ("{reduce_bucket_size: true}", "wants a whole number of at least 0, got true"),
        ("{reduce_bucket_size: 5e7}", "wants a whole number of at least 0, got 50000000.0"),
    ],
)
def test_options_in_the_yaml_are_checked_too(tmp_path, options, expected):
    (tmp_path / "spec.yaml").write_text(FULL.replace("deepspeed_config: ds.json", f"zero_options: {options}"))
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "spec.yaml")
    key = options[1:].split(":")[0]
    assert str(caught.value) == f"{tmp_path}/spec.yaml:5: strategy.zero_options.{key}: {expected}"


def test_tables_cover_deepspeeds_own_keys():
    """DeepSpeed's schema of zero_optimization: a key that it gains must get a verdict here."""
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    known = {"stage", *ZERO_OPTIONS, *ZERO_ALIASES, *ZERO_REFUSED, *ZERO_IGNORED}
    theirs = {field.alias or name for name, field in config.DeepSpeedZeroConfig.model_fields.items()}
    assert theirs - known == set()
    assert set(ZERO_OPTIONS) <= theirs


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_schedules_are_deepspeeds_two_steps_earlier(load_json, name):
    """DeepSpeed's own scheduler object against the schedule that its section became, over a whole run."""
    import torch

    from jobs.optim.schedule import lr_at

    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    params: dict[str, object] = {"warmup_num_steps": 10, "warmup_type": "linear"}
    if name != "WarmupLR":
        params["total_num_steps"] = 100
    if name == "WarmupCosineLR":
        params["cos_min_ratio"] = 0.1
    else:
        params["warmup_max_lr"] = 1e-3
    text = FULL.replace("steps: 10", "steps: 100").replace("3e-4", "1e-3")
    spec = load_json({"scheduler": {"type": name, "params": params}}, text).spec
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = getattr(schedules, name)(optimizer, **params)
    theirs = []
    for _ in range(100):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    ours = [lr_at(spec.optim, 100, step) for step in range(100)]
    assert theirs[:2] == [0.0, 0.0]
    for step in range(2, 100):
        low, high = sorted((ours[step - 2], ours[step]))
        assert low - 1e-9 <= theirs[step] <= high + 1e-9, step


@given(
    st.dictionaries(
        st.sampled_from([*KNOWN_TOP, "nonsense"]),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-2, 20)
            | st.floats(0, 2)
            | st.sampled_from(["auto", "AdamW", "fp32"]),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(["enabled", "type", "params", "stage", "lr", "betas", "x"]),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=5,
        ),
        max_size=5,
    )
)
@settings(max_examples=100, deadline=None)
def test_any_json_loads_or_names_its_keys(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("any")
    (folder / "ds.json").write_text(json.dumps(config))
    (folder / "spec.yaml").write_text(FULL)
    try:
        loaded = load_spec_with_report(folder / "spec.yaml")
    except SpecError as error:
        message = str(error)
    else:
        said = {note.key for note in (*loaded.deepspeed.honoured, *loaded.deepspeed.ignored)}
        for path, _ in iter_leaves(config):
            assert any(dotted(path[:depth]) in said for depth in range(1, len(path) + 1)), dotted(path)
        return
    assert "ds.json:" in message
