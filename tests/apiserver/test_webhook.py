"""The admission webhook on a real API server: what it keeps out, what it says, and how its certificates change."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml
from kvtier_operator.controller.kube_client import KubeClient
from kvtier_operator.observed import Manifest
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.installation import (
    OPERATOR,
    OPERATOR_NAMESPACE,
    install_definition,
    install_rights,
    small_cluster,
)
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.waiting import wait_for
from kvtier_operator.webhook.certificates import Certificates
from kvtier_operator.webhook.keeper import CertificateKeeper
from kvtier_operator.webhook.run import Webhook, WebhookOptions
from kvtier_operator.webhook.secret import CONFIGURATION_NAME, SECRET_NAME
from kvtier_worker.testing.processes import free_port

ROOT = Path(__file__).parents[2]
VALID = sorted((ROOT / "examples").glob("*.yaml"))
INVALID = sorted((ROOT / "examples" / "invalid").rglob("*.yaml"))
EXPECT = re.compile(r"# expect: (\S+): (.*)")
PATIENCE_S = 20.0
CONFIGURATION = ("validatingwebhookconfiguration", CONFIGURATION_NAME)

pytestmark = pytest.mark.apiserver


@pytest.fixture(scope="module")
def installed(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    install_definition(control_plane)
    install_rights(control_plane, OPERATOR)
    subject = {"kind": "User", "name": OPERATOR, "apiGroup": "rbac.authorization.k8s.io"}
    for document in yaml.safe_load_all((ROOT / "deploy" / "webhook.yaml").read_text()):
        if "subjects" in document:
            document["subjects"].append(subject)
        if document["kind"] != "ValidatingWebhookConfiguration":  # its Service has no pods here
            control_plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(document))
    yield control_plane
    control_plane.kubectl("delete", *CONFIGURATION, "--ignore-not-found")


@pytest.fixture(autouse=True)
def fresh_start(installed: ControlPlane) -> None:
    installed.kubectl("delete", *CONFIGURATION, "--ignore-not-found")
    installed.kubectl("delete", "secret", SECRET_NAME, "-n", OPERATOR_NAMESPACE, "--ignore-not-found")


def client(installed: ControlPlane, user: str = "") -> KubeClient:
    path = installed.kubeconfig_of(user) if user else installed.kubeconfig
    token = yaml.safe_load(path.read_text())["users"][0]["user"]["token"]
    return KubeClient(lambda: kopf.ConnectionInfo(server=installed.server, ca_path=str(installed.ca_file), token=token))


@dataclass
class NoticedWebhook(Webhook):
    """Remembers the certificates that it showed."""

    shown: list[Certificates] = field(default_factory=list)

    async def look(self, use: Callable[[Certificates], None]) -> float:
        def showing(certificates: Certificates) -> None:
            use(certificates)
            self.shown.append(certificates)

        return await super().look(showing)


@dataclass
class Door:
    """A webhook in a thread of its own; it keeps what certificates it showed."""

    installed: ControlPlane
    others: list[Manifest] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    used: list[Certificates] = field(default_factory=list)
    error: BaseException | None = None

    @contextmanager
    def open(self) -> Iterator[Door]:
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._run())
        thread = threading.Thread(target=self._serve, args=(loop, task))
        thread.start()
        try:
            wait_for("the webhook answers", lambda: self.used or self.error)
            assert self.error is None
            wait_for("the API server asks it", self._is_asked)
            yield self
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join()
            loop.close()

    def _is_asked(self) -> bool:
        """The API server hears of a configuration a moment later."""
        wrong = small_cluster("asked")
        wrong["spec"]["roles"][0]["settings"] = {"blocksize": 64}
        dry = ("create", "-n", "default", "--dry-run=server", "-f", "-")
        return "blocksize" in refusal(self.installed, *dry, stdin=yaml.safe_dump(wrong))

    def _serve(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            loop.run_until_complete(asyncio.sleep(0.3))  # connections say goodbye to the API server
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            self.error = error

    async def _run(self) -> None:
        options = WebhookOptions(self.port, "127.0.0.1", OPERATOR_NAMESPACE, f"https://127.0.0.1:{self.port}")
        async with client(self.installed) as api:
            keeper = CertificateKeeper(api, OPERATOR_NAMESPACE, options.hosts, options.whole_url)
            door = NoticedWebhook(options, lambda: self.others, keeper, look_s=0.1, spread_s=3.0, shown=self.used)
            await door.run()


@pytest.fixture
def door(installed: ControlPlane, fresh_start: None) -> Iterator[Door]:
    with Door(installed).open() as opened:
        yield opened


def refusal(installed: ControlPlane, *arguments: str, stdin: str = "") -> str:
    """What kubectl says when it fails; empty = it did not."""
    try:
        installed.kubectl(*arguments, stdin=stdin)
    except Exception as error:  # noqa: BLE001 - its text is the answer under test
        return str(error)
    return ""


def test_examples_come_in_and_every_invalid_one_stays_out_with_all_that_is_wrong(
    installed: ControlPlane, door: Door, namespace: str
) -> None:
    dry = ("apply", "-n", namespace, "--dry-run=server")
    installed.kubectl(*dry, *(f"--filename={path}" for path in VALID))
    neighbour = yaml.safe_load((ROOT / "examples" / "host-network.yaml").read_text())
    door.others.append({**neighbour, "metadata": {"name": "host-network", "namespace": "default"}})
    everything = refusal(installed, *dry, "-R", "-f", str(ROOT / "examples" / "invalid"))
    answers = {Path(part.partition('"')[0]).name: part for part in re.split(r'error when [a-z]+ "', everything)[1:]}
    assert set(answers) == {path.name for path in INVALID}
    judged_by_us = [path for path in INVALID if "# by: webhook" in path.read_text()]
    assert len(judged_by_us) >= 10
    for path in judged_by_us:
        for named, fragment in EXPECT.findall(path.read_text()):
            assert f"* {named}" in answers[path.name]
            assert fragment in answers[path.name]


def test_all_violations_and_warnings_of_one_object_come_at_once(
    installed: ControlPlane, door: Door, namespace: str
) -> None:
    wrong = small_cluster("many", transport={"ports": {"range": {"start": 23000, "size": 3}}})
    wrong["spec"]["roles"][0]["settings"] = {"blocksize": 64, "tp_size": 2}
    answer = refusal(installed, "apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(wrong))
    assert "blocksize" in answer
    assert "tp_size" in answer
    installed.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(small_cluster("one")))
    renamed = small_cluster("one")
    renamed["spec"]["model"]["identity"]["id"] = "another"
    path = f"/apis/kvtier.dev/v1alpha1/namespaces/{namespace}/kvcacheclusters/one"
    (warning,) = warnings(installed, path, renamed)
    assert "the store's keys move from smollm2-135m to another" in warning


def warnings(installed: ControlPlane, path: str, patch: Manifest) -> list[str]:
    """What the API server says beside its answer, as kubectl shows it."""
    headers = {"Authorization": f"Bearer {installed.token}", "Content-Type": "application/merge-patch+json"}
    request = urllib.request.Request(installed.server + path, json.dumps(patch).encode(), headers, method="PATCH")
    trust = ssl.create_default_context(cafile=str(installed.ca_file))
    with urllib.request.urlopen(request, context=trust) as answer:
        return list(answer.headers.get_all("Warning") or ())


def test_ports_of_two_clusters_on_the_host_network_are_compared(
    installed: ControlPlane, door: Door, namespace: str
) -> None:
    def on_host(name: str, start: int, port: int) -> dict[str, Any]:
        manifest = small_cluster(
            name, transport={"hostNetwork": True, "ports": {"range": {"start": start, "size": 99}}}
        )
        manifest["spec"]["roles"][0]["port"] = port
        return manifest

    first = {**on_host("first", 23000, 8100), "metadata": {"name": "first", "namespace": "elsewhere"}}
    door.others.append(first)
    answer = refusal(installed, "apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(on_host("x", 24000, 8100)))
    assert "spec.roles[0].port of elsewhere/first" in answer
    assert not refusal(installed, "apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(on_host("x", 24000, 8101)))


def test_new_certificates_keep_nobody_out(installed: ControlPlane, door: Door, namespace: str) -> None:
    manifest = yaml.safe_dump(small_cluster("steady"))
    for _ in range(2):
        known = len(door.used)
        installed.kubectl("delete", "secret", SECRET_NAME, "-n", OPERATOR_NAMESPACE)
        deadline = time.monotonic() + PATIENCE_S
        while len(door.used) == known:
            assert time.monotonic() < deadline
            assert not refusal(installed, "apply", "-n", namespace, "--dry-run=server", "-f", "-", stdin=manifest)
        for _ in range(3):
            assert not refusal(installed, "apply", "-n", namespace, "--dry-run=server", "-f", "-", stdin=manifest)
    assert len({one.authority for one in door.used}) == 3


def test_two_replicas_share_one_secret_and_trust(installed: ControlPlane, door: Door) -> None:
    with Door(installed, port=free_port()).open() as second:
        assert second.used == door.used


def test_a_door_that_was_closed_in_order_is_gone_and_one_that_broke_keeps_everybody_out(
    installed: ControlPlane, namespace: str
) -> None:
    manifest = yaml.safe_dump(small_cluster("patient"))
    with Door(installed).open():
        saved = installed.kubectl("get", *CONFIGURATION, "-o", "json")
    wait_for(
        "a door that was closed in order is forgotten",
        lambda: not refusal(installed, "apply", "-n", namespace, "--dry-run=server", "-f", "-", stdin=manifest),
    )
    kept = yaml.safe_load(saved)
    kept["metadata"] = {"name": CONFIGURATION_NAME}
    installed.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(kept))
    wait_for(
        "a closed door is noticed",
        lambda: refusal(installed, "apply", "-n", namespace, "--dry-run=server", "-f", "-", stdin=manifest),
    )


def test_the_rights_of_the_deployed_operator_are_enough_and_no_more(installed: ControlPlane) -> None:
    documents = list(yaml.safe_load_all((ROOT / "deploy" / "webhook.yaml").read_text()))
    (configuration,) = [one for one in documents if one["kind"] == "ValidatingWebhookConfiguration"]
    installed.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(configuration))

    async def look() -> list[bool]:
        async with client(installed, OPERATOR) as api:
            keeper = CertificateKeeper(api, OPERATOR_NAMESPACE, ("kvtier-operator-webhook.kvtier-system.svc",))
            return [await keeper.make_trusted(await keeper.certificates()) for _ in range(2)]

    assert run(look()) == [False, True]
    for verb, what in (("list", "secrets"), ("delete", "secrets"), ("create", "validatingwebhookconfigurations")):
        answer = refusal(installed, "auth", "can-i", verb, what, "-n", OPERATOR_NAMESPACE, f"--as={OPERATOR}")
        assert "no" in answer, (verb, what)


def run(work: Coroutine[Any, Any, list[bool]]) -> list[bool]:
    return asyncio.run(work)


def test_the_operator_opens_the_door_itself(installed: ControlPlane, namespace: str) -> None:
    port = free_port()
    flags = (f"--operator_namespace={OPERATOR_NAMESPACE}", f"--namespace={namespace}", f"--webhook_port={port}")
    wrong = small_cluster("wrong")
    wrong["spec"]["roles"][0]["settings"] = {"blocksize": 64}
    with ExitStack() as stack:
        stack.enter_context(OperatorProcess(installed.kubeconfig, *flags, f"--webhook_url=https://127.0.0.1:{port}"))
        answer = wait_for(
            "the webhook is known",
            lambda: refusal(
                installed, "create", "-n", namespace, "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(wrong)
            ),
        )
        assert "did you mean block_size" in answer or "block_size" in answer
        assert "is invalid" in answer
    assert "not found" in refusal(installed, "get", *CONFIGURATION).lower()
