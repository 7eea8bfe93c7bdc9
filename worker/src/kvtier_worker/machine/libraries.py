"""Shared libraries that the Mooncake wheel needs from the system, and the Debian package of each."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

MOONCAKE_LIBRARIES: Mapping[str, str] = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


def missing_libraries(names: Sequence[str] = tuple(MOONCAKE_LIBRARIES)) -> tuple[str, ...]:
    """Those that the loader does not find."""
    return tuple(name for name in names if not _loads(name))


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def install_line(missing: Sequence[str]) -> str:
    """The command that installs them."""
    packages = " ".join(MOONCAKE_LIBRARIES.get(name, name) for name in missing)
    return f"apt-get install -y --no-install-recommends {packages}"
