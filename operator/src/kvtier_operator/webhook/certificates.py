"""When the door needs new certificates, and which authorities the API server should trust. Pure.

A certificate comes with an authority of its own whose key is forgotten at once: there is nothing to steal that could
sign another one. So a renewal brings a new authority too, and the former one stays trusted until it expires, while
other replicas still use what it signed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

LIFE_S = 90 * 86_400
"""Of a certificate that we make."""
RENEW_AFTER = 2 / 3
"""Of its life."""
_MOST_AUTHORITIES = 4


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts: the authority that the API server trusts, our certificate and its key."""

    authority: str
    certificate: str
    key: str


class Wish(StrEnum):
    """What should happen to the certificates that exist."""

    KEEP = "Keep"
    MAKE = "Make"


@dataclass(frozen=True, slots=True)
class CertificatePlan:
    """What to do now, and why."""

    wish: Wish
    why: str


def plan_certificates(existing: Certificates | None, hosts: Iterable[str], now: float) -> CertificatePlan:
    """Keep valid certificates until two thirds of their life are over.

    Args:
        existing: as the Secret has them; None = it does not exist.
        hosts: names and addresses under which the API server reaches us.
        now: seconds since the epoch.
    """
    if existing is None:
        return CertificatePlan(Wish.MAKE, "there are none")
    try:
        found = _read(existing)
    except (ValueError, TypeError, InvalidSignature) as error:
        return CertificatePlan(Wish.MAKE, f"they cannot be used: {error or type(error).__name__}")
    if missing := sorted(set(hosts) - found.hosts):
        return CertificatePlan(Wish.MAKE, f"they are not for {', '.join(missing)}")
    renew_at = found.since + (found.until - found.since) * RENEW_AFTER
    if now < found.since:
        return CertificatePlan(Wish.MAKE, "they are not valid yet")
    if now >= renew_at:
        return CertificatePlan(Wish.MAKE, "two thirds of their life are over")
    return CertificatePlan(Wish.KEEP, "valid")


def trusted(bundle: str, authority: str, now: float) -> str:
    """The authorities that the API server should trust: ours first, and those of other replicas that still count.

    Args:
        bundle: that it trusts now, PEM; what cannot be read is dropped.
        authority: of the certificate that we use.
        now: seconds since the epoch.
    """
    ours = _authorities(authority)
    others = [one for one in _authorities(bundle) if one not in ours and one.not_valid_after_utc.timestamp() > now]
    others = sorted(dict.fromkeys(others), key=lambda one: one.not_valid_after_utc, reverse=True)
    kept = [*ours, *others][:_MOST_AUTHORITIES]
    return "".join(one.public_bytes(Encoding.PEM).decode() for one in kept)


def trusts(bundle: str, authority: str) -> bool:
    """True when the authority is among those of the bundle."""
    ours = set(_authorities(authority))
    return bool(ours) and ours <= set(_authorities(bundle))


@dataclass(frozen=True, slots=True)
class _Facts:
    hosts: frozenset[str]
    since: float
    until: float


def _read(existing: Certificates) -> _Facts:
    """What a usable set of certificates says of itself; an error for one that no client would accept."""
    certificate = x509.load_pem_x509_certificate(existing.certificate.encode())
    authority = x509.load_pem_x509_certificate(existing.authority.encode())
    certificate.verify_directly_issued_by(authority)
    key = load_pem_private_key(existing.key.encode(), None).public_key()
    public = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_bytes(*public) != certificate.public_key().public_bytes(*public):
        raise ValueError("the key is another certificate's")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = (str(address) for address in names.get_values_for_type(x509.IPAddress))
    return _Facts(
        frozenset((*names.get_values_for_type(x509.DNSName), *addresses)),
        max(one.not_valid_before_utc.timestamp() for one in (certificate, authority)),
        min(one.not_valid_after_utc.timestamp() for one in (certificate, authority)),
    )


def _authorities(pem: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError:
        return []
