"""What a runtime needs to run one process of a cluster: command, environment, when it is ready, how to stop it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier_operator.observed import Component

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """Ready when a GET answers 200 and its JSON body has these values."""

    url: str
    expect: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TcpProbe:
    """Ready when somebody accepts connections there."""

    port: int
    host: str = LOOPBACK


@dataclass(frozen=True, slots=True)
class AnyProbe:
    """Ready when one of several is.

    Attributes:
        wanted: what is missing meanwhile, as in ``a leader``.
    """

    probes: tuple[HttpProbe | TcpProbe, ...]
    wanted: str


Probe = HttpProbe | TcpProbe | AnyProbe


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process.

    Attributes:
        name: unique in its cluster.
        argv: program and arguments.
        env: added to the environment that it inherits.
        probes: ready when all of them are.
        ports: that it binds, with what each is for; checked before anything starts.
        start_timeout_s: seconds until ready at most.
        stop_timeout_s: seconds between SIGTERM and SIGKILL.
        component: what it is for.
        url: of its HTTP port: health, metrics, API.
        batch: neighbours of the same batch need one another to become ready, so they start together; empty = alone.
        data_dir: folder that it finds empty at its first start and as it left it at later ones; empty = none.
        restart_pause_s: seconds that it stays away at least when it ended by itself.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    probes: tuple[Probe, ...]
    ports: Mapping[int, str]
    start_timeout_s: float
    stop_timeout_s: float
    component: Component | None = None
    url: str = ""
    batch: str = ""
    data_dir: str = ""
    restart_pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Programs:
    """Commands of the machine that runs the processes: program and leading arguments."""

    kvtier: tuple[str, ...] = ("kvtier",)
    mooncake_master: tuple[str, ...] = ("mooncake_master",)
    mooncake_client: tuple[str, ...] = ("mooncake_client",)
    etcd: tuple[str, ...] = ("etcd",)
