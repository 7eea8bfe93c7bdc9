from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvtier_worker.etcd_member import Member, Start, choose, main
from kvtier_worker.testing.processes import free_port

URL = "http://a:2"
FLAGS = [
    "--name=a",
    f"--initial-advertise-peer-urls={URL}",
    f"--initial-cluster=a={URL}",
    "--initial-cluster-state=new",
    "--quota-backend-bytes=5",
]


def member(name: str = "a", *, url: str = URL, started: bool = True) -> Member:
    return Member("1", name, (url,), ("http://a:1",) if started else ())


OTHER = member("b", url="http://b:2")


@pytest.mark.parametrize(
    ("members", "start"),
    [
        ([], Start.AS_GIVEN),
        ([OTHER, member(started=False)], Start.AS_GIVEN),
        ([OTHER, member("", started=False)], Start.JOIN),
        ([OTHER, member()], Start.REPLACE),
        ([OTHER], Start.ADD),
    ],
)
def test_how_a_member_without_data_starts_follows_from_what_the_others_know(
    members: list[Member], start: Start
) -> None:
    assert choose(members, URL) is start


def test_without_anybody_to_ask_the_flags_stand(tmp_path: Path) -> None:
    config = tmp_path / "config"
    own = [f"--config={config}", f"--endpoints=127.0.0.1:{free_port()}", "--"]
    assert main([*own, *FLAGS, f"--data-dir={tmp_path / 'data'}"]) == 0
    assert json.loads(config.read_text()) == {
        "name": "a",
        "initial-advertise-peer-urls": URL,
        "initial-cluster": f"a={URL}",
        "initial-cluster-state": "new",
        "quota-backend-bytes": 5,
        "data-dir": str(tmp_path / "data"),
    }


def test_data_decides_before_anybody_is_asked(tmp_path: Path) -> None:
    (tmp_path / "data" / "member").mkdir(parents=True)
    config = tmp_path / "config"
    assert main([f"--config={config}", "--endpoints=", "--", *FLAGS, f"--data-dir={tmp_path / 'data'}"]) == 0
    assert json.loads(config.read_text())["initial-cluster-state"] == "new"


def test_everything_missing_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", "--name=a"]) == 2
    said = capsys.readouterr().err
    for name in ("--config", "--endpoints", "--data-dir", "--initial-cluster"):
        assert name in said
