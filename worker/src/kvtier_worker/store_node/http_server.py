"""/health, /ready and /metrics of a storage node."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvtier_worker.store_node.status import NodeStatus


class StatusServer:
    """Serves until `close`. Raises OSError if its address cannot be bound.

    Args:
        host: to bind.
        port: to bind.
        status: what to report.
        is_alive: whether the node's main loop still turns.
    """

    def __init__(self, host: str, port: int, status: NodeStatus, is_alive: Callable[[], bool]) -> None:
        self._server = ThreadingHTTPServer((host, port), _handler(status, is_alive))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(status: NodeStatus, is_alive: Callable[[], bool]) -> type[BaseHTTPRequestHandler]:
    def answer(path: str) -> tuple[HTTPStatus, str, bytes]:
        state = {"state": status.state.value}
        if path == "/health":
            alive = is_alive()
            return _code(alive), "application/json", json.dumps({"alive": alive, **state}).encode()
        if path == "/ready":
            return _code(status.is_ready), "application/json", json.dumps({"ready": status.is_ready, **state}).encode()
        if path == "/metrics":
            return HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", status.exposition()
        return HTTPStatus.NOT_FOUND, "application/json", b'{"error": "try /health, /ready or /metrics"}'

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, content_type, body = answer(self.path.partition("?")[0])
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
            """Probes every few seconds are no news."""

    return Handler


def _code(good: bool) -> HTTPStatus:
    return HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
