"""A small valid spec that tests change, and the loader's error lines."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.spec.load import LoadedSpec, load_spec, load_spec_with_report
from tests.unit.jobs.spec.deepspeed_examples import PLAIN

VALID = """\
model:
  preset: tiny
data:
  seq_len: 64
optim:
  lr: 3e-4
train:
  steps: 10
  global_batch_size: 8
  micro_batch_size: 2
strategy:
  kind: native
  dp: 2
"""


@pytest.fixture
def write_spec(tmp_path: Path) -> Callable[..., Path]:
    """Writes a spec below tmp_path: the valid one with pieces of text replaced."""

    def write(text: str = VALID, **replaced: str) -> Path:
        for old, new in replaced.items():
            assert old in text
            text = text.replace(old, new)
        file = tmp_path / "spec.yaml"
        file.write_text(text)
        return file

    return write


@pytest.fixture
def problems_of(tmp_path: Path) -> Callable[..., list[str]]:
    """Loads a spec that must be refused; returns the error's lines without the folder's name."""

    def load(text: str, overrides: Sequence[str] = ()) -> list[str]:
        file = tmp_path / "spec.yaml"
        file.write_text(text)
        with pytest.raises(SpecError) as caught:
            load_spec(file, overrides)
        return str(caught.value).replace(f"{tmp_path}/", "").splitlines()

    return load


@pytest.fixture
def load_json(tmp_path):
    def load(config: object, text: str = PLAIN, *overrides: str) -> LoadedSpec:
        (tmp_path / "ds.json").write_text(config if isinstance(config, str) else json.dumps(config, indent=2))
        (tmp_path / "spec.yaml").write_text(text)
        return load_spec_with_report(tmp_path / "spec.yaml", overrides)

    return load


@pytest.fixture
def refused_json(load_json, tmp_path):
    def refused(config: object, text: str = PLAIN, *overrides: str) -> list[str]:
        with pytest.raises(SpecError) as caught:
            load_json(config, text, *overrides)
        return str(caught.value).replace(f"{tmp_path}/", "").splitlines()

    return refused
