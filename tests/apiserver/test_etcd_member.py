"""Members of a real etcd that lose their data and come back. (Debian's etcd is too old, the control plane's is not.)"""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from kvtier_operator.resources.etcd import EtcdMember, etcd_flags
from kvtier_operator.testing import binaries
from kvtier_worker.testing.processes import ChildProcess, free_ports, http_status

PATIENCE_S = 20.0
KEY, VALUE = "a2V5", "dmFsdWU="
"""Base64, as etcd's JSON has them."""


class Etcd:
    """Three members, each prepared as its pod would be before it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = binaries.require("etcd")["etcd"]
        ports = free_ports(6)
        self.members = [EtcdMember(f"e-{n}", "127.0.0.1", ports[n], ports[n + 3]) for n in range(3)]
        self.children: dict[int, ChildProcess] = {}

    def prepare(self, number: int) -> dict[str, object]:
        config = self.folder / f"{number}.json"
        flags = etcd_flags(self.members[number], self.members, data_dir=str(self.data(number)), token="t")
        endpoints = ";".join(member.endpoint for member in self.members)
        module = (sys.executable, "-m", "kvtier_worker.etcd_member")
        subprocess.run((*module, f"--config={config}", f"--endpoints={endpoints}", "--", *flags), check=True)
        return dict(json.loads(config.read_text()))

    def start(self, number: int) -> None:
        argv = (str(self.program), f"--config-file={self.folder / f'{number}.json'}")
        self.children[number] = ChildProcess(f"e-{number}", argv, log_path=self.folder / f"{number}.log")
        self.children[number].start()

    def wait(self, number: int) -> None:
        port = self.members[number].client_port
        self.children[number].wait_until(lambda: http_status(port, "/readyz") == 200, PATIENCE_S)

    def lose(self, number: int) -> None:
        self.children[number].kill()
        shutil.rmtree(self.data(number))

    def data(self, number: int) -> Path:
        return self.folder / f"data-{number}"

    def ask(self, number: int, path: str, body: dict[str, str]) -> dict[str, Any]:
        connection = HTTPConnection("127.0.0.1", self.members[number].client_port, timeout=5)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body))
            return dict(json.loads(connection.getresponse().read()))


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """Whole again after each test, whatever that did to it."""
    made = Etcd(tmp_path_factory.mktemp("etcd"))
    for number in range(3):
        assert made.prepare(number)["initial-cluster-state"] == "new"
    for number in range(3):
        made.start(number)
    for number in range(3):
        made.wait(number)
    yield made
    for child in made.children.values():
        child.kill()


def put(etcd: Etcd) -> None:
    etcd.ask(0, "/v3/kv/put", {"key": KEY, "value": VALUE})


def values(etcd: Etcd, number: int) -> list[str]:
    return [found["value"] for found in etcd.ask(number, "/v3/kv/range", {"key": KEY}).get("kvs", ())]


def test_every_member_in_turn_may_lose_its_data(etcd: Etcd) -> None:
    put(etcd)
    for number in range(3):
        etcd.lose(number)
        first = etcd.prepare(number)
        assert first["initial-cluster-state"] == "existing"
        assert etcd.prepare(number) == first  # added already, it only joins
        etcd.start(number)
        etcd.wait(number)
        assert values(etcd, number) == [VALUE]
    assert len(etcd.ask(0, "/v3/cluster/member/list", {})["members"]) == 3


def test_a_member_with_its_data_starts_as_it_is(etcd: Etcd) -> None:
    put(etcd)
    etcd.children[2].kill()
    assert etcd.prepare(2)["initial-cluster-state"] == "new"
    etcd.start(2)
    etcd.wait(2)
    assert values(etcd, 2) == [VALUE]


def test_a_cluster_that_lost_everything_begins_anew(etcd: Etcd) -> None:
    put(etcd)
    for number in range(3):
        etcd.lose(number)
    for number in range(3):
        assert etcd.prepare(number)["initial-cluster-state"] == "new"
        etcd.start(number)
    for number in range(3):
        etcd.wait(number)
    assert values(etcd, 0) == []
