"""Is a port free? Asked of this machine's own sockets."""

from __future__ import annotations

import socket
import time

from kvtier_operator.local.probes import port_is_free


def test_a_port_is_taken_while_somebody_listens_or_talks_on_it() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        assert not port_is_free(port)
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0]:
            listener.close()
            assert not port_is_free(port)


def test_connections_that_a_former_run_left_behind_do_not_take_a_port() -> None:
    """Mooncake's listeners have no SO_REUSEADDR, so theirs cannot be bound for a minute: no reason not to start."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        listener.accept()[0].close()  # who closes first keeps the port in TIME_WAIT
        client.close()
    deadline = time.monotonic() + 20.0
    while not port_is_free(port):
        assert time.monotonic() < deadline
        time.sleep(0.01)
