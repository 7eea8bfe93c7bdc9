"""What a KVCacheCluster says of itself: conditions, one word for them, and what runs. Pure; recomputed on each pass."""

from kvtier_operator.status.conditions import Judgement
from kvtier_operator.status.document import (
    damaged_ledger_status,
    hindered_status,
    invalid_status,
    refused_status,
    status_of,
)
from kvtier_operator.status.phase import Phase, phase_of

__all__ = [
    "Judgement",
    "Phase",
    "damaged_ledger_status",
    "hindered_status",
    "invalid_status",
    "phase_of",
    "refused_status",
    "status_of",
]
