"""The registry of patterns: every row is sound, and an operator's rows go over it."""

import re
from pathlib import Path

import pytest

from jobs.errors import PacktrainError
from ops.diagnosis.evidence import classify_line
from ops.diagnosis.pattern import FILES, Registry, shipped_registry, with_overrides
from ops.diagnosis.required_text import required_texts
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
        (r"CUDA out of memory\. Tried", {"cuda out of memory. tried"}),
        ("one|other", {"one", "other"}),
        ("one|o", set()),
        ("one|.*", set()),
        ("(?:one|other) and(?P<x>more)", {" and"}),
        ("(?:first thing|second thing) of", {"first thing", "second thing"}),
        ("(?:first thing|second thing)? of it", {" of it"}),
        ("(?:first thing|second thing)+", {"first thing", "second thing"}),
        ("(?:first thing){0,2}abc", {"abc"}),
        ("abc[de]?fghi", {"fghi"}),
        ("ab{0,60}cdef", {"cdef"}),
        ("abcd+ef", {"abcd"}),
        ("abc(?!never there)", {"abc"}),
        ("(?<!never there)abc", {"abc"}),
        ("(?i)ABC", {"abc"}),
        (r"\bAbc\b of", {"abc of"}),
        (r"[\]x]yes[^]]", {"yes"}),
        ("ab", set()),
    ],
)
def test_required_texts(regex: str, needs: set[str]) -> None:
    assert required_texts(regex) == needs


def test_required_texts_are_in_whatever_the_regex_matches() -> None:
    folder = Path(__file__).parents[3] / "data" / "classifier"
    texts = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()[::2]]
    n_matches = 0
    for pattern in shipped_registry().patterns:
        assert pattern.needs, pattern.id
        for text in texts:
            if (match := pattern.regex.search(text)) is not None:
                n_matches += 1
                assert any(needed in match[0].lower() for needed in pattern.needs), pattern.id
                assert pattern in shipped_registry().candidates(text)
    assert n_matches > 100


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
    line = "OSError: [Errno 122] Disk quota exceeded: '/ckpt/step-7'"
    before = classify_line(line)
    after = classify_line(line, overridden(tmp_path, "patterns:\n- {id: errno-edquot, action: OBSERVE}\n"))
    assert (before.action, after.action) == ("PAGE", "OBSERVE")
    assert after.failure_class is FailureClass.STORAGE
    assert after.confidence == before.confidence


def test_an_operator_can_take_a_row_away_and_ignore_a_sentence(tmp_path: Path) -> None:
    line = "AssertionError: Torch not compiled with CUDA enabled"
    assert classify_line(line).failure_class is FailureClass.CONFIGURATION
    disabled = overridden(tmp_path, "patterns:\n- {id: torch-without-cuda, disabled: true}\n")
    assert classify_line(line, disabled).failure_class is FailureClass.USER_CODE
    ignoring = overridden(tmp_path, "ignored:\n- {id: cpu-only, regex: '.*Torch not compiled.*'}\n")
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
