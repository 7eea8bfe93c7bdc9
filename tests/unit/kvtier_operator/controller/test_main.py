"""Unit tests of the command: exit statuses, dry runs, the HTTP ports, the lines of the log."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import aiohttp
import pytest
import yaml
from kvtier_operator.controller.dry_run import render
from kvtier_operator.controller.health import Heart, HttpPorts
from kvtier_operator.controller.index import ClusterKey
from kvtier_operator.controller.main import EXIT_STOPPED, EXIT_UNFIT, main
from kvtier_operator.controller.metrics import OperatorMetrics
from kvtier_operator.errors import MachineError, SpecError
from kvtier_operator.log import event
from kvtier_operator.manifest import load
from kvtier_worker.testing.processes import free_ports

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_dry_run_prints_every_object_once_with_its_hash_and_no_owner(path: Path) -> None:
    documents = list(yaml.safe_load_all(render(load(path))))
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))
    assert any(kind == "StatefulSet" for kind, _ in names)
    for document in documents:
        assert document["metadata"]["annotations"]["kvtier.dev/applied-hash"]
        assert "ownerReferences" not in document["metadata"]


def test_a_dry_run_of_a_range_that_is_too_small_says_by_how_much(tmp_path: Path) -> None:
    manifest = yaml.safe_load((EXAMPLES[0].parent / "local-without-store.yaml").read_text())
    manifest["spec"]["roles"][0]["replicas"] = 60
    file = tmp_path / "many.yaml"
    file.write_text(yaml.safe_dump(manifest))
    with pytest.raises(SpecError, match="larger"):
        render(load(file))


def test_the_command_prints_a_dry_run_and_refuses_a_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", str(EXAMPLES[0])]) == EXIT_STOPPED
    assert "kind: StatefulSet" in capsys.readouterr().out
    bad = tmp_path / "bad.yaml"
    bad.write_text("spec: {nonsense: 1}")
    assert main(["--dry-run", str(bad)]) == EXIT_UNFIT
    assert "spec.nonsense" in capsys.readouterr().err


def test_bad_flags_and_missing_credentials_end_with_two_and_all_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--workers=0", "--surprise"]) == EXIT_UNFIT
    said = capsys.readouterr().err
    assert "--workers=0" in said
    assert "--surprise" in said
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main([]) == EXIT_UNFIT
    assert "KUBECONFIG" in capsys.readouterr().err


def test_the_ports_show_metrics_liveness_and_readiness() -> None:
    metrics_port, liveness_port = free_ports(2)
    metrics, waits_for = OperatorMetrics(), ["the first lists"]
    metrics.conditions.set(ClusterKey("llm", "qwen"), {"conditions": [{"type": "Ready", "status": "True"}]})

    async def get(port: int, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, await answer.text()

    async def play() -> None:
        ports = HttpPorts("127.0.0.1", metrics_port, liveness_port, metrics.registry, lambda: "", lambda: waits_for[-1])
        async with ports:
            assert await get(liveness_port, "/healthz") == (200, "ok\n")
            assert await get(liveness_port, "/readyz") == (503, "the first lists\n")
            waits_for.append("")
            assert (await get(liveness_port, "/readyz"))[0] == 200
            status, text = await get(metrics_port, "/metrics")
            assert status == 200
            assert 'kvtier_operator_cluster_condition{name="qwen",namespace="llm",type="Ready"} 1.0' in text
            again = HttpPorts("127.0.0.1", metrics_port, 0, metrics.registry, str, str)
            with pytest.raises(MachineError, match=f"--metrics_port={metrics_port}"):
                await again.__aenter__()

    asyncio.run(play())


def test_a_loop_that_hangs_is_late_while_it_hangs() -> None:
    heart = Heart()
    assert heart.late_s() <= 0
    heart._expected -= 100
    assert heart.late_s() >= 98


def test_a_line_of_the_log_can_be_cut_into_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        event(logging.getLogger("x"), "applied", cluster="llm/qwen", why='the "spec" changed', empty="", seconds=1.5)
    assert caplog.messages == [r'applied cluster=llm/qwen why="the \"spec\" changed" empty="" seconds=1.500']
