"""Runs the container of a rendered pod as a process of this machine, to see that what we render works. IO.

The kubelet's part is played here: it puts in the pod's name and address and mounts the ConfigMap. Names of pods lead to
loopback.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from kvtier_worker.testing.processes import ChildProcess, http_status

from kvtier_operator.resources.objects.slots import CONFIG_DIR, SLOT_VARIABLE
from kvtier_operator.testing.rendered import Objects, container, environment
from kvtier_operator.testing.rendered import pod as pod_of

_ADDRESS = "127.0.0.1"
_POD_HOST = re.compile(r"[\w$()-]+\.[\w-]+\.[\w-]+\.svc\b")


@dataclass(frozen=True, slots=True)
class PodProcess:
    """Pod 0 of a workload.

    Attributes:
        process: started by whoever wants it.
        before: commands that must have run and ended before, as the pod's init containers.
        probes: URL paths with their port, by name of the probe.
        checked_ports: that `kvtier slot` looks at; all that it may listen on.
    """

    process: ChildProcess
    before: Sequence[Sequence[str]]
    probes: Mapping[str, tuple[int, str]]
    checked_ports: frozenset[int]

    def start(self) -> None:
        """Run what must come first, then start the process."""
        for command in self.before:
            subprocess.run(command, env={**os.environ, **self.process.environment}, check=True)
        self.process.start()

    def passes(self, probe: str) -> bool:
        """Whether a probe succeeds now."""
        return http_status(*self.probes[probe]) == 200  # noqa: PLR2004 - HTTP's own number

    def listening_ports(self) -> set[int]:
        """Of the process and its children."""
        main = psutil.Process(self.process.pid)
        sockets = (found for one in (main, *main.children(recursive=True)) for found in one.net_connections("tcp"))
        return {found.laddr.port for found in sockets if found.status == psutil.CONN_LISTEN}


def pod_process(
    objects: Objects, workload: str, folder: Path, variables: Mapping[str, str] | None = None
) -> PodProcess:
    """The process of a workload's first pod.

    Args:
        objects: of a cluster.
        workload: name of a StatefulSet.
        folder: to write its files to.
        variables: environment beyond the container's.
    """
    described = container(objects["StatefulSet", workload])
    folder.mkdir()
    pod = f"{workload}-0"
    files = objects.get(("ConfigMap", workload), {}).get("data", {})
    for name, text in files.items():
        (folder / name).write_text(_POD_HOST.sub("localhost", text))
    own = {SLOT_VARIABLE: "0", "POD_NAME": pod, "POD_IP": _ADDRESS, "HOME": str(Path.home())}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = environment(objects["StatefulSet", workload]) | own | {"PATH": path} | dict(variables or {})
    words = [*described["command"], *described.get("args", [])]
    argv = [_put_in(word, pod).replace(CONFIG_DIR, str(folder)) for word in words]
    ports = {port["name"]: port["containerPort"] for port in described["ports"]}
    probes = {
        name: (ports[described[name]["httpGet"]["port"]], described[name]["httpGet"]["path"])
        for name in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    before = [
        [_put_in(word, pod).replace(CONFIG_DIR, str(folder)) for word in one["command"]]
        for one in pod_of(objects["StatefulSet", workload]).get("initContainers", ())
    ]
    return PodProcess(
        ChildProcess(pod, argv, env, folder / "log"), before, probes, frozenset(_ports(files.get("slot-0.ports", "")))
    )


def _put_in(word: str, pod: str) -> str:
    return _POD_HOST.sub("localhost", word).replace("$(POD_NAME)", pod).replace("$(POD_IP)", _ADDRESS)


def _ports(text: str) -> list[int]:
    spans = (line.split("-") for line in text.split())
    return [port for first, last in spans for port in range(int(first), int(last) + 1)]
