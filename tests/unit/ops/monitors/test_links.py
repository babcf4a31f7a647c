"""NICs and InfiniBand ports in trees like /sys: down, flapping, errors, slower, gone."""

import shutil

import pytest

from ops.monitors.infiniband import InfinibandMonitor
from ops.monitors.nics import NicMonitor


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def kinds(signals):
    return [signal.kind for signal in signals]


@pytest.fixture
def nic(tmp_path):
    folder = tmp_path / "class" / "net" / "eth0"
    write(folder, operstate="up", carrier=1, carrier_changes=2, carrier_down_count=1)
    write(folder, statistics__rx_errors=7, statistics__tx_errors=0, statistics__rx_dropped=3)
    (folder / "device").mkdir()
    write(tmp_path / "class" / "net" / "veth12", operstate="down", carrier=0)
    return folder


@pytest.fixture
def nics(tmp_path, nic):
    monitor = NicMonitor("n1", tmp_path)
    assert monitor.is_supported()
    assert monitor.check(0.0) == []  # Old errors, and a virtual interface that is down.
    return monitor


def test_a_nic_goes_down_and_comes_back(nic, nics):
    write(nic, operstate="down", carrier=0, carrier_down_count=2)
    down, lost = nics.check(10.0)
    assert (down.kind, str(down.entity)) == ("nic_down", "link eth0 (node n1)")
    assert (lost.kind, lost.value) == ("nic_carrier_lost", 1)
    assert nics.check(20.0) == []
    write(nic, operstate="up", carrier=1)
    assert kinds(nics.check(30.0)) == ["nic_down_cleared"]


def test_two_short_losses_between_checks_are_flapping(nic, nics):
    write(nic, carrier_down_count=2)
    assert kinds(nics.check(10.0)) == ["nic_carrier_lost"]
    write(nic, carrier_down_count=3)
    assert kinds(nics.check(309.0)) == ["nic_carrier_lost", "nic_flapping"]
    write(nic, carrier_down_count=4)
    assert kinds(nics.check(400.0)) == ["nic_carrier_lost"]


def test_an_old_kernel_counts_ups_and_downs_together(nic, nics, tmp_path):
    (nic / "carrier_down_count").unlink()
    monitor = NicMonitor("n1", tmp_path)
    assert monitor.check(0.0) == []
    write(nic, carrier_changes=4)
    assert kinds(monitor.check(1.0)) == ["nic_carrier_lost"]


def test_errors_are_told_by_their_rise_and_drops_are_not(nic, nics):
    write(nic, statistics__rx_errors=19, statistics__rx_dropped=5000)
    (signal,) = nics.check(10.0)
    assert (signal.kind, signal.value) == ("nic_errors", 12)
    assert nics.check(20.0) == []


def test_a_nic_that_vanishes(nic, nics):
    shutil.rmtree(nic)
    assert kinds(nics.check(10.0)) == ["nic_missing"]
    assert nics.check(20.0) == []


def test_asked_interfaces_may_be_virtual_and_one_without_link_detection_is_up(tmp_path, nic):
    write(tmp_path / "class" / "net" / "tun0", operstate="unknown")
    assert NicMonitor("n1", tmp_path, interfaces=["tun0", "veth12"]).check(0.0) == []


def test_no_nics(tmp_path):
    assert not NicMonitor("n1", tmp_path).is_supported()
    assert NicMonitor("n1", tmp_path).check(0.0) == []
    assert not NicMonitor("n1", tmp_path, interfaces=["eth9"]).is_supported()


def test_the_real_sys_is_readable():
    NicMonitor("n1", interfaces=["lo"]).check(0.0)
    assert NicMonitor("n1", interfaces=["lo"]).check(0.0) == []


@pytest.fixture
def port(tmp_path):
    cards = tmp_path / "class" / "infiniband"
    for card, state, phys_state in (
        ("mlx5_0", "4: ACTIVE", "5: LinkUp"),
        ("mlx5_1", "1: DOWN", "3: Disabled"),
    ):
        folder = cards / card / "ports" / "1"
        write(folder, state=state, phys_state=phys_state, rate="400 Gb/sec (4X NDR)", link_layer="InfiniBand")
        write(folder, counters__link_downed=1, counters__symbol_error=5, counters__port_xmit_wait=10)
        write(folder, hw_counters__local_ack_timeout_err=0)
    return cards / "mlx5_0" / "ports" / "1"


@pytest.fixture
def infiniband(tmp_path, port):
    monitor = InfinibandMonitor("n1", tmp_path)
    assert monitor.is_supported()
    assert monitor.check(0.0) == []  # The second card has no cable; old errors.
    return monitor


@pytest.mark.parametrize("down", [{"state": "1: DOWN"}, {"state": "2: INIT"}, {"phys_state": "2: Polling"}])
def test_a_port_goes_down_and_comes_back(port, infiniband, down):
    write(port, **down)
    (signal,) = infiniband.check(10.0)
    assert (signal.kind, str(signal.entity)) == ("ib_port_down", "link mlx5_0/1 (node n1)")
    assert infiniband.check(20.0) == []
    write(port, state="4: ACTIVE", phys_state="5: LinkUp")
    assert kinds(infiniband.check(30.0)) == ["ib_port_down_cleared"]


def test_one_flap_is_told_as_one_and_two_in_five_minutes_as_flapping(port, infiniband):
    write(port, counters__link_downed=2)
    assert kinds(infiniband.check(10.0)) == ["ib_link_downed"]
    write(port, counters__link_downed=3)
    *_, flapping = infiniband.check(200.0)
    assert (flapping.kind, flapping.value) == ("ib_flapping", 2)


def test_two_flaps_far_apart_are_not_flapping(port, infiniband):
    for at, n_downs in ((10.0, 2), (400.0, 3)):
        write(port, counters__link_downed=n_downs)
        assert kinds(infiniband.check(at)) == ["ib_link_downed"]


def test_error_counters_and_not_congestion(port, infiniband):
    write(
        port, counters__symbol_error=9, hw_counters__local_ack_timeout_err=2, counters__port_xmit_wait=1 << 40
    )
    assert [(s.kind, s.value) for s in infiniband.check(10.0)] == [("ib_errors", 4), ("ib_errors", 2)]
    assert infiniband.check(20.0) == []


def test_a_port_that_came_back_slower(port, infiniband):
    write(port, rate="100 Gb/sec (1X NDR)")
    (signal,) = infiniband.check(10.0)
    assert (signal.kind, signal.value, signal.text) == ("ib_rate_low", 100, "100 Gb/s, was 400 Gb/s")


def test_a_card_that_vanishes(port, infiniband):
    shutil.rmtree(port.parents[1])
    assert kinds(infiniband.check(10.0)) == ["ib_port_missing"]


def test_no_infiniband(tmp_path):
    assert not InfinibandMonitor("n1", tmp_path).is_supported()
    assert InfinibandMonitor("n1", tmp_path).check(0.0) == []
