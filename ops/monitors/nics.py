"""Network interfaces: link down, flapping, errors, gone, from /sys/class/net.

Dropped packets are not told: hosts drop what they do not speak all day. InfiniBand ports have their own file.
"""

from collections.abc import Sequence
from pathlib import Path

from ops.monitors.changes import Counters, Flaps, States
from ops.monitors.tree import read_int, read_text, subfolders
from ops.signal import Entity, EntityKind, Signal

ERROR_COUNTERS = ("rx_errors", "tx_errors")
"""rx_errors holds CRC, frame and length errors too."""


class NicMonitor:
    """Watches the interfaces of a node."""

    name = "nics"

    def __init__(
        self,
        node: str,
        sys_root: Path = Path("/sys"),
        interfaces: Sequence[str] = (),
        flap_window_s: float = 300.0,
        flap_limit: int = 2,
    ) -> None:
        """Remember what to watch.

        Args:
            node: address of this node.
            sys_root: root of a /sys.
            interfaces: their names; none: all that are a device (not lo, veth, bridges).
            flap_window_s: carrier losses within it are counted together.
            flap_limit: that many of them are flapping.
        """
        self._node = node
        self._folder = sys_root / "class" / "net"
        self._asked = list(interfaces)
        self._watched: list[str] = []
        self._states = States()
        self._counters = Counters()
        self._flaps = Flaps(flap_window_s, flap_limit)

    def is_supported(self) -> bool:
        """There is one of the interfaces."""
        return bool(self._names())

    def check(self, now: float) -> list[Signal]:
        """New nic_down, nic_missing (or _cleared); nic_carrier_lost, nic_flapping, nic_errors (how many)."""
        self._watched = sorted({*self._watched, *self._names()})
        return [signal for name in self._watched for signal in self._check_one(name, now)]

    def _names(self) -> list[str]:
        present = [path.name for path in subfolders(self._folder)]
        if self._asked:
            return [name for name in self._asked if name in present]
        return [name for name in present if (self._folder / name / "device").exists()]

    def _check_one(self, name: str, now: float) -> list[Signal]:
        folder = self._folder / name
        entity = Entity(EntityKind.LINK, name, self._node)
        found: list[Signal] = []

        def tell(kind: str, value: float | None, text: str) -> None:
            found.append(Signal(now, self.name, kind, entity, value, text))

        missing = self._states.turned((name, "missing"), not folder.is_dir())
        if missing is not None:
            tell("nic_missing" if missing else "nic_missing_cleared", None, f"{folder}")
        if not folder.is_dir():
            return found
        operstate = read_text(folder / "operstate") or "unknown"
        carrier = read_int(folder / "carrier")  # Refuses to be read while the interface is switched off.
        # "unknown" is what drivers without link detection say for ever: then the carrier alone counts.
        is_down = operstate in ("down", "lowerlayerdown", "notpresent") or carrier == 0
        down = self._states.turned((name, "down"), is_down, first_counts=False)
        if down is not None:
            tell(
                "nic_down" if down else "nic_down_cleared", None, f"operstate {operstate}, carrier {carrier}"
            )
        n_lost = self._carrier_losses(name, folder)
        if n_lost:
            tell("nic_carrier_lost", n_lost, f"the carrier was lost {n_lost} times since the last check")
        n_flaps = self._flaps.went_down(name, n_lost, now)
        if n_flaps:
            tell("nic_flapping", n_flaps, f"went down {n_flaps} times in {self._flaps.window_s:.0f} s")
        for counter in ERROR_COUNTERS:
            value = read_int(folder / "statistics" / counter)
            n_errors = 0.0 if value is None else self._counters.rise((name, counter), value)
            if n_errors:
                tell("nic_errors", n_errors, f"{counter} rose by {n_errors:.0f} to {value}")
        return found

    def _carrier_losses(self, name: str, folder: Path) -> int:
        """By the kernel's count, so that one between two checks is seen too."""
        n_downs = read_int(folder / "carrier_down_count")
        if n_downs is None:  # Before Linux 4.16: ups and downs together.
            n_changes = read_int(folder / "carrier_changes")
            n_downs = None if n_changes is None else (n_changes + 1) // 2
        return 0 if n_downs is None else int(self._counters.rise((name, "carrier"), n_downs))
