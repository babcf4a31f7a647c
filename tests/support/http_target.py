"""A real HTTP server on loopback that takes what Apprise's json:// sends: it answers, refuses or hangs."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextlib.contextmanager
def target(answer_after_s: float = 0.0, status: int = 200) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """A real HTTP server on loopback; gives its port and the messages that it got."""
    got, is_over = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            is_over.wait(answer_after_s)
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.end_headers()

        def log_message(self, *_args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_port, got
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def dead_port() -> int:
    """A port on which nobody listened a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
