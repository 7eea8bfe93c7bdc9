"""Memory of this machine: how much, what may be locked, and page-aligned locked memory for host arenas."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MADV_POPULATE_WRITE = 23
"""Linux 5.14; not in the mmap module."""


def physical_memory_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.exists() and (limit := path.read_text().strip()).isdecimal():
            return min(total, int(limit))
    return total


def memlock_limit_bytes() -> int | None:
    """How much this process may lock; None = no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class PageMemory:
    """Zeroed, page-aligned anonymous memory. It lives as long as this record does.

    Attributes:
        address: of its first byte.
        nbytes: whole pages, at least what was asked for.
        problem: why it is not locked, with the fix; empty when it is.
    """

    address: int
    nbytes: int
    problem: str
    _mapping: mmap.mmap
    _view: object


def allocate_pages(nbytes: int) -> PageMemory:
    """Map ``nbytes``, prefer huge pages, touch every page and lock it if the limit allows.

    Unlocked memory works, it may be swapped and costs a CUDA or RDMA driver a copy.

    Raises:
        OSError: not enough address space or memory.
    """
    rounded = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    mapping = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(view)
    _advise(mapping, mmap.MADV_HUGEPAGE)
    problem = _lock(address, rounded)
    if problem:
        _advise(mapping, _MADV_POPULATE_WRITE)
    return PageMemory(address, rounded, problem, mapping, view)


@dataclass(frozen=True, slots=True)
class Span:
    """Memory of this process: address of the first byte and length in bytes."""

    address: int
    nbytes: int


def populate(spans: Sequence[Span], steps: int = 64) -> None:
    """Make memory resident without changing a byte of it, so that nobody pays for a page's first touch later.

    Spans advance side by side, a share of ``1/steps`` at a time: whoever uses each of them from its start finds pages.
    Runs beside everything else on a thread of low priority; on a kernel before Linux 5.14 it does nothing.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for step in range(steps):
        for span in spans:
            share = -(-span.nbytes // steps // mmap.PAGESIZE) * mmap.PAGESIZE
            start = span.address // mmap.PAGESIZE * mmap.PAGESIZE + step * share
            nbytes = min(share, span.address + span.nbytes - start)
            if nbytes > 0 and libc.madvise(start, nbytes, _MADV_POPULATE_WRITE):
                return


def return_free_pages() -> None:
    """Give the pages that the heap holds and nobody uses back to the system; some milliseconds. glibc only."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


def _advise(mapping: mmap.mmap, advice: int) -> None:
    try:
        mapping.madvise(advice)
    except OSError:
        return  # an old kernel: only speed is lost


def _lock(address: int, nbytes: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0:
        return ""
    limit = memlock_limit_bytes()
    limit_text = "no limit" if limit is None else f"a memlock limit of {limit} bytes"
    return (
        f"cannot lock {nbytes} bytes ({os.strerror(ctypes.get_errno())}, {limit_text}); "
        "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity, or --ulimit memlock=-1"
    )
