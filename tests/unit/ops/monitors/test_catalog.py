"""The catalogue names every monitor, and none that cannot work here is run."""

import importlib
import inspect
import logging
from pathlib import Path

import ops.monitors
from ops.monitors.base import Monitor
from ops.monitors.catalog import CATALOG, supported
from ops.monitors.disks import DiskMonitor
from ops.monitors.infiniband import InfinibandMonitor
from ops.monitors.shm import ShmMonitor


def monitor_classes():
    """Classes of the folder that have what the protocol asks of a class."""
    for path in Path(ops.monitors.__file__).parent.glob("*.py"):
        module = importlib.import_module(f"ops.monitors.{path.stem}")
        for _, found in inspect.getmembers(module, inspect.isclass):
            is_own = found.__module__ == module.__name__ and found is not Monitor
            if is_own and all(hasattr(found, part) for part in ("is_supported", "check", "name")):
                yield found


def test_every_monitor_is_in_the_catalogue_and_nothing_else():
    assert sorted(found.name for found in monitor_classes()) == sorted(CATALOG)
    assert all(CATALOG.values())


class Raises:
    name = "raises"

    def is_supported(self) -> bool:
        raise RuntimeError("boom")

    def check(self, now):
        raise AssertionError("never asked")


def test_only_what_can_work_here_is_kept(tmp_path, caplog):
    disks, shm = DiskMonitor([tmp_path], "n1"), ShmMonitor("n1", path=tmp_path)
    monitors: list[Monitor] = [disks, InfinibandMonitor("n1", tmp_path), Raises(), shm]
    with caplog.at_level(logging.ERROR):
        found = supported(monitors)
    assert found.monitors == (disks, shm)
    assert found.absent == ("infiniband", "raises")
    assert "boom" in caplog.text
