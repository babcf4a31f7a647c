"""A small valid spec that tests change, and the loader's error lines."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.spec.load import load_spec

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
