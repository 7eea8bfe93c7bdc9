"""Rules over several fields, in CEL, for the API server. `api.cross_rules` has the same for every runtime. Pure."""

from __future__ import annotations

from kvtier_operator.api.fields import Rule
from kvtier_operator.api.schema.limits import FIRST_NODE_PORT, LAST_NODE_PORT, MAX_SET_NAME, REVISION_LENGTH

_HAS_ETCD = "has(self.coordination) && has(self.coordination.etcd)"
_HAD_ETCD = "has(oldSelf.coordination) && has(oldSelf.coordination.etcd)"
_ID = "(has(self.clusterID) ? self.clusterID : '')"
_OLD_ID = "(has(oldSelf.clusterID) ? oldSelf.clusterID : '')"
_FUSED_ONLY = "self.roles.all(r, r.type == 'Fused')"
_USES_STORE = "self.roles.exists(r, r.tiers.store.enabled)"
_RANGE = "self.transport.ports.range"
_ROUTER = "self.router"


def _ports(item: str) -> str:
    """How many ports the APIs of a role or the router take from ``port`` on; in xLLM each rank of an engine has one."""
    several = f"({item}.replicas > 1 ? {item}.replicas : 1)"
    if item == _ROUTER:
        return several
    ranks = f"{item}.parallelism.tensor"
    return f"(self.engine.dialect == 'Xllm' && {ranks} > {several} ? {ranks} : {several})"


def _apart(item: str, start: str, stop: str) -> str:
    """The API ports of a role or the router lie outside [start, stop)."""
    return f"({item}.port + {_ports(item)} <= {start} || {stop} <= {item}.port)"


_IN_RANGE = _apart("r", f"{_RANGE}.start", f"{_RANGE}.start + {_RANGE}.size")
_ROUTER_IN_RANGE = _apart(_ROUTER, f"{_RANGE}.start", f"{_RANGE}.start + {_RANGE}.size")
_NO_NODE_PORT = _apart("r", str(FIRST_NODE_PORT), str(LAST_NODE_PORT + 1))
_TWO_APART = _apart("a", "b.port", f"b.port + {_ports('b')}")
_ROUTER_APART = _apart("r", f"{_ROUTER}.port", f"{_ROUTER}.port + {_ports(_ROUTER)}")
_NODE_PORT_FIX = f"ports {FIRST_NODE_PORT} to {LAST_NODE_PORT} of a node are those of Services (NodePort)"

