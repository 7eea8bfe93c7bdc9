"""The HTTPS port that the API server asks. IO; decides nothing: see `rules`."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import msgspec
from aiohttp import web

from kvtier_operator.errors import MachineError
from kvtier_operator.webhook.certificates import Certificates
from kvtier_operator.webhook.review import Request, answer, read_review
from kvtier_operator.webhook.rules import Verdict
from kvtier_operator.webhook.secret import WEBHOOK_PATH

_LONGEST_REQUEST_BYTES = 8 << 20
"""Two objects of the largest size that etcd takes, and some."""
_SHUTDOWN_S = 1.0

Judge = Callable[[Request], Verdict]


@dataclass(slots=True)
class WebhookServer:
    """Answers reviews. An async context manager; an error while judging is a 500, which keeps the object out.

    Args:
        host: to listen on.
        port: likewise.
        judge: decides.
    """

    host: str
    port: int
    judge: Judge
    _tls: ssl.SSLContext = field(default_factory=lambda: ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_LONGEST_REQUEST_BYTES)
        app.router.add_post(WEBHOOK_PATH, self._review)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, self.port, ssl_context=self._tls).start()
        except OSError as error:
            await self._runner.cleanup()
            raise MachineError(
                [f"--webhook_port={self.port}: cannot listen on {self.host}: {error.strerror}"]
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def use(self, certificates: Certificates) -> None:
        """Show these from the next connection on; open ones go on with those that they began with.

        Raises:
            MachineError: they cannot be used.
        """
        with _in_memory(certificates.certificate) as chain, _in_memory(certificates.key) as key:
            try:
                self._tls.load_cert_chain(chain, key)
            except ssl.SSLError as error:
                raise MachineError([f"the webhook's certificates cannot be used: {error}"]) from error

    async def _review(self, http: web.Request) -> web.Response:
        try:
            request = read_review(msgspec.json.decode(await http.read()))
        except msgspec.DecodeError:
            request = None
        if request is None:
            raise web.HTTPBadRequest(text="no AdmissionReview of a KVCacheCluster\n")
        return web.Response(body=msgspec.json.encode(answer(request, self.judge(request))), headers=_JSON)


_JSON: Mapping[str, str] = {"Content-Type": "application/json"}


@contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """A path of a file that is on no disk: OpenSSL reads keys from files only."""
    descriptor = os.memfd_create("kvtier-webhook")
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
