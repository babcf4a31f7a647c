"""What all tests need: the fork server of the distributed tests is told once what to preload."""

import signal

import hypothesis
import pytest

from tests.support import ranks

# No deadline: a loaded machine is not a failing test.
hypothesis.settings.register_profile("packtrain", deadline=None)
hypothesis.settings.load_profile("packtrain")

# A shell's background jobs ignore SIGINT, and nohup's SIGHUP; programs that tests signal would do so as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-minutes", default=0.0, type=float, help="run the drill without a fault so long")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    modules = {item.module for item in items if isinstance(item, pytest.Function)}
    wanted = {name for module in modules for name in getattr(module, "RANKS_PRELOAD", ())}
    ranks.preload(sorted(wanted))
    if any(hasattr(module, "run_ranks") for module in modules):
        ranks.warm()
