"""A real control plane for the whole session, a namespace per test, hollow nodes for those that want pods to run.

The programs are looked for (or built, which takes minutes the first time) before the first test, so that no test's time
limit covers it. If they cannot be had, the tests fail with the reason.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from kvtier_operator.errors import MachineError
from kvtier_operator.testing import binaries
from kvtier_operator.testing.control_plane import APISERVER, PROGRAMS, ControlPlane
from kvtier_operator.testing.control_plane_commands import User
from kvtier_operator.testing.hollow_nodes import HollowNodes
from kvtier_operator.testing.installation import (
    OPERATOR,
    OPERATOR_NAMESPACE,
    install_definition,
    install_rights,
)
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.tenant import Tenant

HERE = Path(__file__).parent
OPERATOR_USER = User("kvtier-operator")
"""Has no rights until a test grants some."""

STRANGER = User("stranger")
LOG_LINES = 40

_running = pytest.StashKey[ControlPlane]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the API server."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.apiserver)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Get the programs now; why that failed is told by each test."""
    wanted = any(item.get_closest_marker("apiserver") for item in session.items)
    if not wanted or session.config.option.collectonly:
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        try:
            binaries.require(*PROGRAMS)
        except MachineError:
            # The fixture meets it again, and its error says why.
            return


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the API server wrote last when a test fails."""
    report = yield
    control_plane = item.config.stash.get(_running, None)
    if report.failed and control_plane is not None:
        report.sections.append((f"last lines of {APISERVER}", control_plane.logs(APISERVER, LOG_LINES)))
    return report


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """One for all tests; whoever breaks it repairs it."""
    with ControlPlane(users=(OPERATOR_USER, STRANGER)) as running:
        request.config.stash[_running] = running
        yield running
        del request.config.stash[_running]


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A fresh namespace, deleted afterwards."""
    with control_plane.namespace() as name:
        yield name


@pytest.fixture
def hollow_nodes(control_plane: ControlPlane) -> Iterator[HollowNodes]:
    """Three nodes on which pods become ready at once; without them pods stay pending."""
    with HollowNodes(control_plane.api) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def installed(control_plane: ControlPlane) -> ControlPlane:
    """With our definition, and the rights of the deployed operator for its user."""
    install_definition(control_plane)
    install_rights(control_plane, OPERATOR)
    return control_plane


@pytest.fixture
def tenant(installed: ControlPlane, namespace: str) -> Tenant:
    """Somebody who may use the definition in a fresh namespace."""
    return Tenant(installed, namespace)


@pytest.fixture
def operator(installed: ControlPlane) -> Iterator[OperatorProcess]:
    """An operator that looks after every namespace."""
    where = f"--operator_namespace={OPERATOR_NAMESPACE}"
    with OperatorProcess(installed.kubeconfig_of(OPERATOR), where, identity="one") as process:
        yield process
