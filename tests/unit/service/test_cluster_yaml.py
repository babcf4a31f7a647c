"""The shipped cluster files pass Ray's own validation, offline, and state what Ray leaves open."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parents[3]
FILES = ["cluster.yaml", "cluster-aws.yaml"]


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())


def start_commands(config: dict[str, Any]) -> dict[str, list[str]]:
    return {role: config[f"{role}_start_ray_commands"] for role in ("head", "worker")}


@pytest.mark.parametrize("name", FILES)
def test_ray_accepts_it(name: str):
    prepared = prepare_config(load(name))
    validate_config(prepared)
    # Ray fills in defaults for what is missing: the commands must still be ours.
    assert start_commands(prepared) == start_commands(load(name))


@pytest.mark.parametrize("name", FILES)
def test_ray_would_refuse_a_slip(name: str):
    with pytest.raises(Exception, match="worker_start_commands"):
        validate_config(prepare_config(load(name) | {"worker_start_commands": []}))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("role", ["head", "worker"])
def test_every_start_command_sets_the_authentication(name: str, role: str):
    for command in start_commands(load(name))[role]:
        before_ray = command.partition("ray st")[0]
        assert "RAY_AUTH_MODE=token" in before_ray, command


@pytest.mark.parametrize("name", FILES)
def test_dashboard_stays_on_loopback_and_lost_nodes_are_noticed_soon(name: str):
    start = start_commands(load(name))["head"][-1]
    assert "--dashboard-host=127.0.0.1" in shlex.split(start)
    limits = dict(word.split("=") for word in shlex.split(start.replace(";", " ")) if "health_check" in word)
    rows = [row.split("|") for row in (ROOT / "docs" / "cluster.md").read_text().splitlines()]
    assert limits == {row[1].strip(): row[3].strip() for row in rows if len(row) > 3 and "_check_" in row[1]}
    period_ms, timeout_ms, failures = (
        int(limits[f"RAY_health_check_{key}"]) for key in ("period_ms", "timeout_ms", "failure_threshold")
    )
    assert (period_ms + timeout_ms) * failures <= 10_000


@pytest.mark.parametrize("name", FILES)
def test_commands_are_valid_shell(name: str):
    config = load(name)
    lists = [config[key] for key in config if key.endswith("commands")]
    for command in [command for commands in lists for command in commands]:
        checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, f"{command}: {checked.stderr}"


@pytest.mark.parametrize("name", FILES)
def test_nodes_install_what_the_start_commands_call(name: str):
    config = load(name)
    assert config["file_mounts"]["~/packtrain"] == "."
    assert "make -C ~/packtrain venv" in config["setup_commands"]
    for commands in start_commands(config).values():
        assert all('PATH="$HOME/packtrain/.venv/bin:$PATH"' in command for command in commands)


def test_the_cloud_example_keeps_ranks_off_the_head():
    types = load("cluster-aws.yaml")["available_node_types"]
    assert len(types) == 2
    assert types["head"]["resources"] == {"CPU": 0}
    assert types["gpu_spot"]["labels"] == {"market-type": "spot"}
    assert types["gpu_spot"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
