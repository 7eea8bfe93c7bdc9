"""What becomes of a cluster that is deleted while no operator runs, on a real API server with its garbage collector."""

from __future__ import annotations

import pytest
import yaml
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.installation import small_cluster
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.serving import eventually
from kvtier_operator.testing.waiting import wait_for

KINDS = "kvc,sts,deploy,svc,cm,sa,pdb,netpol"

pytestmark = pytest.mark.apiserver


def objects(control_plane: ControlPlane, namespace: str) -> list[str]:
    """Everything of the cluster in the namespace."""
    listed = control_plane.kubectl("get", KINDS, "-n", namespace, "-o", "name").split()
    return [name for name in listed if name.partition("/")[2].startswith("qwen")]


def make(control_plane: ControlPlane, namespace: str, policy: str) -> None:
    """A cluster with its children and its finalizer, if it has one."""
    manifest = yaml.safe_dump(small_cluster("qwen", deletion={"policy": policy}))
    control_plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=manifest)
    wait_for("the Service", lambda: "service/qwen-api" in objects(control_plane, namespace))
    wait_for("a set", lambda: any("qwen-engine-" in name for name in objects(control_plane, namespace)))


def test_without_an_operator_a_deleted_cluster_goes_with_everything_it_had(
    control_plane: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    make(control_plane, namespace, "Immediate")
    operator.kill()
    control_plane.kubectl("delete", "kvc", "qwen", "-n", namespace)
    wait_for("the end of every object", lambda: not objects(control_plane, namespace))


def test_a_drained_deletion_waits_for_the_next_operator(
    control_plane: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    make(control_plane, namespace, "Drain")
    operator.kill()
    before = objects(control_plane, namespace)
    control_plane.kubectl("delete", "kvc", "qwen", "-n", namespace, "--wait=false")
    assert not eventually(lambda: objects(control_plane, namespace) != before, 3)
    operator.start()
    wait_for("the end of every object", lambda: not objects(control_plane, namespace))
