"""InfiniBand and RoCE ports: state, rate, flaps and error counters, from /sys/class/infiniband.

Congestion counters (waits, discards, CNPs) are not told: a busy fabric has them. Reads this node's side only.
"""

from pathlib import Path

from ops.monitors.changes import Counters, Flaps, States
from ops.monitors.tree import read_int, read_text, subfolders
from ops.signal import Entity, EntityKind, Signal

ERROR_COUNTERS = (
    "counters/symbol_error",
    "counters/link_error_recovery",
    "counters/port_rcv_errors",
    "counters/port_rcv_remote_physical_errors",
    "counters/local_link_integrity_errors",
    "counters/excessive_buffer_overrun_errors",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/req_transport_retries_exceeded",
    "hw_counters/rnr_nak_retry_err",
)
"""Files below a port; those that a card lacks are skipped."""


class InfinibandMonitor:
    """Watches the ports of all RDMA cards of a node."""

    name = "infiniband"

    def __init__(
        self,
        node: str,
        sys_root: Path = Path("/sys"),
        flap_window_s: float = 300.0,
        flap_limit: int = 2,
    ) -> None:
        """Remember what to watch.

        Args:
            node: address of this node.
            sys_root: root of a /sys.
            flap_window_s: losses of the link within it are counted together.
            flap_limit: that many of them are flapping; fewer are tolerated.
        """
        self._node = node
        self._folder = sys_root / "class" / "infiniband"
        self._watched: set[tuple[str, str]] = set()
        self._states = States()
        self._counters = Counters()
        self._flaps = Flaps(flap_window_s, flap_limit)
        self._best_rate_gbit_per_s: dict[tuple[str, str], float] = {}

    def is_supported(self) -> bool:
        """There is a port."""
        return bool(self._ports())

    def check(self, now: float) -> list[Signal]:
        """New ib_port_down, ib_port_missing, ib_rate_low, ib_link_downed, ib_flapping, ib_errors."""
        self._watched |= self._ports()
        return [signal for port in sorted(self._watched) for signal in self._check_port(port, now)]

    def _ports(self) -> set[tuple[str, str]]:
        devices = subfolders(self._folder)
        return {(device.name, port.name) for device in devices for port in subfolders(device / "ports")}

    def _check_port(self, port: tuple[str, str], now: float) -> list[Signal]:
        folder = self._folder / port[0] / "ports" / port[1]
        entity = Entity(EntityKind.LINK, "/".join(port), self._node)
        found: list[Signal] = []

        def tell(kind: str, value: float | None, text: str) -> None:
            found.append(Signal(now, self.name, kind, entity, value, text))

        def tell_turn(kind: str, is_bad: bool, first_counts: bool, value: float | None, text: str) -> None:
            turned = self._states.turned((port, kind), is_bad, first_counts)
            if turned is not None:
                tell(kind if turned else f"{kind}_cleared", value, text)

        tell_turn("ib_port_missing", not folder.is_dir(), True, None, str(folder))
        if not folder.is_dir():
            return found
        state, phys_state = _state(folder / "state"), _state(folder / "phys_state")
        is_down = state not in ("", "ACTIVE") or phys_state not in ("", "LinkUp")
        # A port without a cable was down before we came: not told.
        tell_turn("ib_port_down", is_down, False, None, f"state {state}, phys_state {phys_state}")
        rate_gbit_per_s = _rate_gbit_per_s(folder / "rate")
        if rate_gbit_per_s is not None and not is_down:
            best = max(rate_gbit_per_s, self._best_rate_gbit_per_s.get(port, 0.0))
            self._best_rate_gbit_per_s[port] = best
            text = f"{rate_gbit_per_s:g} Gb/s, was {best:g} Gb/s"
            tell_turn("ib_rate_low", rate_gbit_per_s < best, True, rate_gbit_per_s, text)
        n_downs = int(self._rise(port, folder, "counters/link_downed"))
        if n_downs:
            tell("ib_link_downed", n_downs, f"link_downed rose by {n_downs}")
        n_flaps = self._flaps.went_down(port, n_downs, now)
        if n_flaps:
            tell("ib_flapping", n_flaps, f"went down {n_flaps} times in {self._flaps.window_s:.0f} s")
        for counter in ERROR_COUNTERS:
            n_errors = self._rise(port, folder, counter)
            if n_errors:
                tell("ib_errors", n_errors, f"{counter} rose by {n_errors:.0f}")
        return found

    def _rise(self, port: tuple[str, str], folder: Path, counter: str) -> float:
        value = read_int(folder / counter)
        return 0.0 if value is None else self._counters.rise((port, counter), value)


def _state(path: Path) -> str:
    """From "4: ACTIVE" the word ACTIVE."""
    return (read_text(path) or "").rpartition(":")[2].strip()


def _rate_gbit_per_s(path: Path) -> float | None:
    """From "200 Gb/sec (4X HDR)" the 200."""
    words = (read_text(path) or "").split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None
