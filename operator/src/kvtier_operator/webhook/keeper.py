"""Keeps certificates in a Secret that all replicas share, and the API server's trust in them. IO.

Order matters: the API server trusts a new authority before any replica uses what it signed, and trusts the former one
until that expires. So no request meets a certificate that is not trusted, whichever replica answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier_operator.cluster import Cluster
from kvtier_operator.errors import MachineError
from kvtier_operator.log import event
from kvtier_operator.webhook.authority import make_certificates
from kvtier_operator.webhook.certificates import Certificates, Wish, plan_certificates, trusted, trusts
from kvtier_operator.webhook.secret import (
    CONFIGURATION_KIND,
    CONFIGURATION_NAME,
    SECRET_KIND,
    SECRET_NAME,
    configuration_for,
    has_our_webhook,
    leads_to,
    read_secret,
    secret_of,
    trusted_by,
    with_trust,
)

_LOG = logging.getLogger(__name__)

MakeCertificates = Callable[[Iterable[str], float], Certificates]


@dataclass(slots=True)
class CertificateKeeper:
    """One replica's care for the shared certificates. Every call is one look; the caller repeats it.

    Args:
        api: the Kubernetes API.
        namespace: of the Secret.
        hosts: names and addresses under which the API server reaches us.
        url: where it asks when we run outside of its cluster; empty = at a Service.
        make: makes certificates.
        wall: seconds since the epoch.
    """

    api: Cluster
    namespace: str
    hosts: tuple[str, ...]
    url: str = ""
    make: MakeCertificates = make_certificates
    wall: Callable[[], float] = time.time

    async def certificates(self) -> Certificates:
        """The ones to use: those of the Secret if they are valid, else new ones, written there first.

        Raises:
            ApiError: the server refused or did not answer; `ApiConflict`: another replica wrote first, look again.
            MachineError: somebody brings certificates that cannot be used.
        """
        secret = await self.api.get(SECRET_KIND, self.namespace, SECRET_NAME)
        stored = read_secret(secret) if secret is not None else None
        existing = stored.found if stored else None
        plan = plan_certificates(existing, self.hosts, self.wall())
        if plan.wish is Wish.KEEP and existing is not None:
            return existing
        if stored is not None and not stored.ours:
            return self._brought(existing, plan.why)
        made = self.make(self.hosts, self.wall())
        manifest = secret_of(self.namespace, made, stored.version if stored else "")
        if stored is None:
            await self.api.create(SECRET_KIND, self.namespace, manifest)
        else:
            await self.api.replace(SECRET_KIND, self.namespace, SECRET_NAME, manifest)
        event(_LOG, "certificates made", secret=f"{self.namespace}/{SECRET_NAME}", why=plan.why)
        return made

    async def make_trusted(self, certificates: Certificates) -> bool:
        """See to it that the API server trusts them.

        Returns:
            True if it did already; False if it was told just now, or has no configuration of our webhook.

        Raises:
            ApiError: as above.
        """
        configuration = await self.api.get(CONFIGURATION_KIND, "", CONFIGURATION_NAME)
        if configuration is None or not has_our_webhook(configuration):
            if not self.url:
                return False
            await self._create(certificates)
            return False
        bundle = trusted_by(configuration)
        leads_here = not self.url or leads_to(configuration, self.url)
        if leads_here and trusts(bundle, certificates.authority):
            return True
        news = trusted(bundle, certificates.authority, self.wall())
        changed = with_trust(configuration, news)
        if not leads_here:
            version = configuration["metadata"]["resourceVersion"]
            changed = configuration_for(self.url, news)
            changed["metadata"]["resourceVersion"] = version
        await self.api.replace(CONFIGURATION_KIND, "", CONFIGURATION_NAME, changed)
        event(_LOG, "authority trusted", configuration=CONFIGURATION_NAME)
        return False

    async def withdraw(self) -> None:
        """Close a door that nobody will answer at: outside of the cluster, when we stop.

        Raises:
            ApiError: as above.
        """
        if not self.url:
            return
        configuration = await self.api.get(CONFIGURATION_KIND, "", CONFIGURATION_NAME)
        if configuration is not None and leads_to(configuration, self.url):
            await self.api.delete(CONFIGURATION_KIND, "", CONFIGURATION_NAME, configuration["metadata"]["uid"])

    async def _create(self, certificates: Certificates) -> None:
        manifest = configuration_for(self.url, certificates.authority)
        await self.api.create(CONFIGURATION_KIND, "", manifest)
        event(_LOG, "webhook configured", configuration=CONFIGURATION_NAME, url=self.url)

    def _brought(self, existing: Certificates | None, why: str) -> Certificates:
        """Somebody else's: used for as long as they work at all; whoever brings them renews them."""
        place = f"Secret {self.namespace}/{SECRET_NAME}"
        if existing is None:
            fix = "add them, or delete the Secret: the operator then makes its own"
            raise MachineError([f"{place}: not all of ca.crt, tls.crt and tls.key are there; {fix}"])
        event(_LOG, "certificates of others", level=logging.WARNING, secret=place, problem=why)
        return existing
