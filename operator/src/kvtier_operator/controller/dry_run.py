"""Every object that the operator would apply for a manifest, once everything is settled, as YAML. Pure but for YAML."""

from __future__ import annotations

import re

import yaml

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.errors import SpecError, Violation
from kvtier_operator.kinds import OPTIONAL_KINDS
from kvtier_operator.planning.layout import Layout, whole_layout
from kvtier_operator.planning.ledger import Ledger
from kvtier_operator.planning.revision import Revision, revision_of
from kvtier_operator.planning.wants import LANES, allocate_blocks
from kvtier_operator.resources.objects.children import children
from kvtier_operator.spec_rules import violations

_EXPONENT = re.compile(r"[-+]?\d[\d_.]*[eE][-+]?\d+")


class _Dumper(yaml.SafeDumper):
    """YAML that kubectl reads as it was meant: to it 12e45678, which a revision may be called, is a number."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if _EXPONENT.fullmatch(text) else None)


_Dumper.add_representer(str, _text)


def settled_layout(cluster: KVCacheCluster) -> Layout:
    """All pods that the manifest asks for, engines in their first lane."""
    return whole_layout(cluster, Revision(revision_of(cluster), LANES[0]))


def render(cluster: KVCacheCluster) -> str:
    """One YAML document an object, in the order in which they are first made.

    Raises:
        SpecError: the range of ports is too small for the manifest, or the operator would refuse it.
    """
    if found := violations(cluster):
        raise SpecError(found)
    layout = settled_layout(cluster)
    allocation = allocate_blocks(cluster, layout, Ledger(), frozenset(), now=0.0)
    if allocation.refused:
        field, ports = "spec.transport.ports.range", cluster.transport.ports
        raise SpecError([Violation(field, f"{ports.start}+{ports.size}", f"make it {allocation.missing} ports larger")])
    made = children(cluster, layout, allocation.blocks, frozenset(kind.name for kind in OPTIONAL_KINDS))
    documents = [manifest for stage in sorted(made) for manifest in made[stage]]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120)
