"""Flags that command lines for this engine may carry but that belong to parts this version does not have.

Each is accepted with a value that asks for nothing (its default) and refused otherwise: a setting is never ignored
in silence. A flag leaves this table when the part it belongs to arrives.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier_worker.contract.parsing import OtherFlag

_PD = "prefill/decode disaggregation"
_SPECULATION = "speculative decoding"
_ROUTING = "service routing"
_SCHEDULING = "this scheduling policy"
_PARALLEL = "this kind of parallelism"

_HARMLESS: dict[str, tuple[str, tuple[str, ...]]] = {
    # KV cache
    "indexer_cache_dtype": ("a quantised indexer cache", ("auto",)),
    "max_linear_state_cache_slots": ("linear attention state", ("0",)),
    "enable_xtensor": ("xtensor memory", ("false",)),
    "phy_page_granularity_size": ("xtensor memory", ("2097152",)),
    # prefill/decode disaggregation
    "enable_disagg_pd": (_PD, ("false",)),
    "enable_pd_ooc": (_PD, ("false",)),
    "disagg_pd_port": (_PD, ("7777",)),
    "kv_cache_transfer_mode": (_PD, ("PUSH",)),
    "transfer_listen_port": (_PD, ("26000",)),
    "kv_push_dst_rotate": (_PD, ("false",)),
    # scheduler
    "enable_schedule_overlap": ("overlapped scheduling", ("false",)),
    "prefill_scheduling_memory_usage_threshold": (_SCHEDULING, ("0.95",)),
    "chunked_match_frequency": (_SCHEDULING, ("2",)),
    "use_zero_evict": (_SCHEDULING, ("false",)),
    "max_decode_token_per_sequence": (_SCHEDULING, ("256",)),
    "enable_latency_aware_schedule": (_SCHEDULING, ("false",)),
    "enable_online_preempt_offline": (_SCHEDULING, ("true",)),
    "aggressive_coeff": (_SCHEDULING, ("1.0",)),
    "starve_threshold": (_SCHEDULING, ("1.0",)),
    "enable_starve_prevent": (_SCHEDULING, ("true",)),
    "enable_prefix_cache_aware_dp_routing": (_SCHEDULING, ("false",)),
    # speculative decoding
    "draft_model": (_SPECULATION, ("",)),
    "num_speculative_tokens": (_SPECULATION, ("0",)),
    "speculative_algorithm": (_SPECULATION, ("MTP",)),
    "speculative_suffix_cache_max_depth": (_SPECULATION, ("64",)),
    "speculative_suffix_max_spec_factor": (_SPECULATION, ("1.0",)),
    "speculative_suffix_max_spec_offset": (_SPECULATION, ("0.0",)),
    "speculative_suffix_min_token_prob": (_SPECULATION, ("0.1",)),
    "speculative_suffix_max_cached_requests": (_SPECULATION, ("-1",)),
    "speculative_suffix_use_tree_spec": (_SPECULATION, ("false",)),
    "enable_opt_validate_probs": (_SPECULATION, ("false",)),
    "enable_mtp_draft_body_tp1": (_SPECULATION, ("false",)),
    "enable_atb_spec_kernel": (_SPECULATION, ("false",)),
    "enable_adaptive_speculative_decode": (_SPECULATION, ("false",)),
    "adaptive_speculative_min_gain": (_SPECULATION, ("0.0",)),
    # parallelism
    "dp_size": (_PARALLEL, ("1",)),
    "ep_size": (_PARALLEL, ("1",)),
    "cp_size": (_PARALLEL, ("1",)),
    "layerwise_split_size": (_PARALLEL, ("1",)),
    "kv_split_size": (_PARALLEL, ("1", "0")),
    "nnodes": (_PARALLEL, ("1",)),
    "node_rank": (_PARALLEL, ("0",)),
    # service routing
    "enable_service_routing": (_ROUTING, ("false",)),
    "etcd_addr": (_ROUTING, ("",)),
    "etcd_namespace": (_ROUTING, ("",)),
    "heart_beat_interval": (_ROUTING, ("0.5",)),
    "etcd_ttl": (_ROUTING, ("3",)),
    "rpc_channel_timeout_ms": (_ROUTING, ("-1",)),
    "health_check_interval_ms": (_ROUTING, ("3000",)),
    "num_request_handling_threads": ("a choice of request threads", ("4",)),
}

FLAGS_OF_OTHER_PARTS: Mapping[str, OtherFlag] = {
    name: OtherFlag(harmless=harmless, feature=feature) for name, (feature, harmless) in _HARMLESS.items()
}
