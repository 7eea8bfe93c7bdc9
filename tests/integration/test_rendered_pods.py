"""The containers that the operator renders, run as processes: masters, storage nodes of both kinds, an engine."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtier_operator import labels
from kvtier_operator.manifest import load
from kvtier_operator.observed import Component
from kvtier_operator.testing.pod_processes import PodProcess, pod_process
from kvtier_operator.testing.rendered import Objects, built, pod, workloads

pytestmark = [pytest.mark.mooncake, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(180)]

START_TIMEOUT_S = 90.0
ORDER = (Component.MASTER, Component.STORE, Component.ENGINE)


@pytest.fixture
def objects(manifest: Callable[..., Path]) -> Objects:
    def change(spec: dict[str, Any]) -> None:
        spec["transport"]["sharedMemory"] = False
        # Ours stops before the wheel's, so that its objects have where to go.
        pools = ({"name": "wheel", "kind": "MooncakeClient"}, {"name": "ours", "kind": "Kvtier"})
        spec["store"]["pools"] = [{**pool, "segmentSize": "128Mi"} for pool in pools]
        spec["roles"][0]["tiers"]["device"] = {"size": "128Mi"}

    return built(load(manifest("local-tcp.yaml", change)))


@pytest.fixture
def running(objects: Objects, tmp_path: Path) -> Iterator[Mapping[str, PodProcess]]:
    """One pod of every set, started in order, each as soon as the one before it is ready."""
    names = [
        item["metadata"]["name"]
        for component in ORDER
        for item in workloads(objects)
        if item["metadata"]["labels"][labels.COMPONENT] == component
    ]
    pods = {name: pod_process(objects, name, tmp_path / name, {"OMP_NUM_THREADS": "1"}) for name in names}
    with contextlib.ExitStack() as stack:
        for one in pods.values():
            one.start()
            stack.callback(one.process.stop)
            one.process.wait_until(lambda one=one: one.passes("readinessProbe"), START_TIMEOUT_S)  # type: ignore[misc]
        yield pods


def test_rendered_pods_become_ready_answer_and_stop_in_their_time(
    objects: Objects, running: Mapping[str, PodProcess]
) -> None:
    assert len(running) == 4
    for name, one in running.items():
        assert all(one.passes(probe) for probe in one.probes), name
        assert one.listening_ports() <= one.checked_ports, name
    engine = list(running.values())[-1]
    port, _ = engine.probes["readinessProbe"]
    body = {"model": "smollm2-135m", "prompt": "once " * 300, "max_tokens": 2, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
    for name, one in reversed(list(running.items())):
        grace = pod(objects["StatefulSet", name])["terminationGracePeriodSeconds"]
        # Signals reach the program itself, through whatever started it; SIGTERM is all that some of them know.
        assert one.process.stop(grace) in {0, -15}, name
