"""Unit tests of where the operator finds the API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtier_operator.controller.credentials import login
from kvtier_operator.errors import MachineError


def kubeconfig(folder: Path, user: dict[str, Any], server: str = "https://127.0.0.1:6443") -> str:
    path = folder / "config"
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "llm"}}],
                "clusters": [{"name": "k", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": user}],
            }
        )
    )
    return str(path)


def test_a_kubeconfig_gives_server_token_and_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, {"token": "t"}))
    found = login()
    assert (found.server, found.token, found.default_namespace) == ("https://127.0.0.1:6443", "t", "llm")


def test_a_proxy_without_tls_needs_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, {}, "http://127.0.0.1:8001"))
    assert login().server == "http://127.0.0.1:8001"


@pytest.mark.parametrize("text", ["", "nonsense", "current-context: gone\n", "[1]"])
def test_a_kubeconfig_of_no_use_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(MachineError, match="KUBECONFIG"):
        login()


def test_a_user_whose_token_a_command_would_fetch_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, {"exec": {"command": "cloud"}}))
    with pytest.raises(MachineError, match="are not run"):
        login()


def test_without_any_kubeconfig_it_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(MachineError, match="set KUBECONFIG"):
        login()
