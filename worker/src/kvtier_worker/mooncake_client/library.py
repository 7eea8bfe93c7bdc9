"""Import of ``mooncake.store``, with errors that say what to install."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from types import ModuleType

from kvtier_worker.errors import StoreUnavailable
from kvtier_worker.machine.libraries import install_line, missing_libraries

PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
MEASURED_VERSION = "0.3.13.post1"
"""The wheel whose return codes and traps this code was written against."""

EMBEDDED_CALLS = ("setup", "batch_is_exist", "batch_get_into", "batch_put_from", "register_buffer", "close")
MOUNTING_CALLS = (*EMBEDDED_CALLS, "allocate_and_mount_segment", "unmount_and_free_segment", "remove")
SHARED_CALLS = (*EMBEDDED_CALLS, "setup_dummy", "alloc_from_mem_pool")


def load_mooncake(calls: Sequence[str]) -> ModuleType:
    """Import ``mooncake.store`` and check that its client has every call in ``calls``.

    Raises:
        StoreUnavailable: not installed, a system library is missing, or the version does not fit.
    """
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        missing = missing_libraries()
        fix = install_line(missing) if missing else f"pip install {PACKAGES[0]}=={MEASURED_VERSION}"
        raise StoreUnavailable(f"mooncake cannot be imported ({error}); run: {fix}") from error
    absent = [name for name in calls if not hasattr(module.MooncakeDistributedStore, name)]
    if absent or not hasattr(module, "ReplicateConfig"):
        raise StoreUnavailable(
            f"mooncake {mooncake_version()} lacks {', '.join(absent) or 'ReplicateConfig'}; "
            f"install {PACKAGES[0]}=={MEASURED_VERSION}"
        )
    return module


def mooncake_version() -> str:
    """Version of the installed wheel, or ``unknown``."""
    for package in PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
