"""The operator with a thousand clusters: time to settle, writes at rest, one change among many, memory, restart.

    python bench/operator_scale.py [--clusters N] [--rest SECONDS] [--baseline_clusters N] [--baseline_rest SECONDS]

A real control plane without nodes: pods are made and never scheduled. The reference is an operator written with kopf's
ordinary handlers and a timer (`peers/kopf_handlers.py`) that applies the same objects; it runs against a control plane
of its own with fewer clusters, since it does not get done with a thousand in reasonable time. Writes are counted in
the API server's audit log, leases apart.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import psutil
from kvtier_operator.api import API_VERSION, KIND
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.control_plane_commands import User
from kvtier_operator.testing.installation import install_definition
from kvtier_worker.testing.processes import free_port
from report import Result, compare, write_report

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "bench" / ".work"
OPERATOR = User("operator", ("system:masters",))
NAMESPACES = 10
COLLECTION = "/apis/kvtier.dev/v1alpha1/namespaces/{}/kvcacheclusters"
QUIET_S = 15.0
"""So long without a write means settled, or that nothing comes of a change any more."""
OUR_QUIET_S = 45.0
"""Ours looks at a cluster that waits after 30 s at the latest, and says then that it has waited for a minute. kopf's
timers leave no pause of that length."""

MIB = 1 << 20


def manifest(namespace: str, name: str) -> dict[str, object]:
    """One master, one pool and one role, both scaled to zero."""
    tiers = {"device": {"size": "256Mi"}, "host": {"blocksFactor": "2"}, "store": {"enabled": True}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "store": {"pools": [{"name": "dram", "replicas": 0, "segmentSize": "1Gi"}]},
            "model": {"source": {"uri": "pvc://models/m"}, "identity": {"id": "m"}},
            "roles": [{"name": "engine", "type": "Fused", "replicas": 0, "port": 8010, "tiers": tiers}],
        },
    }


@dataclass(slots=True)
class Scene:
    """A control plane with clusters in it."""

    plane: ControlPlane
    namespaces: list[str]
    names: list[tuple[str, str]]

    def statuses(self) -> Iterator[tuple[int, int]]:
        """Generation and observed generation of each cluster."""
        for namespace in self.namespaces:
            for item in self.plane.api.get(COLLECTION.format(namespace))["items"]:
                yield item["metadata"]["generation"], (item.get("status") or {}).get("observedGeneration", 0)

    def is_up_to_date(self) -> bool:
        """True when every status speaks of the newest spec. Reading a thousand of them takes a while."""
        return all(seen == wanted for wanted, seen in self.statuses())

    def writes(self) -> int:
        """Requests of the operator that changed something or tried to, leases apart."""
        found = self.plane.writes(OPERATOR.name)
        return sum(1 for write in found if not write.resource.startswith("leases"))

    def settle(self, timeout_s: float, quiet_s: float) -> float:
        """Wait until every status is up to date and nothing has been written for a while; seconds to the last write."""
        started = time.monotonic()
        last, last_at = -1, started
        while time.monotonic() - started < timeout_s:
            count = self.writes()
            if count != last:
                last, last_at = count, time.monotonic()
            elif time.monotonic() - last_at > quiet_s and self.is_up_to_date() and self.writes() == last:
                return last_at - started
            time.sleep(1.0)
        raise RuntimeError(f"not settled after {timeout_s:.0f} s; {last} writes so far")

    def objects(self) -> dict[tuple[str, str, str], str]:
        """resourceVersion of everything that the operator makes, and of the clusters."""
        found = {}
        for group, plural in (
            ("/api/v1", "configmaps"),
            ("/api/v1", "services"),
            ("/apis/apps/v1", "statefulsets"),
            ("/apis/kvtier.dev/v1alpha1", "kvcacheclusters"),
            ("/apis/networking.k8s.io/v1", "networkpolicies"),
        ):
            for item in self.plane.api.get(f"{group}/{plural}")["items"]:
                meta = item["metadata"]
                if meta["namespace"] in self.namespaces:
                    found[plural, meta["namespace"], meta["name"]] = meta["resourceVersion"]
        return found


@contextmanager
def scene(count: int) -> Iterator[Scene]:
    """A control plane with ``count`` clusters in ten namespaces."""
    with ControlPlane(users=[OPERATOR]) as plane:
        install_definition(plane)
        namespaces = [f"bench-{index}" for index in range(NAMESPACES)]
        for namespace in namespaces:
            plane.kubectl("create", "namespace", namespace)
        names = [(namespaces[index % NAMESPACES], f"c{index}") for index in range(count)]
        for namespace, name in names:
            plane.api.create(COLLECTION.format(namespace), manifest(namespace, name))
        yield Scene(plane, namespaces, names)


@contextmanager
def running(command: list[str], plane: ControlPlane, log: Path) -> Iterator[psutil.Process]:
    """An operator as a process."""
    environment = os.environ | {"KUBECONFIG": str(plane.kubeconfig_of(OPERATOR.name))}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def our_command(metrics_port: int) -> list[str]:
    """`kvtier operator` from this checkout."""
    ports = [f"--metrics_port={metrics_port}", "--liveness_port=0"]
    return [str(ROOT / ".venv" / "bin" / "kvtier"), "operator", "--operator_namespace=bench-0", *ports]


def kopf_command(_: int) -> list[str]:
    """The baseline."""
    script = str(ROOT / "bench" / "peers" / "kopf_handlers.py")
    return [sys.executable, "-m", "kopf", "run", "--standalone", "--all-namespaces", "--quiet", script]


@dataclass(slots=True)
class Figures:
    """What one operator did.

    Attributes:
        settle_s: until the last write after its start.
        writes: until then.
        rest_writes: while nothing changed.
        change_s: from a change of one spec until its status is up to date.
        touched: objects of other clusters that the change touched.
        resident_mib: of its process at the end.
        restart_writes: after a restart, until it had looked at everything.
    """

    clusters: int
    settle_s: float
    writes: int
    rest_s: float
    rest_writes: int
    change_s: float
    touched: int
    resident_mib: float
    restart_writes: int


def measure(
    what: str, command: Callable[[int], list[str]], clusters: int, rest_s: float, quiet_s: float = QUIET_S
) -> Figures:
    """All figures of one operator."""
    WORK.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with scene(clusters) as found:
        with running(command(port), found.plane, WORK / f"{what}.log") as process:
            settle_s = found.settle(900, quiet_s)
            writes = found.writes()
            print(f"{what}: {clusters} clusters settled after {settle_s:.0f} s, {writes} writes", flush=True)
            time.sleep(rest_s)
            rest_writes = found.writes() - writes
            print(f"{what}: {rest_writes} writes in {rest_s:.0f} s of rest", flush=True)
            change_s, touched = change_one(found)
            print(f"{what}: one change took {change_s:.2f} s and touched {touched} foreign objects", flush=True)
            resident = process.memory_info().rss / MIB
        before = found.writes()
        with running(command(port), found.plane, WORK / f"{what}-again.log") as process:
            wait_looked_at_all(port, clusters, process)
            restart_writes = found.writes() - before
            resident = max(resident, process.memory_info().rss / MIB)
        print(f"{what}: {restart_writes} writes after a restart; {resident:.0f} MiB", flush=True)
    return Figures(clusters, settle_s, writes, rest_s, rest_writes, change_s, touched, resident, restart_writes)


def change_one(found: Scene) -> tuple[float, int]:
    """Change one cluster's spec; seconds until its status is up to date, and foreign objects touched."""
    namespace, name = found.names[len(found.names) // 2]
    path = f"{COLLECTION.format(namespace)}/{name}"
    before = found.objects()
    started = time.monotonic()
    changed = found.plane.api.patch(path, {"spec": {"master": {"leaseTTL": "20s"}}})
    generation = changed["metadata"]["generation"]
    while (found.plane.api.get(path).get("status") or {}).get("observedGeneration") != generation:
        if time.monotonic() - started > 120:
            raise RuntimeError(f"{name} did not settle")
        time.sleep(0.02)
    seconds = time.monotonic() - started
    time.sleep(QUIET_S)
    after = found.objects()
    moved = [key for key in after if before.get(key) != after[key]]
    return seconds, sum(1 for _, home, child in moved if home != namespace or not f"{child}-".startswith(f"{name}-"))


def wait_looked_at_all(port: int, clusters: int, process: psutil.Process) -> None:
    """Until a restarted operator has made a pass over each cluster, or, where nothing tells, for half a minute."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        passes = passes_so_far(port)
        if passes < 0 and time.monotonic() > deadline - 210:
            break
        if passes >= clusters:
            break
        time.sleep(1.0)
    time.sleep(QUIET_S)
    if not process.is_running():
        raise RuntimeError("the operator ended")


def passes_so_far(port: int) -> float:
    """Passes that `kvtier operator` made; -1 where nobody says."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    except OSError:
        return -1.0
    finally:
        connection.close()
    lines = [line for line in page.splitlines() if line.startswith("kvtier_operator_reconcile_seconds_count")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def results(ours: Figures, kopf: Figures | None) -> list[Result]:
    """Ours with its aims, and beside the baseline where there is one."""
    name = f"{ours.clusters} clusters"
    found = [
        compare(f"{name}: settled after, s", ours.settle_s),
        compare(f"{name}: writes to settle", ours.writes),
        compare(f"{name}: writes in {ours.rest_s:.0f} s of rest", ours.rest_writes, at_most=0),
        compare(f"{name}: one spec change until its status is up to date, s", ours.change_s, at_most=2),
        compare(f"{name}: objects of other clusters touched by it", ours.touched, at_most=0),
        compare(f"{name}: resident memory, MiB", ours.resident_mib, at_most=300),
        compare(f"{name}: writes after a restart", ours.restart_writes, at_most=0),
    ]
    if kopf is None:
        return found
    label = f"against kopf's handlers with {kopf.clusters} clusters"
    return [
        *found,
        compare(
            f"settled, ms a cluster, {label}",
            1000 * ours.settle_s / ours.clusters,
            1000 * kopf.settle_s / kopf.clusters,
        ),
        compare(f"writes a cluster to settle, {label}", ours.writes / ours.clusters, kopf.writes / kopf.clusters),
        compare(
            f"writes a cluster and minute at rest, {label}",
            60 * ours.rest_writes / ours.rest_s / ours.clusters,
            60 * kopf.rest_writes / kopf.rest_s / kopf.clusters,
        ),
        compare(f"one spec change, s, {label}", ours.change_s, kopf.change_s),
        compare(
            f"writes a cluster after a restart, {label}",
            ours.restart_writes / ours.clusters,
            kopf.restart_writes / kopf.clusters,
        ),
        compare(f"resident memory, MiB, {label}", ours.resident_mib, kopf.resident_mib),
    ]


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=1000)
    parser.add_argument("--rest", type=float, default=600.0)
    parser.add_argument("--baseline_clusters", type=int, default=100, help="0 = no baseline")
    parser.add_argument("--baseline_rest", type=float, default=150.0)
    options = parser.parse_args()
    kopf = None
    if options.baseline_clusters:
        kopf = measure("kopf", kopf_command, options.baseline_clusters, options.baseline_rest)
    ours = measure("kvtier", our_command, options.clusters, options.rest, OUR_QUIET_S)
    write_report("operator", results(ours, kopf), " ".join(["python", "bench/operator_scale.py", *sys.argv[1:]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
