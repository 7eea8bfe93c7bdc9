"""Opens the door and keeps it open: certificates, trust, server. IO; called by `controller.run`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.cluster import Cluster
from kvtier_operator.errors import ApiConflict, ApiError, MachineError, SpecError
from kvtier_operator.log import event
from kvtier_operator.observed import Manifest
from kvtier_operator.spec_rules import accept, on_host_network
from kvtier_operator.webhook.certificates import Certificates
from kvtier_operator.webhook.keeper import CertificateKeeper
from kvtier_operator.webhook.review import Request
from kvtier_operator.webhook.rules import Verdict, judge
from kvtier_operator.webhook.secret import SERVICE_NAME, WEBHOOK_PATH
from kvtier_operator.webhook.server import WebhookServer

_LOG = logging.getLogger(__name__)

LOOK_S = 60.0
RETRY_S = 2.0
SPREAD_S = 5.0

Lister = Callable[[], Iterable[Manifest]]


@dataclass(frozen=True, slots=True)
class WebhookOptions:
    """Where the door is.

    Attributes:
        port: to listen on.
        host: to listen on.
        namespace: of the Secret, and of the Service through which the API server asks.
        url: where it asks when we run outside of its cluster, ``https://HOST:PORT``; empty = at the Service.
    """

    port: int
    host: str
    namespace: str
    url: str = ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names and addresses that the certificate is for."""
        return (urlsplit(self.url).hostname or "",) if self.url else (f"{SERVICE_NAME}.{self.namespace}.svc",)

    @property
    def whole_url(self) -> str:
        """With the path; empty = there is a Service."""
        return f"{self.url.rstrip('/')}{WEBHOOK_PATH}" if self.url else ""


@dataclass(slots=True)
class Webhook:
    """One replica's door. `run` is a task.

    Args:
        options: where it is.
        lister: every KVCacheCluster that is known.
        keeper: of the certificates.
        clock: monotonic seconds.
        look_s: between two looks at the Secret, which another replica may have renewed.
        spread_s: until every API server has heard whom to trust.
    """

    options: WebhookOptions
    lister: Lister
    keeper: CertificateKeeper
    look_s: float = LOOK_S
    spread_s: float = SPREAD_S
    clock: Callable[[], float] = time.monotonic
    waits_for: str = "the webhook's certificates"
    _used: Certificates | None = None
    _trusted: Certificates | None = None
    _trusted_since: float = field(default=0.0)

    async def run(self) -> None:
        """Answer until cancelled."""
        async with WebhookServer(self.options.host, self.options.port, self.judge) as server:
            try:
                while True:
                    delay_s = await self.look(server.use)
                    await asyncio.sleep(delay_s)
            finally:
                with suppress(ApiError):
                    await self.keeper.withdraw()

    async def look(self, use: Callable[[Certificates], None]) -> float:
        """Take one look at certificates and trust.

        Args:
            use: shows certificates to whoever connects.

        Returns:
            Seconds until the next look.

        Raises:
            MachineError: there are no usable certificates, and never were.
        """
        try:
            newest = await self.keeper.certificates()
            told_before = await self.keeper.make_trusted(newest)
        except ApiConflict:
            return RETRY_S  # another replica was faster
        except MachineError as error:
            if self._used is None:
                raise
            event(_LOG, "webhook keeps its certificates", level=logging.WARNING, error=error)
            return self.look_s
        except ApiError as error:
            event(_LOG, "webhook waits", level=logging.WARNING, error=error)
            return RETRY_S
        now = self.clock()
        if self._trusted != newest:
            self._trusted, self._trusted_since = newest, now - (self.spread_s if told_before else 0.0)
        wait_s = self._trusted_since + self.spread_s - now
        # The first ones are better than none; later ones only when everybody trusts them.
        if self._used != newest and (self._used is None or wait_s <= 0):
            use(newest)
            self._used, self.waits_for = newest, ""
            event(_LOG, "webhook serves", port=self.options.port)
        return self.look_s if self._used == newest else max(wait_s, 0.1)

    def judge(self, request: Request) -> Verdict:
        """See `rules.judge`."""
        verdict = judge(request.document, request.before, self._others(request))
        if verdict.violations:
            event(_LOG, "kept out", cluster=request.name, violations=len(verdict.violations))
        return verdict

    def _others(self, request: Request) -> Iterable[KVCacheCluster]:
        """Valid clusters on the host network but the one that is asked about; only such a one needs to know them."""
        if not on_host_network(request.document):
            return
        for manifest in self.lister():
            meta = manifest["metadata"]
            if f"{meta['namespace']}/{meta['name']}" != request.name and on_host_network(manifest):
                with suppress(SpecError):
                    yield accept(manifest)


def make_webhook(options: WebhookOptions, lister: Lister, api: Cluster) -> Webhook:
    """A door with the certificates of the real world."""
    keeper = CertificateKeeper(api, options.namespace, options.hosts, options.whole_url)
    return Webhook(options, lister, keeper)
