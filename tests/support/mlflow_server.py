"""A real MLflow server on loopback, and a small real HTTP proxy before it that fails as servers do."""

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HANG_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[int]:
    """Port of a server with a sqlite store in `folder`; ended by pid."""
    port = free_port()
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
                *("--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'server.db'}"),
                *("--artifacts-destination", str(folder / "artifacts")),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "MLFLOW_DISABLE_TELEMETRY": "true"},
        )
    try:
        _wait_until_healthy(port, server, folder / "server.log")
        yield port
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_healthy(port: int, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and server.poll() is None:
        url = f"http://127.0.0.1:{port}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"no MLflow server: {log.read_text()[-2000:]}")


class FaultyProxy:
    """Forwards HTTP to a server. `mode`: pass, 500, hang, cut (half of the body of the answer), refuse."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self.port = free_port()
        self.n_requests = 0
        self._mode = "pass"
        self._released = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self._listen()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set_mode(self, mode: str) -> None:
        if mode == "refuse":
            self._close()
        elif self._server is None:
            self._listen()
        self._mode = mode
        if mode == "hang":
            self._released = threading.Event()
        else:
            self._released.set()

    def close(self) -> None:
        self._released.set()
        self._close()

    def _close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _listen(self) -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy._answer(self)

            do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            allow_reuse_address = True

            def handle_error(self, *_: object) -> None:
                pass  # a client that has given up is what these tests are about

        self._server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self.n_requests += 1
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if self._mode == "500":
            text = b"QueuePool limit of size 5 overflow 10 reached, connection timed out"
            self._reply(request, 500, [("Content-Type", "text/plain")], text, len(text))
            return
        if self._mode == "hang":
            self._released.wait(HANG_S)
            return
        link = http.client.HTTPConnection("127.0.0.1", self._upstream_port, timeout=30)
        try:
            headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "connection")}
            link.request(request.command, request.path, body, headers)
            answer = link.getresponse()
            text = answer.read()
        finally:
            link.close()
        whole = len(text)
        if self._mode == "cut":
            text = text[: whole // 2]
        kept = [(k, v) for k, v in answer.getheaders() if k.lower() == "content-type"]
        self._reply(request, answer.status, kept, text, whole)

    def _reply(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        announced: int,
    ) -> None:
        request.send_response(status)
        for name, value in headers:
            request.send_header(name, value)
        request.send_header("Content-Length", str(announced))
        request.end_headers()
        request.wfile.write(body)
