"""Builders of what the engine's parts work on, with defaults, for tests of one part at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvtier_worker.core.ids import RequestId, Tier
from kvtier_worker.core.keys import HashChain
from kvtier_worker.core.lifecycle import RequestEvent
from kvtier_worker.core.pool import BlockPool
from kvtier_worker.core.sampling import SamplingParams
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.frontend import EngineRequest, RequestOutput
from kvtier_worker.engine.host_tier import HostTier
from kvtier_worker.engine.requests import LiveRequest, sampling_spec

_orders = itertools.count(1)


def live_request(
    prompt: Sequence[int],
    *,
    block_size: int = 4,
    max_tokens: int = 4,
    leader: str | None = None,
    ready: bool = True,
    outputs: list[RequestOutput] | None = None,
) -> LiveRequest:
    """A live request; ``ready`` = past its prefetch."""
    order, received = next(_orders), list[RequestOutput]()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    request = EngineRequest(
        RequestId(f"request-{order}"),
        tuple(prompt),
        params,
        leader=None if leader is None else RequestId(leader),
    )
    live = LiveRequest(
        request=request,
        sink=(outputs if outputs is not None else received).append,
        order=order,
        chain=HashChain(block_size),
        tokens=list(prompt),
        max_len=4096,
        stop_ids=frozenset(),
        sampling=sampling_spec(params, 0),
        last_token_at=0.0,
    )
    if ready:
        live.apply(RequestEvent.PREFETCH_ENDED)
    return live


def block_manager(num_device: int = 32, num_host: int = 64, block_size: int = 4) -> TieredBlockManager:
    """Both tiers, or only the device if ``num_host`` is 0; counts include padding."""
    host = HostTier(BlockPool(Tier.HOST, num_host)) if num_host else None
    return TieredBlockManager(BlockPool(Tier.DEVICE, num_device), host, block_size)