_COORDINATION = (
    Rule(
        f"self.master.replicas == 1 || ({_HAS_ETCD})",
        "several masters elect their leader in etcd; write coordination.etcd, or 1",
        path=".master.replicas",
    ),
    Rule(
        f"!has(self.master.durability) || self.master.durability == 'None' || ({_HAS_ETCD})",
        "OpLog keeps the index in etcd; write coordination.etcd, or None",
        path=".master.durability",
    ),
    Rule(
        f"!({_HAD_ETCD}) || ({_HAS_ETCD})",
        "masters would forget every object; keep coordination.etcd, or make another cluster",
        path=".coordination",
    ),
    Rule(
        # Without one the default is in use, and would be lost just the same.
        f"{_ID} == {_OLD_ID}",
        "is chosen when the cluster is made, or never: its index and running clients go by it; write what it was",
        expression=f"({_OLD_ID} == '' ? 'was not chosen when the cluster was made' : 'is ' + {_OLD_ID} + ' already') + "
        "' and cannot be changed: its index and running clients go by it'",
        path=".clusterID",
    ),
)
_ROLES = (
    Rule(
        f"self.engine.dialect == 'Xllm' || {_FUSED_ONLY}",
        "Prefill and Decode roles need engine.dialect: Xllm; kvtier's own engine is Fused",
        path=".roles",
    ),
    Rule(
        "self.engine.dialect == 'Xllm' || !has(self.router)",
        "the router needs engine.dialect: Xllm; remove router, its clients call the engines' Service",
        path=".router",
    ),
    Rule(
        f"{_FUSED_ONLY} || has(self.router)",
        "Prefill and Decode engines are reached through a router; write router: {}",
        path=".router",
    ),
)
_STORE = (
    Rule(
        f"!{_USES_STORE} || size(self.store.pools) > 0",
        "write at least one pool, or turn tiers.store.enabled off",
        path=".store.pools",
    ),
    Rule(
        f"{_USES_STORE} || size(self.store.pools) == 0",
        "no role uses the store; set tiers.store.enabled: true or remove the pools",
        path=".store.pools",
    ),
    Rule(
        f"{_USES_STORE} || !self.transport.sharedMemory",
        "no role uses the store; write false",
        path=".transport.sharedMemory",
    ),
)
_PORTS = (
    Rule(
        f"self.roles.all(r, {_IN_RANGE})",
        "port of a role lies in transport.ports.range; move one of them",
        path=".roles",
    ),
    Rule(
        f"self.roles.all(r, r.port + {_ports('r')} <= 65536)",
        "port + replicas of a role must not pass 65536",
        path=".roles",
    ),
    Rule(
        f"!has(self.router) || {_ROUTER}.port + {_ports(_ROUTER)} <= 65536",
        "port + replicas of the router must not pass 65536",
        path=".router.port",
    ),
    Rule(
        f"self.roles.all(a, self.roles.all(b, a.name == b.name || {_TWO_APART}))",
        "ports of two roles meet; engine i of a role has port + i: move one of them",
        path=".roles",
    ),
    Rule(
        f"!has(self.router) || self.roles.all(r, {_ROUTER_APART})",
        "port of the router is a role's; move one of them",
        path=".router.port",
    ),
    Rule(
        f"!has(self.router) || {_ROUTER_IN_RANGE}",
        "port of the router lies in transport.ports.range; move one of them",
        path=".router.port",
    ),
    Rule(
        f"!self.transport.hostNetwork || self.roles.all(r, {_NO_NODE_PORT})",
        f"{_NODE_PORT_FIX}; move the role's port",
        path=".roles",
    ),
)
SPEC = (*_COORDINATION, *_ROLES, *_STORE, *_PORTS)

TRANSPORT = (
    Rule(
        "!self.sharedMemory || !self.hostNetwork",
        "sharedMemory works only in kvtier up, hostNetwork only in Kubernetes; write false",
        path=".sharedMemory",
    ),
    Rule(
        f"!self.hostNetwork || self.ports.range.start + self.ports.range.size <= {FIRST_NODE_PORT} || "
        f"self.ports.range.start > {LAST_NODE_PORT}",
        f"{_NODE_PORT_FIX}; move the range below or above them",
        path=".ports.range",
    ),
)

_ROLE_SUFFIX = REVISION_LENGTH + 2
_POOL_SUFFIX = len("-store-")
DOCUMENT = (
    Rule(
        "self.metadata.name.matches('^[a-z][-a-z0-9]*$')",
        "gives the Services their names: write lower-case letters, digits and dashes, a letter first",
        expression="'is ' + self.metadata.name + ' and gives the Services their names: write lower-case letters, "
        "digits and dashes, a letter first'",
        path=".metadata.name",
    ),
    Rule(
        f"self.spec.roles.all(r, size(self.metadata.name) + size(r.name) + {_ROLE_SUFFIX} <= {MAX_SET_NAME})",
        f"the StatefulSet <metadata.name>-<role>-<revision> may have {MAX_SET_NAME} characters; shorten a name",
        path=".spec.roles",
    ),
    Rule(
        f"self.spec.store.pools.all(p, size(self.metadata.name) + size(p.name) + {_POOL_SUFFIX} <= {MAX_SET_NAME})",
        f"the StatefulSet <metadata.name>-store-<pool> may have {MAX_SET_NAME} characters; shorten a name",
        path=".spec.store.pools",
    ),
    Rule(
        f"size(self.metadata.name) <= {MAX_SET_NAME - len('-master')}",
        f"may have {MAX_SET_NAME - len('-master')} characters: children add to it; shorten it",
        path=".metadata.name",
    ),
)
