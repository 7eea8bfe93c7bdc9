from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.api import (
    DeletionPolicy,
    Dialect,
    Drain,
    DrainMode,
    KVCacheCluster,
    ManagedEtcd,
    Metadata,
    Model,
    Monitoring,
    NamespacePolicy,
    NetworkPolicies,
    Observability,
    PodOptions,
    PortRange,
    Rollout,
    parse,
)
from kvtier_operator.planning.revision import effective_model_id, revision_of

MANIFEST = Path(__file__).parents[3] / "golden" / "clusters" / "highly-available.yaml"
CLUSTER = parse(yaml.safe_load(MANIFEST.read_text()))
Change = Callable[[KVCacheCluster], KVCacheCluster]


def role(**changes: Any) -> Change:
    return lambda one: replace(one, roles=(replace(one.roles[0], **changes),))


def images(**changes: Any) -> Change:
    return lambda one: replace(one, images=replace(one.images, **changes))


def model(**changes: Any) -> Change:
    return lambda one: replace(one, model=replace(one.model, **changes))


def transport(**changes: Any) -> Change:
    return lambda one: replace(one, transport=replace(one.transport, **changes))


@pytest.mark.parametrize(
    "change",
    [
        role(replicas=9),
        images(etcd="other"),
        images(mooncake="other"),
        images(router="other"),
        transport(ports=PortRange(30000, 1000)),
        lambda one: replace(one, master=replace(one.master, replicas=5, pod=PodOptions(env={"A": "b"}))),
        lambda one: replace(one, pools=(replace(one.pools[0], replicas=7, drain=Drain(DrainMode.DISCARD)),)),
        lambda one: replace(one, rollout=Rollout(max_surge=3)),
        lambda one: replace(one, observability=Observability(Monitoring.NEVER)),
        lambda one: replace(one, network_policies=NetworkPolicies(enabled=False)),
        lambda one: replace(one, deletion=DeletionPolicy.DRAIN, paused=True),
        lambda one: replace(one, metadata=Metadata("llm", "other", 9, annotations={"a": "b"})),
    ],
)
def test_what_running_engines_take_over_is_no_new_revision(change: Change) -> None:
    assert change(CLUSTER) != CLUSTER
    assert revision_of(change(CLUSTER)) == revision_of(CLUSTER)


@pytest.mark.parametrize(
    "change",
    [
        images(default="other"),
        images(engine="other"),
        images(pull_policy="Never"),
        model(uri="pvc://models/other"),
        model(id="other"),
        model(weights_digest="sha256:1"),
        role(tensor=4),
        role(port=9000),
        role(settings={"block_size": 32}),
        role(shm_bytes=1 << 32),
        role(pod=PodOptions(env={"A": "b"})),
        role(tiers=replace(CLUSTER.roles[0].tiers, prefetch_batch=9)),
        transport(host_network=True),
        lambda one: replace(one, dialect=Dialect.XLLM),
        lambda one: replace(one, cluster_id="other"),
        lambda one: replace(one, metadata=Metadata("elsewhere")),
        lambda one: replace(one, coordination=replace(one.coordination, managed=ManagedEtcd(5))),
    ],
)
def test_what_an_engine_is_started_with_is_a_revision(change: Change) -> None:
    assert revision_of(change(CLUSTER)) != revision_of(CLUSTER)


def test_a_revision_is_a_short_name_that_does_not_follow_the_order_of_roles() -> None:
    other = replace(CLUSTER.roles[0], name="other", port=9000)
    both, reversed_ = (replace(CLUSTER, roles=roles) for roles in ((*CLUSTER.roles, other), (other, *CLUSTER.roles)))
    assert revision_of(both) == revision_of(reversed_)
    assert len(revision_of(both)) == 8
    assert int(revision_of(both), 16) >= 0


def test_an_id_alone_stands_as_it_is() -> None:
    assert effective_model_id(Model("/m", "tiny")) == "tiny"
    explicit = Model("/m", "tiny", revision="2", namespace_policy=NamespacePolicy.EXPLICIT)
    assert effective_model_id(explicit) == "tiny"


texts = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=8)


@given(st.tuples(texts, texts, texts), st.tuples(texts, texts, texts))
def test_models_that_differ_never_share_an_id(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    ids = [effective_model_id(Model("/m", "tiny", *identity)) for identity in (one, other)]
    assert (ids[0] == ids[1]) == (one == other)
    assert all(text == "tiny" or (text.startswith("tiny@") and len(text) == len("tiny@") + 6) for text in ids)
