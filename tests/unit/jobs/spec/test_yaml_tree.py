"""Files that are no spec at all, and how scalars are read."""

import pytest

from jobs.errors import SpecError
from jobs.spec.load import load_spec
from tests.unit.jobs.spec.conftest import VALID


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            b"",
            "spec.yaml:1: the file is empty; a spec has at least the sections model, data, optim and train",
        ),
        (
            b"# only this\n",
            "spec.yaml:1: the file is empty; a spec has at least the sections model, data, optim and train",
        ),
        (b"- a\n- b\n", "spec.yaml:1: a spec is sections of `key: value`, but this file holds a list"),
        (
            b"\n\nword\n",
            "spec.yaml:3: a spec is sections of `key: value`, but this file holds a single value",
        ),
        (
            b"model:\n\tpreset: tiny\n",
            "spec.yaml:2: a tab is used for indentation; YAML allows only spaces there",
        ),
        (b"a: 1\nb: \xff\n", "spec.yaml:2: not UTF-8 text (byte 0xff at offset 8); save it as UTF-8"),
        (b"a: 1\n---\nb: 2\n", "spec.yaml:2: a second document starts here (---); a spec is one document"),
        (
            b"a: [1\nb: 2\n",
            "spec.yaml:2: not YAML: expected ',' or ']', but got ':' (while parsing a flow sequence)",
        ),
        (b"a: *x\n", "spec.yaml:1: not YAML: found undefined alias 'x'"),
        (b"a: &x [*x]\n", "spec.yaml:1: an alias (*name) repeats itself without end; write the value out"),
        (b"a: \x00\n", "spec.yaml:1: holds the character U+0000, which YAML does not allow"),
        (b"a: " + b"[" * 5000, "spec.yaml: lists or mappings are nested too deeply to be a spec"),
    ],
)
def test_not_a_spec(tmp_path, content, expected):
    file = tmp_path / "spec.yaml"
    file.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert str(caught.value).replace(f"{tmp_path}/", "") == expected


def test_aliases_cannot_explode(tmp_path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    file = tmp_path / "spec.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(SpecError, match="an alias"):
        load_spec(file)


def test_no_file(tmp_path):
    with pytest.raises(SpecError, match=r"spec.yaml: no such file$"):
        load_spec(tmp_path / "spec.yaml")
    with pytest.raises(SpecError, match=r": is a folder, not a file$"):
        load_spec(tmp_path)


def test_byte_order_mark(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + VALID.encode())
    assert load_spec(file).train.steps == 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3e-4", 3e-4),
        ("3E4", 3e4),
        (".5", 0.5),
        ("1.", 1.0),
        ("+1e3", 1000.0),
        ("1_000_000.5", None),
        ("1", 1),
    ],
)
def test_numbers(write_spec, problems_of, text, expected):
    spec_text = VALID.replace("lr: 3e-4", f"lr: {text}")
    if expected is None:
        assert problems_of(spec_text) == [
            f"spec.yaml:6: optim.lr: wants a number, got the text '{text}'; write 1e+06, plain and "
            f"without quotes"
        ]
    else:
        assert load_spec(write_spec(spec_text)).optim.lr == expected


def test_groups_of_digits(write_spec):
    assert load_spec(write_spec(VALID.replace("steps: 10", "steps: 1_000_000"))).train.steps == 1_000_000


@pytest.mark.parametrize(
    "word", ["on", "off", "yes", "no", "y", "n", "12:30", "2024-01-01", "1_2", "0o7", "a: b"]
)
def test_words_stay_text(write_spec, word):
    quoted = f"'{word}'" if ":" in word and " " in word else word
    spec = load_spec(write_spec(f"resources:\n  env:\n    X: {quoted}\n{VALID}"))
    assert spec.resources.env == {"X": word}
