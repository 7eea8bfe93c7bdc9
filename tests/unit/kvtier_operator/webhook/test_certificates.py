from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field, replace

import pytest
from cryptography import x509
from kvtier_operator import labels
from kvtier_operator.errors import MachineError
from kvtier_operator.testing.memory_cluster import MemoryCluster
from kvtier_operator.webhook.authority import make_certificates
from kvtier_operator.webhook.certificates import LIFE_S, Certificates, Wish, plan_certificates, trusted, trusts
from kvtier_operator.webhook.keeper import CertificateKeeper
from kvtier_operator.webhook.rules import Verdict
from kvtier_operator.webhook.run import LOOK_S, RETRY_S, SPREAD_S, Webhook, WebhookOptions
from kvtier_operator.webhook.secret import (
    CONFIGURATION_NAME,
    SECRET_NAME,
    configuration_for,
    read_secret,
    secret_of,
    trusted_by,
)
from kvtier_operator.webhook.server import WebhookServer

NOW = 1_800_000_000.0
DAY = 86_400.0
HOSTS = ("kvtier-operator-webhook.kvtier-system.svc",)
NAMESPACE = "kvtier-system"


@functools.cache
def made(at: float = NOW, hosts: tuple[str, ...] = HOSTS, number: int = 0) -> Certificates:
    return make_certificates(hosts, at + 0 * number)


@pytest.mark.parametrize(
    ("existing", "now", "why"),
    [
        (None, NOW, "there are none"),
        (replace(made(), key="?"), NOW, "cannot be used"),
        (replace(made(), certificate=""), NOW, "cannot be used"),
        (replace(made(), key=made(number=1).key), NOW, "the key is another certificate's"),
        (replace(made(), authority=made(number=1).authority), NOW, "cannot be used"),
        (made(hosts=("elsewhere",)), NOW, "not for kvtier-operator-webhook.kvtier-system.svc"),
        (made(), NOW - DAY, "not valid yet"),
        (made(), NOW + LIFE_S * 0.67, "two thirds"),
        (made(), NOW + LIFE_S * 2, "two thirds"),
    ],
)
def test_certificates_are_made_when_they_cannot_be_relied_upon(
    existing: Certificates | None, now: float, why: str
) -> None:
    plan = plan_certificates(existing, HOSTS, now)
    assert plan.wish is Wish.MAKE
    assert why in plan.why


def test_valid_certificates_are_kept_until_two_thirds_of_their_life_are_over() -> None:
    old = NOW + LIFE_S * 2 / 3
    assert plan_certificates(made(), HOSTS, NOW).wish is Wish.KEEP
    assert plan_certificates(made(), HOSTS, old - 600).wish is Wish.KEEP
    assert plan_certificates(made(), HOSTS, old + 1).wish is Wish.MAKE


