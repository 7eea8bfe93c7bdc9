"""Nodes without containers: plays the kubelets of a control plane, so that workloads roll out in milliseconds. IO.

The real scheduler binds pods to these nodes; here they are reported running and ready, or failing if a test wants that,
and let go when they are deleted. Pods of jobs never end. Nothing listens at the addresses of pods, which are distinct
loopback ones: a test may put a server of its own there. Kubernetes leaves loopback addresses out of EndpointSlices.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPException
from types import TracebackType
from typing import Any, Self

from kvtier_operator.testing.api_client import STRATEGIC_PATCH, ApiClient, Json, RequestFailed
from kvtier_operator.testing.hollow_pods import Mood, Place, Rule, report, rule_of
from kvtier_operator.testing.hollow_registry import NodeRegistry, NodeShape, timestamp
from kvtier_operator.testing.pod_feed import PodFeed

HEARTBEAT_S = 10.0
RETRY_S = 0.2
_GONE = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
"""The pod we wanted to change is gone, or another one has its name."""
_OUR_MISTAKES = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
"""The end of the thread shows them in a test; everything else may pass."""
_PER_OCTET = 250

ChooseAddress = Callable[[Mapping[str, Any]], str]
"""Gives a pod its IP address; an empty one means the next loopback address."""


class HollowNodes:
    """A few nodes. A context manager: entering registers them, leaving removes them and their pods.

    Args:
        api: of the control plane, as its admin.
        count: how many; they are called hollow-0, hollow-1, … and are spread over three zones.
        shape: what each offers.
        termination_s: how long a deleted pod takes to end; never longer than its own grace period.
        choose_address: chooses addresses of pods.
    """

    def __init__(
        self,
        api: ApiClient,
        count: int = 3,
        *,
        shape: NodeShape | None = None,
        termination_s: float = 0.0,
        choose_address: ChooseAddress = lambda _pod: "",
    ) -> None:
        self._api = api
        self._termination_s = termination_s
        self._choose_address = choose_address
        # Hollow nodes of another control plane on this machine get addresses of their own.
        self._net = f"127.{random.SystemRandom().randrange(16, 240)}"
        self._nodes = {f"hollow-{index}": f"{self._net}.255.{index + 1}" for index in range(count)}
        self._registry = NodeRegistry(api, self._nodes, shape or NodeShape())
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        # Guarded by the condition: pods by uid, when to look at each, since when it ends, its address; wishes of tests.
        self._pods: dict[str, Json] = {}
        self._due: dict[str, float] = {}
        self._ending: dict[str, float] = {}
        self._addresses: dict[str, str] = {}
        self._rules: list[Rule] = []
        self._stopping = False
        self._feed = PodFeed(api, self)
        self._worker = threading.Thread(target=self._work, name="hollow-nodes", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the nodes."""
        return tuple(self._nodes)

    def start(self) -> None:
        """Register the nodes; returns when the scheduler may use them. Once only."""
        self._registry.register()
        self._feed.start()
        self._worker.start()
        self._registry.wait_accepted()

    def stop(self) -> None:
        """Remove the nodes, then their pods. A dead API server does not make it fail."""
        self._feed.stop()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._worker.join()
        with suppress(OSError, HTTPException):
            self._registry.remove()
            for pod in self._pods.values():
                with suppress(RequestFailed):
                    self._remove(pod)

    def fail(self, glob: str, reason: str = "CrashLoopBackOff") -> None:
        """Let the containers of pods wait for this reason. The glob is matched with ``NAME`` and ``NAMESPACE/NAME``."""
        self._add_rule(Rule(glob, Mood.FAILING, reason))

    def hold(self, glob: str) -> None:
        """Keep pods running but not ready."""
        self._add_rule(Rule(glob, Mood.HELD))

    def release(self, glob: str = "*") -> None:
        """Let pods be ready again; by default all of them."""
        self._add_rule(Rule(glob, Mood.READY))

    def address(self, namespace: str, name: str) -> str:
        """IP address of a pod that runs here; empty when it does not."""
        with self._changed:
            for uid, pod in self._pods.items():
                if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == (namespace, name):
                    return self._addresses.get(uid, "")
        return ""

    def known(self) -> Iterable[str]:
        """Uids of our pods; for the feed."""
        with self._changed:
            return tuple(self._pods)

    def seen(self, pod: Json) -> None:
        """Look at a pod soon; for the feed."""
        if pod["spec"]["nodeName"] in self._nodes:
            with self._changed:
                uid = pod["metadata"]["uid"]
                self._pods[uid] = pod
                self._due[uid] = time.monotonic()
                self._changed.notify_all()

    def gone(self, uid: str) -> None:
        """Forget a pod; for the feed."""
        with self._changed:
            for facts in (self._pods, self._due, self._ending, self._addresses):
                facts.pop(uid, None)

    def _add_rule(self, rule: Rule) -> None:
        with self._changed:
            # A wish about all pods replaces every former one, else only the one with the same words.
            self._rules = [old for old in self._rules if rule.glob not in ("*", old.glob)] + [rule]
            self._due |= dict.fromkeys(self._pods, time.monotonic())
            self._changed.notify_all()

    def _work(self) -> None:
        """The working thread: brings pods further when they are due, and renews the nodes."""
        beat_at = time.monotonic() + HEARTBEAT_S
        while not self._stopping:
            for uid in self._wait_for_due(beat_at):
                self._attend(uid)
            if time.monotonic() >= beat_at:
                with suppress(OSError, HTTPException):
                    self._registry.beat()
                beat_at = time.monotonic() + HEARTBEAT_S

    def _wait_for_due(self, until: float) -> list[str]:
        with self._changed:
            first = min((until, *self._due.values()))
            if not self._stopping and (left := first - time.monotonic()) > 0:
                self._changed.wait(left)
            now = time.monotonic()
            due = [uid for uid, at in self._due.items() if at <= now]
            for uid in due:
                del self._due[uid]
            return due

    def _attend(self, uid: str) -> None:
        """Bring one pod further; later once more if the API server is busy or away."""
        with self._changed:
            pod, rules = self._pods.get(uid), tuple(self._rules)
        if pod is None:
            return
        try:
            if "deletionTimestamp" in pod["metadata"]:
                self._end(pod)
            else:
                self._report(pod, rules)
        except RequestFailed as error:
            if error.status in _OUR_MISTAKES:
                raise
            if error.status not in _GONE:
                self._look_again(uid, RETRY_S)
        except (OSError, HTTPException):
            self._look_again(uid, RETRY_S)

    def _report(self, pod: Json, rules: tuple[Rule, ...]) -> None:
        change = report(pod, rule_of(pod, rules), self._place(pod), timestamp())
        if change:
            # With its uid, or a new pod of that name would get the news of the old one.
            body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": change}
            self._api.patch(f"{_path(pod)}/status", body, STRATEGIC_PATCH)

    def _end(self, pod: Json) -> None:
        now = time.monotonic()
        takes = min(self._termination_s, pod["metadata"].get("deletionGracePeriodSeconds", 0))
        with self._changed:
            left = self._ending.setdefault(pod["metadata"]["uid"], now) + takes - now
        if left > 0:
            self._look_again(pod["metadata"]["uid"], left)
        else:
            self._remove(pod)

    def _remove(self, pod: Json) -> None:
        self._api.delete(_path(pod), {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}})

    def _look_again(self, uid: str, seconds: float) -> None:
        with self._changed:
            self._due.setdefault(uid, time.monotonic() + seconds)

    def _place(self, pod: Json) -> Place:
        host = self._nodes[pod["spec"]["nodeName"]]
        with self._changed:
            uid = pod["metadata"]["uid"]
            if uid not in self._addresses:
                self._addresses[uid] = host if pod["spec"].get("hostNetwork") else self._next_address(pod)
            return Place(self._addresses[uid], host)

    def _next_address(self, pod: Json) -> str:
        chosen = self._choose_address(pod)
        if chosen:
            return chosen
        # Below the nodes' .255; the numbers come round after 62,500 pods.
        third, fourth = divmod(next(self._numbers) % _PER_OCTET**2, _PER_OCTET)
        return f"{self._net}.{third}.{fourth + 1}"


def _path(pod: Json) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
