"""Faults that a rank has on purpose, for drills: what it was told to have, until it has had it.

Where and when is said by who orders a drill (drill.py). Those that stop the rank happen here, inside its next
forward pass; those that spoil its numbers or its pace are fault_hook.py's. Nothing happens without an order.
"""

import ctypes
import time

STUCK = ("sleep", "spin", "hold-gil")
"""The thread that trains sleeps; computes for ever; sleeps in C code without giving the interpreter back."""
WRONG = ("nan", "nan-data", "bit-flip", "slow")
"""NaN in one forward pass; NaN whenever the samples of the next step are trained on, by later ranks too; one
bit of a parameter flipped; each pass takes twice as long from then on."""
FAULTS = (*STUCK, *WRONG)
FOREVER_S = 10**6


class RankFaults:
    """What this rank was told to suffer. `ask` is for another thread than the one that trains."""

    def __init__(self) -> None:
        """Nothing."""
        self._wanted = ""

    def ask(self, fault: str) -> None:
        """Have one of FAULTS, as soon as its moment comes.

        Raises:
            ValueError: there is no such fault.
        """
        if fault not in FAULTS:
            raise ValueError(f"no such fault of a rank: {fault!r}; there are {', '.join(FAULTS)}")
        self._wanted = fault

    def take(self, fault: str) -> bool:
        """Whether this one was asked for; it is had now, and not again."""
        if self._wanted != fault:
            return False
        self._wanted = ""
        return True

    def strike(self) -> None:
        """Have one of STUCK now, if it was asked for: does not return then."""
        match self._wanted:
            case "sleep":
                time.sleep(FOREVER_S)
            case "spin":
                while True:
                    pass
            case "hold-gil":
                ctypes.PyDLL(None).sleep(FOREVER_S)
