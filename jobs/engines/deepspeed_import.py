"""The import of DeepSpeed, without what it drags along. Configures nothing and starts nothing."""

import logging
import sys
from typing import Any

UNUSED = "mlflow"
"""DeepSpeed's autotuner, unused here, imports it where it is installed: 1400 modules, 115 MB, and a thread,
which a process that is going to fork ranks must not have."""


def import_deepspeed() -> Any:
    """The deepspeed module."""
    is_hidden = UNUSED not in sys.modules
    quiet = logging.root.manager.disable
    try:
        if is_hidden:
            sys.modules[UNUSED] = None  # type: ignore[assignment]
        logging.disable(logging.WARNING)  # on every import without a GPU it warns that there is none
        import deepspeed  # noqa: TID251 - this is a DeepSpeed engine file
    finally:
        logging.disable(quiet)
        if is_hidden:
            del sys.modules[UNUSED]
    return deepspeed
