"""Every class has its page, and no page speaks of what is not there: actions, verbs, keys, metrics."""

import re
from pathlib import Path

import pytest
import typer
import yaml

from jobs.spec.job import JobSpec
from ops.decision import Action
from ops.decision_table import TABLE
from ops.incident import FailureClass
from ops.metrics import SERIES
from service.cli import app

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "ops" / "runbooks").glob("*.md"))
HEADS = ["How it is told from others", "What Packtrain does", "What you check", "Commands"]
VERBS = typer.main.get_command(app).commands
ALERTS = {
    rule["alert"]
    for group in yaml.safe_load((ROOT / "ops" / "alerts" / "packtrain.yaml").read_text())["groups"]
    for rule in group["rules"]
}


def flat(page):
    """The page with every run of white space as one blank."""
    return " ".join(page.read_text().split())


def commands(page):
    return [line.strip() for line in page.read_text().splitlines() if line.startswith("    ")]


def test_each_class_has_a_page_and_each_page_a_class():
    assert {page.stem for page in PAGES} == {failure_class.value for failure_class in FailureClass}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_parts(page):
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADS
    assert commands(page)
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_packtrain_does_is_what_the_decision_table_says(page):
    row, text = TABLE[FailureClass(page.stem)], flat(page)
    ladder = [*row.ladder] if row.ladder[-1] is Action.STOP else [*row.ladder, Action.STOP]
    assert f"without a new checkpoint: {', '.join(ladder)}." in text
    assert ("While the ranks go on training" in text) == (row.running is not None)
    if row.running is not None:
        assert f"first {row.running[0]}, again {row.running[1]}." in text
    if row.strike:
        assert f"Strikes against the node blamed: {row.strike:g} each time." in text
    elif row.strike_on_leaving:
        assert f"Strikes against the node blamed: {row.strike_on_leaving:g} when the node is left." in text
    else:
        assert "No strike against a node." in text
    assert ("Restarts without progress in between" in text) == (row.budget is not None)
    if row.budget is not None:
        assert f"Restarts without progress in between: at most {row.budget}." in text
    shouted = set(re.findall(r"\b(?:RESTART|ROLL|SHR|PAG|OBS|STO)[A-Z_]*\b", text))
    assert shouted <= {action.value for action in Action}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_verbs_and_options_exist(page):
    quoted = re.findall(r"`(packtrain [^`]*)`", flat(page))
    for command in [c for c in commands(page) if c.startswith("packtrain")] + quoted:
        words, verb = command.split()[1:], VERBS[command.split()[1]]
        while hasattr(verb, "commands"):
            words = words[1:]
            verb = verb.commands[words[0]]
        known = {option for parameter in verb.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_metrics_and_alerts_exist(page):
    text = page.read_text()
    sections = {name: field.annotation for name, field in JobSpec.model_fields.items()}
    for section, key in re.findall(
        r"\b(run|train|resources|checkpoint|resilience|tracking)\.([a-z_]+)", text
    ):
        assert key in sections[section].model_fields, f"{section}.{key}"
    assert set(re.findall(r"packtrain_\w+", text)) <= SERIES
    assert set(re.findall(r"\bPacktrain[A-Z]\w+", text)) <= ALERTS
