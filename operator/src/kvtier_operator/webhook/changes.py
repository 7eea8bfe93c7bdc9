"""What a change of a spec brings that its writer may not expect. Pure; called by `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier_operator.api import KVCacheCluster, Model
from kvtier_operator.planning.revision import effective_model_id


def change_warnings(before: KVCacheCluster | None, now: KVCacheCluster) -> Iterator[str]:
    """One sentence for each surprise.

    Args:
        before: as it was; None = it is new, or was not valid.
        now: as it shall be.
    """
    if before is None:
        return
    yield from _model(before.model, now.model)
    yield from _removed(before, now)
    yield from _segments(before, now)


def _model(before: Model, now: Model) -> Iterator[str]:
    old_id, new_id = effective_model_id(before), effective_model_id(now)
    if old_id != new_id:
        yield f"the store's keys move from {old_id} to {new_id}: blocks written so far are out of reach"
    elif _weights(before) != _weights(now):
        yield (
            f"the model changes but blocks keep the id {now.id}: if the weights differ, answers will be wrong; "
            "write another spec.model.identity.id, or a revision or weightsDigest under namespacePolicy Auto"
        )


def _weights(model: Model) -> tuple[str, ...]:
    return (model.uri, model.revision, model.weights_digest, model.quantization)


def _removed(before: KVCacheCluster, now: KVCacheCluster) -> Iterator[str]:
    roles = {role.name for role in now.roles}
    for role in before.roles:
        if role.name not in roles:
            yield f"role {role.name} is removed: its {role.replicas} engines stop"
    pools = {pool.name for pool in now.pools}
    for pool in before.pools:
        if pool.name not in pools:
            yield f"pool {pool.name} is removed: its {pool.replicas} nodes leave one by one (drain: {pool.drain.mode})"


def _segments(before: KVCacheCluster, now: KVCacheCluster) -> Iterator[str]:
    sizes = {pool.name: pool.segment_bytes for pool in before.pools}
    for pool in now.pools:
        if pool.replicas and sizes.get(pool.name, pool.segment_bytes) != pool.segment_bytes:
            yield f"pool {pool.name} gets another segmentSize: its {pool.replicas} nodes are replaced one by one"
