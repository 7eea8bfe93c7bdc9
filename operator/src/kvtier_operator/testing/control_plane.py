"""A real Kubernetes control plane on this machine: etcd, API server, controllers, scheduler; no nodes. IO.

Used by tests, benches and ``make cluster``. Ports are free ones of loopback, state is in one folder, and the processes
end with the thread that started them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier_worker.testing.processes import ChildProcess, free_ports

from kvtier_operator.errors import ProcessFailed
from kvtier_operator.local import child
from kvtier_operator.testing import binaries
from kvtier_operator.testing import control_plane_commands as commands
from kvtier_operator.testing.api_client import ApiClient, RequestFailed
from kvtier_operator.testing.audit_log import Write, read_writes
from kvtier_operator.testing.control_plane_commands import Ports, User
from kvtier_operator.testing.kubectl import run_kubectl
from kvtier_operator.testing.pki import Pki, make_pki

ADMIN = User("admin", ("system:masters",))
_CONTROLLERS = User("system:kube-controller-manager", ("system:masters",))
_SCHEDULER = User("system:kube-scheduler")
ETCD, APISERVER, CONTROLLER_MANAGER, SCHEDULER = "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"
PROGRAMS = (ETCD, APISERVER, CONTROLLER_MANAGER, SCHEDULER, "kubectl")
START_TIMEOUT_S = 60.0
POLL_S = 0.05
LOG_TAIL_LINES = 30


class ControlPlane:
    """One control plane. A context manager: entering starts it, leaving stops it and removes its state.

    Args:
        users: who may ask it, beside the admin; RBAC decides what they may do.
        state_dir: holds files, also logs, and stays; without it a temporary folder that is removed at the stop.
    """

    def __init__(self, users: Sequence[User] = (), state_dir: Path | None = None) -> None:
        self._users = (ADMIN, _CONTROLLERS, _SCHEDULER, *users)
        self._tokens = {user.name: secrets.token_hex(16) for user in self._users}
        self._state_dir = state_dir
        self._folder = state_dir or Path()
        self._children: dict[str, ChildProcess] = {}
        self._clients: dict[str, ApiClient] = {}
        self._programs: dict[str, Path] = {}
        self._ports = Ports(0, 0, 0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://{commands.HOST}:{self._ports.api}"

    @property
    def ca_file(self) -> Path:
        """Certificate to trust."""
        return self._folder / "ca.crt"

    @property
    def token(self) -> str:
        """Of the admin."""
        return self._tokens[ADMIN.name]

    @property
    def kubeconfig(self) -> Path:
        """Of the admin."""
        return self.kubeconfig_of(ADMIN.name)

    def kubeconfig_of(self, user: str) -> Path:
        """Of a user that was named when the control plane was made."""
        assert user in self._tokens, f"{user} is none of the users {', '.join(self._tokens)}"
        return self._folder / f"{re.sub('[^a-z0-9-]', '-', user)}.kubeconfig"

    @property
    def api(self) -> ApiClient:
        """JSON requests as the admin; much cheaper than kubectl."""
        return self.api_of(ADMIN.name)

    def api_of(self, user: str) -> ApiClient:
        """JSON requests as a user that was named when the control plane was made."""
        if user not in self._clients:
            self._clients[user] = ApiClient(self.server, self.ca_file, self._tokens[user])
        return self._clients[user]

    def start(self) -> None:
        """Start everything; returns when the API server is ready and the controllers work.

        Raises:
            MachineError: programs are missing and cannot be built, or there is no openssl.
            ProcessFailed: a process ended or was not ready in time; has the end of its log. Nothing stays behind.
        """
        self._programs = binaries.require(*PROGRAMS)
        self._ports = Ports(*free_ports(3))
        self._folder = self._state_dir or Path(tempfile.mkdtemp(prefix="kvtier-control-plane-"))
        with ExitStack() as undo:
            undo.callback(self.stop)
            pki = self._write_files()
            self._launch(ETCD, commands.etcd_command(self._programs[ETCD], self._folder / "etcd", self._ports))
            command = commands.apiserver_command(self._programs[APISERVER], self._folder, pki, self._ports)
            self._launch(APISERVER, command)
            self._wait(self._is_ready, APISERVER)
            manager, scheduler = self._programs[CONTROLLER_MANAGER], self._programs[SCHEDULER]
            manager_config = self.kubeconfig_of(_CONTROLLERS.name)
            self._launch(CONTROLLER_MANAGER, commands.controller_manager_command(manager, manager_config, pki))
            self._launch(SCHEDULER, commands.scheduler_command(scheduler, self.kubeconfig_of(_SCHEDULER.name)))
            self._wait(lambda: self._has_service_account("default"), CONTROLLER_MANAGER)
            undo.pop_all()

    def stop(self) -> None:
        """Kill everything: a graceful end of an API server takes seconds and saves nothing here."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        for process in reversed(self._children.values()):
            process.kill()
        self._children.clear()
        if self._state_dir is None and self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = Path()

    def stop_apiserver(self) -> None:
        """Kill the API server, as a crash does; etcd keeps its objects."""
        self._children[APISERVER].kill()

    def start_apiserver(self) -> None:
        """Start it again at the same port and wait until it is ready. Call it in the thread that called `start`.

        Raises:
            ProcessFailed: it ended or was not ready in time.
        """
        self._children[APISERVER].start()
        self._wait(self._is_ready, APISERVER)

    def kubectl(self, *arguments: str, stdin: str = "", user: str = ADMIN.name) -> str:
        """What kubectl prints.

        Args:
            arguments: of kubectl.
            stdin: for ``-f -``.
            user: who asks.

        Raises:
            KubectlFailed: with what it said.
        """
        return run_kubectl(self._programs["kubectl"], self.kubeconfig_of(user), arguments, stdin)

    @contextmanager
    def namespace(self, prefix: str = "test") -> Iterator[str]:
        """A fresh namespace that pods can be created in; deleted at the end, without waiting for what is in it.

        Args:
            prefix: of its name.
        """
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": f"{prefix}-"}}
        name = str(self.api.create("/api/v1/namespaces", body)["metadata"]["name"])
        try:
            self._wait(lambda: self._has_service_account(name), CONTROLLER_MANAGER)
            yield name
        finally:
            with suppress(RequestFailed, OSError, HTTPException):
                self.api.delete(f"/api/v1/namespaces/{name}")

    def check(self) -> None:
        """Notice a process that ended by itself.

        Raises:
            ProcessFailed: with the end of its log.
        """
        for process in self._children.values():
            if not process.running:
                raise self._failure(process.name, "ended by itself")

    def logs(self, name: str, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines that a process wrote.

        Args:
            name: etcd, kube-apiserver, kube-controller-manager or kube-scheduler.
            lines: how many.
        """
        path = self._log_path(name)
        if not path.exists():
            return ""
        with path.open(encoding="utf-8", errors="replace") as log:
            return "".join(deque(log, maxlen=lines))

    def writes(self, user: str = "") -> list[Write]:
        """Every request so far that asked for a change, oldest first; those of one user if it is named."""
        writes = read_writes(self._folder / commands.AUDIT_LOG)
        return [write for write in writes if not user or write.user == user]

    def _write_files(self) -> Pki:
        self._folder.mkdir(parents=True, exist_ok=True)
        pki = make_pki(self._folder, commands.SERVER_NAMES)
        assert pki.ca == self.ca_file
        policy = json.dumps(commands.AUDIT_POLICY)
        (self._folder / "audit-policy.json").write_text(policy, encoding="utf-8")
        tokens = commands.token_file(self._users, self._tokens)
        (self._folder / "tokens.csv").write_text(tokens, encoding="utf-8")
        ca_data = base64.b64encode(pki.ca.read_bytes()).decode()
        for user in self._users:
            text = commands.kubeconfig(self.server, ca_data, self._tokens[user.name])
            path = self.kubeconfig_of(user.name)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o600)
        return pki

    def _log_path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _launch(self, name: str, command: Sequence[str]) -> None:
        tied_to_us = (sys.executable, "-I", "-S", child.__file__, str(os.getpid()))
        self._children[name] = ChildProcess(name, (*tied_to_us, *command), log_path=self._log_path(name))
        self._children[name].start()

    def _wait(self, done: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not done():
            self.check()
            if time.monotonic() > deadline:
                raise self._failure(name, f"did not do its work within {START_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def _failure(self, name: str, reason: str) -> ProcessFailed:
        tail = self.logs(name)
        error = ProcessFailed(name, reason, tail.splitlines())
        error.add_note(f"{name} wrote last:\n{tail}")
        return error

    def _is_ready(self) -> bool:
        try:
            return self.api.text("/readyz") == "ok"
        except (RequestFailed, OSError, HTTPException):
            return False

    def _has_service_account(self, namespace: str) -> bool:
        try:
            self.api.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")
        except RequestFailed as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return False
            raise
        return True
