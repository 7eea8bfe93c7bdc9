"""The demo as ``make demo`` runs it, on ports of its own."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvtier_operator.demo.client import EngineHttp
from kvtier_operator.manifest import load

pytestmark = [pytest.mark.mooncake, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]


def judge(report_path: Path) -> None:
    report = json.loads(report_path.read_text())
    assert report["token_ids_equal"] is True
    phases = {phase["name"]: phase for phase in report["phases"]}
    full = phases["cold"]["prompt_tokens"] // 128 * 128
    assert full >= 2900
    for name, tier in {"device hit": "device", "host hit": "host", "store hit": "store"}.items():
        assert phases[name]["cached_tokens"][tier] >= 0.95 * full
    assert phases["store gone"]["cached_tokens"] == {"device": 0, "host": 0, "store": 0}


def test_every_phase_meets_its_tier_and_kept_it_goes_on_serving_with_the_store_back_until_ctrl_c(
    manifest: Callable[..., Path], tmp_path: Path
) -> None:
    file, report_path = manifest("local.yaml"), tmp_path / "demo" / "report.json"
    port = load(file).roles[0].port
    command = (sys.executable, "-m", "kvtier_operator.demo", f"--manifest={file}", f"--report={report_path}", "--keep")
    engine = EngineHttp(f"http://127.0.0.1:{port}", "smollm2-135m")
    output = tmp_path / "output"
    with (
        output.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as demo,
    ):
        try:
            while "serving until Ctrl-C" not in output.read_text():
                assert demo.poll() is None, output.read_text()
                time.sleep(0.1)
            judge(report_path)
            assert f"curl http://127.0.0.1:{port}/v1/completions" in output.read_text()
            prompt = "One, two, three. " * 60
            engine.complete(prompt, 4)
            deadline = time.monotonic() + 60
            while not 0 < engine.probe(prompt).full_blocks == engine.probe(prompt).blocks["store"]:
                assert time.monotonic() < deadline, "the engine did not find the restarted store"
                engine.drop(["device", "host"])  # so that it is computed, and written back, once more
                engine.complete(prompt, 4)
                time.sleep(0.5)
        finally:
            demo.send_signal(signal.SIGINT)
            assert demo.wait(60) == 0, output.read_text()
