"""The rendered member of a managed etcd, run by the etcd of the control plane: Debian's is too old for its probes."""

import os
from pathlib import Path

import yaml
from kvtier_operator.api import parse
from kvtier_operator.testing import binaries
from kvtier_operator.testing.pod_processes import pod_process
from kvtier_operator.testing.rendered import built
from kvtier_worker.testing.processes import free_port


def test_a_rendered_member_starts_and_passes_its_probes(tmp_path: Path) -> None:
    document = yaml.safe_load((Path(__file__).parents[1] / "golden" / "clusters" / "host-network.yaml").read_text())
    # One member needs two ports in a row; the free one's neighbour is free as good as always.
    document["spec"]["transport"]["ports"]["range"]["start"] = free_port()
    program = binaries.require("etcd")["etcd"]
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    data = tmp_path / "data"
    member = pod_process(built(parse(document)), "host-etcd", tmp_path / "files", {"PATH": path})
    member.process.argv = [word.replace("/var/lib/etcd", str(data)) for word in member.process.argv]
    member.process.start()
    try:
        member.process.wait_until(lambda: all(member.passes(probe) for probe in member.probes), 20.0)
    finally:
        member.process.stop()
