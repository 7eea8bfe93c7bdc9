"""Flags of `kvtier operator`. Pure but for the names of this process's namespace and host, which are arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvtier_operator.api.fields import NAME_PATTERN
from kvtier_operator.api.schema.limits import LAST_PORT
from kvtier_operator.errors import MachineError

_MAX_WORKERS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """What the flags say.

    Attributes:
        namespaces: that are served; empty = all.
        operator_namespace: holds the Lease and the port ledger of the host network.
        identity: of this process in the election.
        host: that the HTTP servers listen on.
        metrics_port: of /metrics; 0 = none.
        liveness_port: of /healthz and /readyz; 0 = none.
        workers: passes at once.
        leader_election: off only where nothing else can run.
        dry_run: file whose objects are printed; empty = run the operator.
        verbose: log more.
        webhook_port: of the admission webhook; 0 = none.
        webhook_host: that it listens on.
        webhook_url: where the API server asks when it cannot reach a Service of ours; empty = at the Service.
    """

    namespaces: tuple[str, ...]
    operator_namespace: str
    identity: str
    host: str
    metrics_port: int
    liveness_port: int
    workers: int
    leader_election: bool
    dry_run: str
    verbose: bool
    webhook_port: int = 0
    webhook_host: str = ""
    webhook_url: str = ""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What depends on where the process runs.

    Attributes:
        namespace: of the pod or of the kubeconfig's context.
        identity: unlike any other process's.
        host: all interfaces in a pod, where the kubelet asks from outside; loopback elsewhere.
    """

    namespace: str
    identity: str
    host: str


def parse_options(argv: Sequence[str], defaults: Defaults) -> Options:
    """Read the command line.

    Raises:
        MachineError: flags are unknown or have bad values; names all of them.
        SystemExit: ``--help`` was asked for.
    """
    parser = _parser(defaults)
    try:
        found, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise MachineError([str(error)]) from error
    problems = [f"{word}: unknown; `kvtier operator --help` lists the flags" for word in rest]
    numbers = {
        "metrics_port": _number(found, "metrics_port", 0, LAST_PORT, problems),
        "liveness_port": _number(found, "liveness_port", 0, LAST_PORT, problems),
        "workers": _number(found, "workers", 1, _MAX_WORKERS, problems),
        "webhook_port": _number(found, "webhook_port", 0, LAST_PORT, problems),
    }
    if numbers["metrics_port"] and numbers["metrics_port"] == numbers["liveness_port"]:
        problems.append(
            f"--liveness_port={numbers['liveness_port']}: is the metrics port too; choose another, or 0 = none"
        )
    for flag, names in (("namespace", found.namespace), ("operator_namespace", [found.operator_namespace])):
        problems += [
            f"--{flag}={name}: is no name of a namespace; use lower case letters, digits and '-'"
            for name in names
            if not re.fullmatch(NAME_PATTERN, name)
        ]
    problems += _webhook_problems(found.webhook_url, numbers)
    if not found.identity:
        problems.append("--identity=: write a name that no other replica has, or leave the flag away")
    if problems:
        raise MachineError(problems)
    return Options(
        namespaces=tuple(dict.fromkeys(found.namespace)),
        operator_namespace=found.operator_namespace,
        identity=found.identity,
        host=found.host,
        leader_election=not found.no_leader_election,
        dry_run=found.dry_run,
        verbose=found.verbose,
        webhook_host=found.webhook_host,
        webhook_url=found.webhook_url,
        **numbers,
    )


def _webhook_problems(url: str, numbers: Mapping[str, int]) -> Iterator[str]:
    port = numbers["webhook_port"]
    if port and port in (numbers["metrics_port"], numbers["liveness_port"]):
        yield f"--webhook_port={port}: another port of the operator has this number; choose another, or 0 = none"
    if not url:
        return
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname or parts.path.strip("/") or parts.query:
        yield f"--webhook_url={url}: write https://HOST:PORT, the API server asks nobody else"
    if not port:
        yield f"--webhook_url={url}: has no effect without --webhook_port"


def _number(found: argparse.Namespace, name: str, least: int, most: int, problems: list[str]) -> int:
    text = str(getattr(found, name))
    if text.isdecimal() and least <= int(text) <= most:
        return int(text)
    problems.append(f"--{name}={text}: write a whole number from {least} to {most}")
    return least


def _parser(defaults: Defaults) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier operator",
        description="Reconcile KVCacheCluster resources, with the credentials of the pod or of KUBECONFIG.",
        exit_on_error=False,
        allow_abbrev=False,
    )

    def flag(name: str, text: str, **more: object) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, dest=name.replace("-", "_"), help=text, **more)  # type: ignore[arg-type]

    flag(
        "namespace", "serve this namespace only; may be given several times (default: all)", action="append", default=[]
    )
    flag(
        "operator_namespace",
        "namespace of the lease and of the port ledger of the host network (default: %(default)s)",
        default=defaults.namespace,
    )
    flag(
        "identity",
        "name in the election, unlike any other replica's (default: host and chance)",
        default=defaults.identity,
    )
    flag("host", "address of the HTTP ports (default: %(default)s)", default=defaults.host)
    flag("metrics_port", "port of /metrics; 0 = none (default: %(default)s)", default="8080")
    flag("liveness_port", "port of /healthz and /readyz; 0 = none (default: %(default)s)", default="8081")
    flag("webhook_port", "port of the admission webhook; 0 = none (default: %(default)s)", default="0")
    flag("webhook_host", "address that it listens on (default: %(default)s)", default=defaults.host)
    flag("webhook_url", "https://HOST:PORT of it for an API server that cannot reach its Service", default="")
    flag("workers", "clusters looked after at once (default: %(default)s)", default="4")
    flag("no_leader_election", "act at once; only where no second operator can run", action="store_true")
    flag("dry_run", "print every object of FILE as YAML, change nothing, need no cluster", metavar="FILE", default="")
    flag("verbose", "log more", action="store_true")
    return parser
