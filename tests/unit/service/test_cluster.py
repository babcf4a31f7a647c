"""Joining a cluster: Ray's refusals become one sentence."""

import socket

import pytest
import ray
from ray._private.utils import check_version_info

from jobs.spec.load import load_spec
from service.cluster import ClusterError, connect, connection_error
from service.origin import find_source_root


def test_another_python_is_an_environment_mismatch_that_names_both_versions() -> None:
    """ray-project/ray#44063: client and cluster differ in Python's patch version. The text is Ray's own."""
    metadata = {"ray_version": ray.__version__, "python_version": "3.10.12"}
    with pytest.raises(RuntimeError) as refusal:
        check_version_info(metadata, "node 10.0.0.5", python_version_match_level="patch")
    text = str(connection_error("10.0.0.1:6379", refusal.value))
    assert "environment mismatch" in text
    assert "Python 3.10.12" in text
    assert f"Ray {ray.__version__}" in text
    assert "10.0.0.1:6379" in text
    assert "\n" not in text


def test_nobody_there_is_said_with_the_address() -> None:
    text = str(connection_error("10.0.0.1:6379", ConnectionError("Could not find any running Ray instance.")))
    assert "10.0.0.1:6379" in text
    assert "Could not find" in text


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"nothing answers at --address {address} .*ray start --head"):
            connect(load_spec(find_source_root() / "jobs/specs/tiny.yaml"), address, find_source_root())


def test_a_host_without_a_name_is_refused_at_once() -> None:
    spec = load_spec(find_source_root() / "jobs/specs/tiny.yaml")
    with pytest.raises(ClusterError, match=r"nothing answers at --address nohost\.invalid:6379 "):
        connect(spec, "nohost.invalid:6379", find_source_root())
