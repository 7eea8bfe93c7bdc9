"""The rendered member of a managed etcd, run by the etcd of the control plane: Debian's is too old for its probes."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import yaml
from kvtier_operator.api import parse
from kvtier_operator.testing import binaries
from kvtier_operator.testing.pod_processes import pod_process
from kvtier_operator.testing.rendered import built
from kvtier_worker.testing.processes import free_port


def test_a_rendered_member_starts_and_passes_its_probes(tmp_path: Path) -> None:
    document = yaml.safe_load((Path(__file__).parents[1] / "golden" / "clusters" / "host-network.yaml").read_text())
    # Two ports in a row, below those of Services; the free one's neighbour is free as good as always.
    start = next(port for port in iter(free_port, 0) if port < 29_000)
    document["spec"]["transport"]["ports"]["range"]["start"] = start
    program = binaries.require("etcd")["etcd"]
    path = os.pathsep.join([str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    data = tmp_path / "data"
    member = pod_process(built(parse(document)), "host-etcd", tmp_path / "files", {"PATH": path})
    words = (member.process.argv, *member.before)
    member.process.argv, *before = [[word.replace("/var/lib/etcd", str(data)) for word in one] for one in words]
    data.mkdir()
    member = replace(member, before=before)
    try:
        member.start()
        member.process.wait_until(lambda: all(member.passes(probe) for probe in member.probes), 20.0)
    finally:
        member.process.stop()
