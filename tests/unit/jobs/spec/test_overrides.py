"""--set: what it changes, and the sentence for what it cannot."""

import pytest

from jobs.spec.load import load_spec
from tests.unit.jobs.spec.conftest import VALID

SOURCES = VALID.replace(
    "  seq_len: 64\n",
    "  seq_len: 64\n  sources:\n    - {kind: python}\n    - {kind: text, path: /a}\n",
)


def test_overrides_win_in_order(write_spec):
    spec = load_spec(
        write_spec(SOURCES),
        [
            "optim.lr=3e-2",
            "optim.lr=5e-3",
            "data.sources.1.path=/b",
            "data.sources.0.weight=2",
            "train.precision=bf16",
        ],
    )
    assert spec.optim.lr == 5e-3
    assert spec.data.sources[1].path == "/b"
    assert spec.data.sources[0].weight == 2.0
    assert spec.train.precision == "bf16"


def test_overrides_make_sections_and_take_yaml(write_spec):
    spec = load_spec(
        write_spec(),
        [
            "checkpoint.every_steps=5",
            "strategy={kind: deepspeed_zero, stage: 1, dp: 4}",
            "optim.grad_clip_norm=",
            "model.rope_scaling.kind=llama3",
            "resources.env.GLOO_SOCKET_IFNAME=lo",
            "run.name=a=b".replace("=b", "-b"),
        ],
    )
    assert spec.checkpoint.every_steps == 5
    assert (spec.strategy.kind, spec.strategy.dp) == ("deepspeed_zero", 4)
    assert spec.optim.grad_clip_norm is None
    assert spec.model.rope_scaling.factor == 8.0
    assert spec.resources.env == {"GLOO_SOCKET_IFNAME": "lo"}
    assert spec.run.name == "a-b"


def test_the_value_may_hold_an_equals_sign(write_spec):
    assert load_spec(write_spec(), ["resources.env.X=a=b"]).resources.env == {"X": "a=b"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trian.steps=3", "trian: unknown key; did you mean train?"),
        ("train.stepz=3", "train.stepz: unknown key; did you mean steps?"),
        ("train.steps=many", "train.steps: wants a whole number, got the text 'many'"),
        ("train.steps=", "train.steps: wants a whole number, got nothing (null)"),
        ("train.steps.x=3", "train.steps: is 10, so there is no train.steps.x in it"),
        (
            "data.sources.2.path=/x",
            "data.sources: is a list of 2 elements: it takes an index from 0 to 1, not '2'",
        ),
        (
            "data.sources.first.path=/x",
            "data.sources: is a list of 2 elements: it takes an index from 0 to 1, not 'first'",
        ),
        ("data.sources.1.paht=/x", "data.sources.1.paht: unknown key; did you mean path?"),
        (
            "optim.schedule.0=3",
            "optim.schedule: is not in the spec, so it has no element 0; set the whole list",
        ),
        ("steps", "an override is written key.key=value, for example optim.lr=3e-4"),
        ("=3", "an override is written key.key=value, for example optim.lr=3e-4"),
        ("a..b=3", "an override is written key.key=value, for example optim.lr=3e-4"),
        (
            "optim.lr=[1",
            "not YAML: expected ',' or ']', but got '<stream end>' (while parsing a flow sequence)",
        ),
        ("strategy={kind: native, kind: native}", "written twice (first at line 1); keep one of the two"),
        ("optim.lr=.nan", ".nan is not a finite number"),
    ],
)
def test_refused(problems_of, override, expected):
    assert problems_of(SOURCES, [override]) == [f"--set {override}: {expected}"]


def test_an_override_can_repair_the_file(write_spec):
    assert (
        load_spec(write_spec(VALID.replace("steps: 10", "steps: ten")), ["train.steps=12"]).train.steps == 12
    )
