"""The programs of a control plane: where each comes from, which version is new enough. Data; read by `binaries`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_REQUIREMENT = r"^(?:require )?\s*{module} v(\d+\.\d+\.\d+)"


class Batch(StrEnum):
    """What is built by one command, because it shares most of its packages."""

    CONTROL_PLANE = "control-plane"
    NODE = "node"
    ETCD = "etcd"
    HELM = "helm"
    COREDNS = "coredns"


@dataclass(frozen=True, slots=True)
class Product:
    """A Go module that we build programs of.

    Attributes:
        name: its folder below ``e2e/controlplane``, with a go.mod.
        module: the requirement of that go.mod which holds the version.
        oldest: major and minor version of the oldest programs that we accept from elsewhere.
        stamps: variables of the linker, ``{version}``, ``{major}`` and ``{minor}`` replaced.
    """

    name: str
    module: str
    oldest: tuple[int, int]
    stamps: tuple[str, ...] = ()

    def version(self, modules: Path) -> str:
        """The version in the go.mod below ``modules``, as in ``1.34.4``."""
        text = (modules / self.name / "go.mod").read_text(encoding="utf-8")
        match = re.search(_REQUIREMENT.format(module=re.escape(self.module)), text, re.MULTILINE)
        assert match is not None, f"{self.name}/go.mod requires no {self.module}"
        return match[1]

    def linker_flags(self, version: str) -> str:
        """No symbol tables, and the version that the program reports."""
        major, minor, _ = version.split(".")
        stamps = (f"-X {stamp.format(version=version, major=major, minor=minor)}" for stamp in self.stamps)
        return " ".join(("-s", "-w", *stamps))


@dataclass(frozen=True, slots=True)
class Program:
    """One executable.

    Attributes:
        name: what it is called on a PATH.
        product: the module it belongs to.
        batch: what is built with it.
        package: its main package; the Go command names the executable after it.
        version_arguments: make it print its version.
    """

    name: str
    product: Product
    batch: Batch
    package: str
    version_arguments: tuple[str, ...] = ("--version",)

    @property
    def built_name(self) -> str:
        """How the Go command calls the executable: the last part of the package that is no major version."""
        parts = self.package.split("/")
        return parts[-2] if re.fullmatch(r"v\d+", parts[-1]) else parts[-1]


_BASE_VERSION = "k8s.io/component-base/version"
KUBERNETES = Product(
    "kubernetes",
    "k8s.io/kubernetes",
    (1, 34),
    (
        f"{_BASE_VERSION}.gitVersion=v{{version}}",
        f"{_BASE_VERSION}.gitMajor={{major}}",
        f"{_BASE_VERSION}.gitMinor={{minor}}",
    ),
)
# The API server relies on watch progress requests that etcd 3.4 does not have.
ETCD = Product("etcd", "go.etcd.io/etcd/server/v3", (3, 5))
HELM = Product("helm", "helm.sh/helm/v3", (3, 14), ("helm.sh/helm/v3/internal/version.version=v{version}",))
COREDNS = Product("coredns", "github.com/coredns/coredns", (1, 11))


def _kubernetes(name: str, batch: Batch, *version_arguments: str) -> Program:
    return Program(name, KUBERNETES, batch, f"k8s.io/kubernetes/cmd/{name}", version_arguments or ("--version",))


PROGRAMS = {
    program.name: program
    for program in (
        _kubernetes("kube-apiserver", Batch.CONTROL_PLANE),
        _kubernetes("kube-controller-manager", Batch.CONTROL_PLANE),
        _kubernetes("kube-scheduler", Batch.CONTROL_PLANE),
        _kubernetes("kubectl", Batch.CONTROL_PLANE, "version", "--client"),
        _kubernetes("kubelet", Batch.NODE),
        _kubernetes("kube-proxy", Batch.NODE),
        Program("etcd", ETCD, Batch.ETCD, "go.etcd.io/etcd/server/v3"),
        Program("etcdctl", ETCD, Batch.ETCD, "go.etcd.io/etcd/etcdctl/v3", ("version",)),
        Program("helm", HELM, Batch.HELM, "helm.sh/helm/v3/cmd/helm", ("version", "--short")),
        Program("coredns", COREDNS, Batch.COREDNS, "github.com/coredns/coredns", ("-version",)),
    )
}
"""Every program that `binaries` can find or build, by name."""
