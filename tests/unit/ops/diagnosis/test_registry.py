"""The registry of patterns: every row is sound, and an operator's rows go over it."""

import re
from pathlib import Path

import pytest

from jobs.errors import PacktrainError
from ops.diagnosis.evidence import classify_line
from ops.diagnosis.pattern import FILES, Registry, shipped_registry, with_overrides
from ops.diagnosis.required_text import required_text
from ops.diagnosis.verdict import Role
from ops.incident import FailureClass


def overridden(tmp_path: Path, text: str) -> Registry:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return with_overrides(shipped_registry(), [path])


def test_every_file_of_patterns_is_read_and_every_row_has_its_own_id() -> None:
    folder = Path(__file__).parents[4] / "ops" / "diagnosis" / "patterns"
    assert {path.stem for path in folder.glob("*.yaml")} == set(FILES)
    ids = [pattern.id for pattern in shipped_registry().patterns]
    assert len(ids) == len(set(ids))
    assert len(ids) > 150


def test_every_row_says_who_prints_it_and_cannot_match_nothing() -> None:
    for pattern in shipped_registry().patterns:
        assert pattern.source, pattern.id
        assert pattern.regex.search("") is None, pattern.id
        assert 0.0 < pattern.confidence < 1.0


def test_only_a_root_yields() -> None:
    assert all(p.role is Role.ROOT for p in shipped_registry().patterns if p.yields)


@pytest.mark.parametrize(
    ("regex", "needs"),
    [
        (r"CUDA out of memory\. Tried", "cuda out of memory. tried"),
        ("one|other", ""),
        ("(?:one|other) thing", " thing"),
        (r"abc[de]?fgh", "abc"),
        (r"ab{0,60}cdef", "cdef"),
        (r"\d+ of thems?", " of them"),
        (r"[\]x]yes", "yes"),
        ("ab", ""),
    ],
)
def test_required_text(regex: str, needs: str) -> None:
    assert required_text(regex) == needs


def test_required_text_is_in_whatever_the_regex_matches() -> None:
    examples = Path(__file__).parents[3] / "data" / "classifier" / "failure_lines.jsonl"
    text = examples.read_text()
    n_matches = 0
    for pattern in shipped_registry().patterns:
        for match in pattern.regex.finditer(text):
            n_matches += 1
            assert pattern.needs in match[0].lower(), pattern.id
    assert n_matches > 30


def test_an_operators_new_row_comes_before_all_shipped_ones(tmp_path: Path) -> None:
    line = "RuntimeError: CUDA out of memory. Tried to allocate 2 MiB (leased card)"
    registry = overridden(
        tmp_path,
        "patterns:\n- {id: lease, regex: 'leased card', class: preemption, role: root, advice: Ask again.}\n",
    )
    verdict = classify_line(line, registry)
    assert (verdict.failure_class, verdict.pattern) == (FailureClass.PREEMPTION, "lease")
    assert verdict.advice == "Ask again."
    assert classify_line(line).failure_class is FailureClass.GPU_OUT_OF_MEMORY


def test_an_operators_row_changes_the_keys_that_it_names(tmp_path: Path) -> None:
    line = "kernel: nfs: server 10.0.0.5 not responding, timed out"
    before = classify_line(line)
    after = classify_line(
        line, overridden(tmp_path, "patterns:\n- {id: nfs-not-responding, action: OBSERVE}\n")
    )
    assert (before.action, after.action) == ("PAGE", "OBSERVE")
    assert after.failure_class is FailureClass.STORAGE
    assert after.confidence == before.confidence


def test_an_operator_can_take_a_row_away_and_ignore_a_sentence(tmp_path: Path) -> None:
    disabled = overridden(tmp_path, "patterns:\n- {id: nic-power, disabled: true}\n")
    line = "mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 2): Detected insufficient power on the PCIe slot"
    assert classify_line(line).failure_class is FailureClass.NETWORK
    assert classify_line(line, disabled).failure_class is FailureClass.UNKNOWN
    ignoring = overridden(tmp_path, "ignored:\n- {id: slot, regex: 'Detected insufficient power.*'}\n")
    assert classify_line(line, ignoring).failure_class is FailureClass.UNKNOWN


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("patterns:\n- {id: a, regex: x, class: storage}\n", "'a': missing keys role"),
        (
            "patterns:\n- {id: a, regex: x, class: disk, role: root}\n",
            "'a': 'disk' is not a valid FailureClass",
        ),
        ("patterns:\n- {id: a, regex: '(', class: storage, role: root}\n", "'a': missing )"),
        ("patterns:\n- {id: a, regex: x, class: storage, role: root, colour: red}\n", "unknown keys colour"),
        (
            "patterns:\n- {id: a, regex: x, class: storage, role: root, action: PRAY}\n",
            "action 'PRAY' is none of",
        ),
        (
            "patterns:\n- {id: a, regex: x, class: storage, role: root, confidence: 2}\n",
            "confidence 2.0 is not",
        ),
        ("- 1\n", "expected a mapping"),
        ("patterns: {a: 1}\n", "must be a list"),
        ("patterns: [\n", "cannot be read as patterns"),
    ],
)
def test_a_wrong_row_is_told_by_file_and_id(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(PacktrainError, match=re.escape(complaint)) as caught:
        overridden(tmp_path, text)
    assert "own.yaml" in str(caught.value)
