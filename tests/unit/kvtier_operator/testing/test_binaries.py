"""Where programs of a control plane are taken from. Shell scripts stand in for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtier_operator.errors import MachineError
from kvtier_operator.testing import binaries, go_builds
from kvtier_operator.testing.programs import ETCD, KUBERNETES, PROGRAMS


def script(path: Path, output: str) -> Path:
    """An executable that prints ``output``, whatever it is asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{output}'\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def built(home: Path, product: str, version: str, *names: str) -> list[Path]:
    """Programs that an earlier run left in the cache."""
    folder = home / "kvtier" / "bin" / f"{product}-{version}"
    return [script(folder / name, "unused") for name in names]


def etcd_version() -> str:
    return ETCD.version(binaries.MODULES)


def test_the_folder_of_assets_goes_before_the_path(tmp_path: Path) -> None:
    asset = script(tmp_path / "assets" / "etcd", "etcd Version: 3.6.1")
    script(tmp_path / "path" / "etcd", "etcd Version: 3.6.2")
    environment = {"KUBEBUILDER_ASSETS": str(tmp_path / "assets"), "PATH": str(tmp_path / "path")}
    assert binaries.require("etcd", environment=environment) == {"etcd": asset}


def test_a_program_of_the_path_is_used_where_the_assets_lack_it(tmp_path: Path) -> None:
    found = script(tmp_path / "path" / "kubectl", "Client Version: v1.35.0")
    environment = {"KUBEBUILDER_ASSETS": str(tmp_path), "PATH": str(tmp_path / "path")}
    assert binaries.require("kubectl", environment=environment) == {"kubectl": found}


@pytest.mark.parametrize("output", ["etcd Version: 3.4.23", "no version at all"])
def test_a_program_that_is_too_old_gives_way_to_the_cache(tmp_path: Path, output: str) -> None:
    script(tmp_path / "path" / "etcd", output)
    (cached,) = built(tmp_path / "cache", "etcd", etcd_version(), "etcd")
    environment = {"PATH": str(tmp_path / "path"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert binaries.require("etcd", environment=environment) == {"etcd": cached}


def test_the_cache_is_below_the_home_folder_by_default(tmp_path: Path) -> None:
    (cached,) = built(tmp_path / ".cache", "etcd", etcd_version(), "etcdctl")
    assert binaries.require("etcdctl", environment={"HOME": str(tmp_path)}) == {"etcdctl": cached}


def test_answers_come_in_the_order_of_the_question(tmp_path: Path) -> None:
    kubectl, apiserver = built(
        tmp_path, "kubernetes", KUBERNETES.version(binaries.MODULES), "kubectl", "kube-apiserver"
    )
    (etcd,) = built(tmp_path, "etcd", etcd_version(), "etcd")
    found = binaries.require("kubectl", "etcd", "kube-apiserver", environment={"XDG_CACHE_HOME": str(tmp_path)})
    assert list(found.values()) == [kubectl, etcd, apiserver]


def test_a_go_that_cannot_read_the_modules_is_refused_with_what_to_do(tmp_path: Path) -> None:
    script(tmp_path / "go", "go1.19.8")
    with pytest.raises(MachineError, match=r"too old .*go1\.19\.8.*: install Go 1\.26"):
        go_builds.find_go({"PATH": str(tmp_path)}, elsewhere=())


def test_a_missing_go_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"no go command .*: install Go 1\.26"):
        go_builds.find_go({"PATH": str(tmp_path)}, elsewhere=())


def test_a_go_that_is_new_enough_is_taken_from_the_path_first(tmp_path: Path) -> None:
    go = script(tmp_path / "path" / "go", "go1.24.3")
    script(tmp_path / "venv" / "go", "go1.27.0")
    assert go_builds.find_go({"PATH": str(tmp_path / "path")}, elsewhere=(tmp_path / "venv",)) == str(go)


def test_an_old_go_of_the_path_does_not_hide_the_one_that_pip_installed(tmp_path: Path) -> None:
    script(tmp_path / "path" / "go", "go1.19.8")
    go = script(tmp_path / "venv" / "go", "go1.27.0")
    assert go_builds.find_go({"PATH": str(tmp_path / "path")}, elsewhere=(tmp_path / "venv",)) == str(go)


def test_a_failed_build_leaves_nothing_and_tells_what_go_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = tmp_path / "path" / "go"
    script(go, "")
    go.write_text(
        '#!/bin/sh\n[ "$1" = env ] && echo go1.24.3 && exit\necho "no such module"\nexit 1\n', encoding="utf-8"
    )
    monkeypatch.setenv("PATH", f"{go.parent}:/bin:/usr/bin")
    folder = tmp_path / "bin" / "etcd-1"
    with pytest.raises(MachineError, match="no such module"):
        go_builds.build(ETCD, [PROGRAMS["etcd"]], tmp_path, "3.6.16", folder)
    assert not folder.exists()


def test_a_build_names_executables_as_they_are_called_on_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "path" / "go"
    script(go, "")
    # The last argument but the package is the folder for executables.
    build = 'while [ "$1" != -o ]; do shift; done; touch "$2/server"'
    go.write_text(f'#!/bin/sh\n[ "$1" = env ] && echo go1.24.3 && exit\n{build}\n', encoding="utf-8")
    monkeypatch.setenv("PATH", f"{go.parent}:/bin:/usr/bin")
    folder = tmp_path / "bin" / "etcd-3.6.16"
    go_builds.build(ETCD, [PROGRAMS["etcd"]], tmp_path, "3.6.16", folder)
    assert [path.name for path in folder.iterdir()] == ["etcd"]
    assert "building etcd 3.6.16" in capfd.readouterr().err


def test_programs_are_stamped_with_the_version_of_their_module() -> None:
    flags = KUBERNETES.linker_flags("1.34.4")
    assert "version.gitVersion=v1.34.4" in flags
    assert flags.endswith("version.gitMinor=34")


@pytest.mark.parametrize("product", sorted({program.product.name for program in PROGRAMS.values()}))
def test_every_product_has_a_module_with_its_version_and_tools(product: str) -> None:
    programs = [program for program in PROGRAMS.values() if program.product.name == product]
    text = (binaries.MODULES / product / "go.mod").read_text(encoding="utf-8")
    assert programs[0].product.version(binaries.MODULES).count(".") == 2
    assert [program.package for program in programs if program.package not in text] == []


def test_an_unknown_program_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert binaries.main(["kube-apisrver"]) == 2
    assert "no such program: kube-apisrver; name some of: kube-apiserver, " in capsys.readouterr().err
