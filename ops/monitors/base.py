"""The Monitor protocol: what a node agent or the supervisor asks, again and again."""

from typing import Protocol

from ops.signal import Signal


class Monitor(Protocol):
    """Reads one kind of symptom.

    A monitor that cannot work here (no GPU, no InfiniBand, no permission) says so by is_supported, which is
    not a fault. One that raises is switched off by who runs it, and training does not notice.
    """

    @property
    def name(self) -> str:
        """As in signals and reports."""

    def is_supported(self) -> bool:
        """The thing that it reads is there. Asked once."""

    def check(self, now: float) -> list[Signal]:
        """What is new since the last check.

        Args:
            now: wall clock, unix seconds.
        """
