"""What all tests need: the fork server of the distributed tests is told once what to preload."""

import hypothesis
import pytest

from tests.support import ranks

# No deadline: a loaded machine is not a failing test.
hypothesis.settings.register_profile("packtrain", deadline=None)
hypothesis.settings.load_profile("packtrain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    modules = {item.module for item in items if isinstance(item, pytest.Function)}
    wanted = {name for module in modules for name in getattr(module, "RANKS_PRELOAD", ())}
    ranks.preload(sorted(wanted))
    if any(hasattr(module, "run_ranks") for module in modules):
        ranks.warm()
