"""Where a pod finds the model that `model.source.uri` names. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator.api.schema.pod import OWNED_VOLUME_PREFIX
from kvtier_operator.resources.objects.containers import mount

_CLAIM, _FILE = "pvc://", "file://"
_FOLDER: Final = "/models"
_VOLUME = f"{OWNED_VOLUME_PREFIX}model"


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """A model in a pod.

    Attributes:
        path: its folder; ``package://…`` for one that the engine makes itself.
        volumes, mounts: that bring it.
    """

    path: str
    volumes: tuple[Mapping[str, Any], ...] = ()
    mounts: tuple[Mapping[str, Any], ...] = ()


def model_place(uri: str) -> ModelPlace:
    """Of ``pvc://CLAIM/PATH``, a folder of the image or of a volume of the user's, or a packaged model."""
    if not uri.startswith(_CLAIM):
        return ModelPlace(uri.removeprefix(_FILE))
    claim, _, folder = uri.removeprefix(_CLAIM).partition("/")
    root = f"{_FOLDER}/{claim}"
    volume = {"name": _VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return ModelPlace(f"{root}/{folder}".rstrip("/"), (volume,), (mount(_VOLUME, root, read_only=True),))
