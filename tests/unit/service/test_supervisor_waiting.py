import signal

from ops.ledger import read_ledger
from service.supervisor import Supervisor
from tests.support.runs import make_run, tiny_spec


def test_a_wait_for_nodes_is_written_down_once_and_given_up_when_stopped(tmp_path):
    spec = tiny_spec(tmp_path)
    run_dir, _ = make_run(tmp_path, spec)
    supervisor = Supervisor(spec, run_dir, "", lambda _line: None, lambda _supervisor: None)
    assert [supervisor._gives_up_waiting(s) for s in (0.5, 3.0, 4.0)] == [False, False, False]
    supervisor._on_signal(signal.SIGINT, None)
    assert supervisor._gives_up_waiting(5.0)
    (event,) = read_ledger(run_dir)
    assert (event.kind, event.integer("world_size")) == ("nodes_awaited", spec.world_size)
