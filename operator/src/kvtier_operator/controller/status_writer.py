"""Writes a cluster's status where it differs from the one that stands there, by `apply`. IO."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier_operator.controller.apply import Executor
from kvtier_operator.controller.index import ClusterKey, Record


@dataclass(slots=True)
class StatusWriter:
    """Remembers what was written last, so that a server that rounds or drops something is not written to for ever.

    Args:
        executor: writes.
    """

    executor: Executor
    _written: dict[ClusterKey, tuple[str, str]] = field(default_factory=dict)

    async def save(self, key: ClusterKey, record: Record, status: Mapping[str, Any]) -> bool:
        """Write the status if it is news.

        Args:
            key: of the cluster.
            record: of the cluster as the index has it.
            status: the whole status that it should have.

        Returns:
            True if it was written.

        Raises:
            ApiError: the server refused or did not answer.
        """
        live = record.live().get("status") or {}
        if same_status(status, live) or self._written.get(key) == (_text(status), _text(live)):
            return False
        answer = await self.executor.save_status(key, record.uid, status)
        self._written[key] = (_text(status), _text(answer.get("status") or {}))
        return True

    def forget(self, key: ClusterKey) -> None:
        """The cluster is gone."""
        self._written.pop(key, None)


def same_status(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """True when nothing has to be written. Conditions that others added are theirs."""
    ours = {item["type"] for item in wanted.get("conditions") or ()}
    conditions = [item for item in live.get("conditions") or () if item.get("type") in ours]
    return _text(_sorted(wanted)) == _text(_sorted({**live, "conditions": conditions}))


def _sorted(status: Mapping[str, Any]) -> dict[str, Any]:
    conditions = sorted(status.get("conditions") or (), key=lambda item: str(item["type"]))
    return {**status, "conditions": conditions}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
