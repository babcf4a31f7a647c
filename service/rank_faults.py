"""Faults that a rank has on purpose, for drills: it was told to, and has them inside its next forward pass.

Where and when is said by who orders a drill (drill.py). Nothing here happens without an order.
"""

import ctypes
import time

FAULTS = ("sleep", "spin", "hold-gil")
"""The thread that trains sleeps; computes for ever; sleeps in C code without giving the interpreter back."""
FOREVER_S = 10**6


class RankFaults:
    """What this rank was told to suffer. `ask` is for another thread than the one that trains."""

    def __init__(self) -> None:
        """Nothing."""
        self._wanted = ""

    def ask(self, fault: str) -> None:
        """Have one of FAULTS at the next forward pass.

        Raises:
            ValueError: there is no such fault.
        """
        if fault not in FAULTS:
            raise ValueError(f"no such fault of a rank: {fault!r}; there are {', '.join(FAULTS)}")
        self._wanted = fault

    def strike(self) -> None:
        """Have it now, if one was asked for: does not return then."""
        match self._wanted:
            case "sleep":
                time.sleep(FOREVER_S)
            case "spin":
                while True:
                    pass
            case "hold-gil":
                ctypes.PyDLL(None).sleep(FOREVER_S)
