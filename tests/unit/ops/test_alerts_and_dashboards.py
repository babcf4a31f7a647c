"""Rules and dashboards ask only for metrics that exist, in queries that Prometheus itself reads."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ops.metrics import BY_NAME, METRICS, SERIES

OPS = Path(__file__).resolve().parents[3] / "ops"
RULES = OPS / "alerts" / "packtrain.yaml"
CASES = Path(__file__).resolve().parents[2] / "data" / "alerts" / "cases.yaml"
DASHBOARDS = sorted((OPS / "dashboards").glob("*.json"))
GRAFANA_VARIABLES = {"$run": "demo", "$__rate_interval": "5m"}
FUNCTION_WORDS = {"on", "by", "ignoring", "without", "group_left", "group_right"}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels(path):
    return json.loads(path.read_text())["panels"]


def queries(path):
    return [target["expr"] for panel in panels(path) for target in panel.get("targets", [])]


ALL_QUERIES = [rule["expr"] for rule in rules()] + [q for path in DASHBOARDS for q in queries(path)]


def labels_of(name):
    for suffix in ("", "_bucket", "_sum", "_count"):
        spec = BY_NAME.get(name.removesuffix(suffix) if suffix else name)
        if spec is not None:
            return {"run", *spec.labels, *({"le"} if suffix == "_bucket" else ())}
    raise AssertionError(name)


def complaints(expr):
    """Metrics that do not exist, and labels that the metric they stand at does not have."""
    found = []
    for name, _, matchers in re.findall(r"\b(packtrain_\w+)\s*(\{([^}]*)\})?", expr):
        if name not in SERIES:
            found.append(f"no metric {name}")
            continue
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", matchers))
        found += [f"{name} has no label {label}" for label in used - labels_of(name)]
    known = set().union({"run", "le"}, *(spec.labels for spec in METRICS))
    grouped = re.findall(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^)]*)\)", expr)
    names = {name.strip() for group in grouped for name in group.split(",") if name.strip()}
    return found + [f"no metric has the label {name}" for name in names - known]


@pytest.mark.parametrize("expr", ALL_QUERIES)
def test_every_query_uses_metrics_and_labels_that_exist(expr):
    assert "packtrain_" in expr
    assert complaints(expr) == []


def test_the_check_would_notice():
    assert complaints("rate(packtrain_no_such_total[5m])") == ["no metric packtrain_no_such_total"]
    assert complaints('packtrain_loss{phase="x"}') == ["packtrain_loss has no label phase"]
    assert complaints("sum by (rank) (packtrain_loss)") == ["no metric has the label rank"]


def test_every_metric_is_asked_for():
    asked = set(re.findall(r"packtrain_\w+", " ".join(ALL_QUERIES)))
    assert [spec.name for spec in METRICS if asked.isdisjoint(spec.series)] == []


def test_rules_say_what_to_do():
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "warning")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert "$labels.run" in rule["annotations"]["summary"]
        assert (OPS.parent / rule["annotations"]["runbook"]).is_file()


def test_every_rule_has_a_case_in_which_it_fires():
    text = CASES.read_text()
    assert [rule["alert"] for rule in rules() if rule["alert"] not in text] == []


@needs_promtool
def test_the_rules_fire_when_they_should_and_only_then(tmp_path):
    for path in (RULES, CASES):
        shutil.copy(path, tmp_path / path.name)
    for command in (["check", "rules", RULES.name], ["test", "rules", CASES.name]):
        done = subprocess.run(
            ["promtool", *command], cwd=tmp_path, text=True, capture_output=True, timeout=50, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_can_read_every_query_of_the_dashboards(tmp_path):
    plain = []
    for path in DASHBOARDS:
        for number, expr in enumerate(queries(path)):
            for variable, value in GRAFANA_VARIABLES.items():
                expr = expr.replace(variable, value)
            assert "$" not in expr
            plain.append({"record": f"{path.stem}:query:{number}", "expr": expr})
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": plain}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", "--lint=none", "queries.yaml"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_three_dashboards_are_whole():
    assert [path.stem for path in DASHBOARDS] == ["cluster", "incidents", "run"]
    uids = [json.loads(path.read_text())["uid"] for path in DASHBOARDS]
    assert len(uids) == len(set(uids))
    for path in DASHBOARDS:
        taken, ids = set(), []
        for panel in panels(path):
            ids.append(panel["id"])
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert taken.isdisjoint(cells), (path.name, panel["title"])
            assert max(x for x, _ in cells) < 24
            taken |= cells
            if panel["type"] != "row":
                assert panel["targets"]
                assert panel["description"].endswith(".")
                assert panel["datasource"]["uid"] == "${datasource}"
        assert len(ids) == len(set(ids))
