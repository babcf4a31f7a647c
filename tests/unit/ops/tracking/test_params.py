import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name

from ops.tracking.params import MAX_NAME_CHARS, accepted_name, flatten_params, masked_spec
from tests.support.runs import tiny_spec


def test_a_spec_becomes_flat_texts(tmp_path):
    flat = flatten_params(tiny_spec(tmp_path).model_dump(mode="json"))
    assert flat["optim.lr"] == "0.0003"
    assert flat["model.n_layers"] == "1"
    assert flat["data.sources.0.kind"] == "python"
    assert flat["train.init_from"] == "null"
    assert list(flat) == sorted(flat)


def test_parameter_text_is_the_same_in_every_process():
    """NVIDIA-NeMo/Automodel#2231: a function in the config was logged with its memory address."""
    script = """
from ops.tracking.params import flatten_params
def loss(): pass
class Thing: pass
print(flatten_params({"f": loss, "m": "".join, "c": Thing, "o": Thing(), "l": [1.5, None]}))
"""
    first, second = (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    assert "0x" not in first
    assert "'f': '__main__.loss'" in first
    assert "'l': '[1.5, null]'" in first


def test_names_that_servers_take_stay():
    for name in ("train/loss", "perf/tokens_per_s", "a b.c-d"):
        assert accepted_name(name) == name


def test_other_names_are_mapped_and_stay_apart():
    names = ["gain %", "gain &", "x" * 300, "x" * 299 + "y", "../up", "a//b", "", ".", "a:b", "caf\u00e9"]
    mapped = [accepted_name(name) for name in names]
    assert len(set(mapped)) == len(names)
    for name in mapped:
        assert len(name) <= MAX_NAME_CHARS
        _validate_metric_name(name)


@given(st.text(max_size=400))
def test_any_name_is_mapped_to_one_that_servers_take(name):
    mapped = accepted_name(name)
    assert 0 < len(mapped) <= MAX_NAME_CHARS
    _validate_metric_name(mapped)
    assert accepted_name(mapped) == mapped


def test_what_may_be_secret_is_not_shown(tmp_path):
    spec = tiny_spec(tmp_path, "https://me:hunter2@host:5000").model_dump(mode="json")
    spec["resources"]["env"] = {"HF_TOKEN": "hunter2"}
    flat = flatten_params(masked_spec(spec))
    assert "hunter2" not in str(flat)
    assert flat["resources.env.HF_TOKEN"] == "***"
    assert flat["tracking.mlflow_uri"] == "https://***@host:5000"
    assert spec["resources"]["env"] == {"HF_TOKEN": "hunter2"}
