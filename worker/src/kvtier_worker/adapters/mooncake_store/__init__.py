"""Mooncake Store as a `KVCacheStore`."""

from kvtier_worker.adapters.mooncake_store.breaker import BreakerPolicy
from kvtier_worker.adapters.mooncake_store.options import MooncakeOptions, options_from_settings
from kvtier_worker.adapters.mooncake_store.store import MooncakeStore

__all__ = ["BreakerPolicy", "MooncakeOptions", "MooncakeStore", "options_from_settings"]