def test_a_certificate_is_for_names_and_addresses_and_cannot_sign_others() -> None:
    certificate = x509.load_pem_x509_certificate(made(hosts=("127.0.0.1", "a.b.svc")).certificate.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.b.svc"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert plan_certificates(made(hosts=("127.0.0.1", "a.b.svc")), ("127.0.0.1",), NOW).wish is Wish.KEEP


def test_former_authorities_stay_trusted_until_they_expire() -> None:
    first, second = made(), made(at=NOW + 60 * DAY)
    bundle = trusted(first.authority, second.authority, NOW + 60 * DAY)
    assert trusts(bundle, first.authority)
    assert trusts(bundle, second.authority)
    assert trusted(bundle, second.authority, NOW + 60 * DAY) == bundle
    assert trusted(bundle, second.authority, NOW + 91 * DAY) == second.authority
    assert trusted("nonsense", first.authority, NOW) == first.authority
    assert not trusts("", first.authority)
    assert not trusts(first.authority, "")


def test_the_bundle_does_not_grow_for_ever() -> None:
    bundle = ""
    for number in range(8):
        bundle = trusted(bundle, made(number=number).authority, NOW)
    assert bundle.count("BEGIN CERTIFICATE") == 4
    assert trusts(bundle, made(number=7).authority)


def test_a_secret_gives_back_what_was_put_in() -> None:
    stored = read_secret(secret_of(NAMESPACE, made(), "7"))
    assert (stored.found, stored.ours, stored.version) == (made(), True, "7")


@pytest.mark.parametrize("data", [None, {}, {"ca.crt": "YQ==", "tls.crt": "YQ=="}, {"ca.crt": "\0", "tls.crt": 5}])
def test_a_secret_without_all_three_has_no_certificates(data: object) -> None:
    secret = {"metadata": {"labels": {labels.MANAGED_BY: labels.MANAGER}}, "data": data}
    assert read_secret(secret).found is None


@dataclass
class Clock:
    now: float = NOW

    def __call__(self) -> float:
        return self.now


@dataclass
class Replica:
    """One door, with what it shows."""

    api: MemoryCluster
    clock: Clock
    url: str = ""
    shown: list[Certificates] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keeper = CertificateKeeper(self.api, NAMESPACE, HOSTS, self.url, self.make, self.clock)
        self.door = Webhook(WebhookOptions(9443, "127.0.0.1", NAMESPACE), list, self.keeper, clock=self.clock)
        self.made = 0

    def make(self, hosts: object, now: float) -> Certificates:
        self.made += 1
        return make_certificates(HOSTS, now)

    def look(self) -> float:
        return asyncio.run(self.door.look(self.shown.append))


def trust_in(api: MemoryCluster) -> str:
    found = api.objects["ValidatingWebhookConfiguration", "", CONFIGURATION_NAME]
    return trusted_by(found)


def service_configuration() -> dict[str, object]:
    found = configuration_for("https://x/validate", "")
    found["webhooks"][0]["clientConfig"] = {"service": {"name": "kvtier-operator-webhook", "namespace": NAMESPACE}}
    return found


def api_with_configuration() -> MemoryCluster:
    api = MemoryCluster()
    api.put(service_configuration())
    return api


def test_the_first_replica_makes_certificates_and_the_second_one_shares_them() -> None:
    api, clock = api_with_configuration(), Clock()
    one, two = Replica(api, clock), Replica(api, clock)
    assert one.look() == LOOK_S
    assert two.look() == LOOK_S
    assert (one.made, two.made) == (1, 0)
    assert one.shown == two.shown
    assert trusts(trust_in(api), one.shown[0].authority)
    assert one.door.waits_for == ""


def test_looking_again_writes_nothing() -> None:
    api = api_with_configuration()
    replica = Replica(api, Clock())
    replica.look()
    before = list(api.writes)
    replica.look()
    assert api.writes == before
    assert len(replica.shown) == 1


def test_a_renewal_is_trusted_before_it_is_shown_and_the_former_one_stays_trusted() -> None:
    api, clock = api_with_configuration(), Clock()
    one, two = Replica(api, clock), Replica(api, clock)
    one.look()
    two.look()
    clock.now += LIFE_S * 0.7
    wait_s = one.look()
    assert one.made == 2
    assert 0 < wait_s <= SPREAD_S
    assert len(one.shown) == 1
    bundle = trust_in(api)
    newest = read_secret(api.objects["Secret", NAMESPACE, SECRET_NAME]).found
    assert newest is not None
    assert trusts(bundle, newest.authority)
    assert trusts(bundle, two.shown[0].authority)
    clock.now += wait_s
    assert one.look() == LOOK_S
    assert one.shown[-1] == newest
    two.look()
    assert two.shown[-1] == newest
    assert two.made == 0


def test_in_two_years_certificates_never_expire_and_are_renewed_every_two_months() -> None:
    api, clock = api_with_configuration(), Clock()
    replicas = [Replica(api, clock), Replica(api, clock)]
    for turn in range(365):
        clock.now += 2 * DAY
        replica = replicas[turn % 2]
        if replica.look() < LOOK_S:
            clock.now += SPREAD_S
            replica.look()
        for one in replicas:
            if one.shown:
                shown = x509.load_pem_x509_certificate(one.shown[-1].certificate.encode())
                assert shown.not_valid_after_utc.timestamp() > clock.now + 24 * DAY
                assert trusts(trust_in(api), one.shown[-1].authority)
    assert 11 <= sum(one.made for one in replicas) <= 13


def test_of_two_replicas_that_make_certificates_at_once_one_takes_those_of_the_other() -> None:
    api, clock = api_with_configuration(), Clock()
    slow, fast = Replica(api, clock), Replica(api, clock)

    def overtaken(hosts: object, now: float) -> Certificates:
        other = make_certificates(HOSTS, now)
        api.put(secret_of(NAMESPACE, other))
        return make_certificates(HOSTS, now)

    slow.keeper.make = overtaken
    assert slow.look() == RETRY_S
    assert slow.shown == []
    fast.look()
    slow.look()
    assert slow.shown == fast.shown


def test_a_replica_that_read_an_older_secret_takes_no_trust_away() -> None:
    api, clock = api_with_configuration(), Clock()
    old = made()
    api.put(secret_of(NAMESPACE, old))
    replica = Replica(api, clock)
    replica.look()
    clock.now += LIFE_S * 0.7
    replica.look()
    asyncio.run(replica.keeper.make_trusted(old))
    newest = read_secret(api.objects["Secret", NAMESPACE, SECRET_NAME]).found
    assert newest is not None
    assert trusts(trust_in(api), newest.authority)


def test_certificates_that_somebody_brings_are_used_and_never_written() -> None:
    api = api_with_configuration()
    brought = secret_of(NAMESPACE, made())
    brought["metadata"]["labels"] = {}
    api.put(brought)
    replica = Replica(api, Clock(NOW + LIFE_S * 0.9))
    replica.look()
    assert replica.shown == [made()]
    assert replica.made == 0
    assert trusts(trust_in(api), made().authority)


def test_a_brought_secret_without_a_key_is_an_error_at_the_start_and_a_warning_later() -> None:
    api = api_with_configuration()
    broken = secret_of(NAMESPACE, replace(made(), key=""))
    broken["metadata"]["labels"] = {}
    good = secret_of(NAMESPACE, made())
    good["metadata"]["labels"] = {}
    api.put(broken)
    with pytest.raises(MachineError, match=r"tls\.key"):
        Replica(api, Clock()).look()
    api.put(good)
    replica = Replica(api, Clock())
    replica.look()
    api.put(broken)
    assert replica.look() == LOOK_S
    assert replica.shown == [made()]


def test_outside_of_a_cluster_the_operator_configures_the_webhook_and_withdraws_it() -> None:
    api = MemoryCluster()
    replica = Replica(api, Clock(), "https://127.0.0.1:9443/validate")
    replica.look()
    found = api.objects["ValidatingWebhookConfiguration", "", CONFIGURATION_NAME]
    assert found["webhooks"][0]["clientConfig"]["url"] == "https://127.0.0.1:9443/validate"
    assert found["webhooks"][0]["failurePolicy"] == "Fail"
    moved = Replica(api, Clock(), "https://127.0.0.1:9999/validate")
    moved.look()
    assert trusts(trust_in(api), moved.shown[0].authority)
    asyncio.run(replica.keeper.withdraw())
    assert api.objects["ValidatingWebhookConfiguration", "", CONFIGURATION_NAME]["webhooks"][0]["clientConfig"][
        "url"
    ].endswith(":9999/validate")
    asyncio.run(moved.keeper.withdraw())
    assert ("ValidatingWebhookConfiguration", "", CONFIGURATION_NAME) not in api.objects


def test_without_a_configuration_nothing_is_made_in_a_cluster() -> None:
    api = MemoryCluster()
    replica = Replica(api, Clock())
    assert replica.look() == LOOK_S
    assert [name for _, name in api.writes] == [SECRET_NAME]


def test_the_server_takes_certificates_and_refuses_those_that_do_not_fit() -> None:
    server = WebhookServer("127.0.0.1", 0, lambda _request: Verdict())
    server.use(made())
    with pytest.raises(MachineError, match="cannot be used"):
        server.use(replace(made(), key=made(number=1).key))
