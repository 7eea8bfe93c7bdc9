"""`KVCacheStore` on Mooncake Store. Zero-copy reads and writes between registered host memory and the store.

The read path is one list per argument, one call, one comparison: everything else happens only when that comparison
fails. Called from several threads of a worker process; knows nothing of blocks or layers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from typing import Any

from kvtier_worker.adapters.mooncake_store.absent import AbsentKeys
from kvtier_worker.adapters.mooncake_store.caller import StoreCaller
from kvtier_worker.adapters.mooncake_store.codes import Code, get_error, get_outcome, name_of
from kvtier_worker.adapters.mooncake_store.connect import Connection, open_connection
from kvtier_worker.adapters.mooncake_store.options import MooncakeOptions
from kvtier_worker.engine.ports import GetOutcome, PutOutcome, StoreBuffer
from kvtier_worker.errors import StoreUnavailable
from kvtier_worker.log import event
from kvtier_worker.machine.ranges import MemoryRanges
from kvtier_worker.mooncake_client.guard import ClientClosed

_LOG = logging.getLogger(__name__)

_EXISTS_BATCH = 4096
_UNREADABLE = frozenset({Code.TRANSFER_FAIL, Code.SEGMENT_NOT_FOUND, Code.REPLICA_GONE, Code.CHECKSUM_MISMATCH})
"""Codes after which the master still lists the object but reading it again would fail again."""


class MooncakeStore:
    """One client of a Mooncake Store. Build it with `connect`."""

    def __init__(self, connection: Connection, options: MooncakeOptions, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._options = options
        self._caller = StoreCaller(connection.client, options.breaker, connection.reachable, clock)
        self._clock = clock
        self._replicate: Any = connection.replicate_config
        self._ranges = MemoryRanges()
        self._absent = AbsentKeys(options.absent_ttl_s)
        self._puts_resume_at = 0.0
        self._memory_forgotten = False
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, options: MooncakeOptions) -> MooncakeStore:
        """Check the machine, set the client up, ask the store one question.

        Sets environment variables of this process that Mooncake reads at import (time-outs, ports, logging).

        Raises:
            StoreUnavailable: what is wrong and what to do about it.
        """
        connection = open_connection(options)
        store = cls(connection, options, connection.clock)
        reply = store._caller.call(lambda raw: raw.batch_is_exist(["kvtier-connect"]), 1)
        if not reply.codes or reply.codes[0] < 0:
            store.close()
            code = name_of(reply.codes[0]) if reply.codes else "no answer"
            raise StoreUnavailable(
                f"the store at {options.shm_client or options.master} was set up but does not answer ({code}); "
                "check that the mooncake_master runs and serves"
            )
        return store

    @property
    def state(self) -> str:
        """Circuit breaker: closed, open or half_open."""
        return self._caller.state.value

    @property
    def error_counts(self) -> Mapping[str, int]:
        """Errors since the start, by name."""
        return self._caller.errors

    def allocate(self, nbytes: int) -> int:
        """Address of ``nbytes`` zeroed bytes that this store reads and writes fastest; valid until `close`.

        Raises:
            StoreUnavailable: not enough memory, or the store is closed.
        """
        if nbytes <= 0:
            raise StoreUnavailable(f"cannot allocate {nbytes} bytes; ask for at least one")
        try:
            with self._connection.client.use() as raw:
                return self._connection.allocate(raw, nbytes)
        except ClientClosed as error:
            raise StoreUnavailable("cannot allocate: the store is closed") from error

    def register(self, address: int, nbytes: int) -> None:
        """Register a range for `get` and `put`. The same range twice is one registration.

        Raises:
            StoreUnavailable: overlaps another range, is no memory of this placement, or the store is closed.
        """
        with self._lock:
            if not self._ranges.admits(address, nbytes):
                return
            try:
                with self._connection.client.use() as raw:
                    code = raw.register_buffer(address, nbytes)
            except ClientClosed as error:
                raise StoreUnavailable("cannot register: the store is closed") from error
            if code != 0:
                raise StoreUnavailable(
                    f"the store refused [{address:#x}, {address + nbytes:#x}) ({name_of(code)}){self._register_hint()}"
                )
            self._ranges.add(address, nbytes)

    def _register_hint(self) -> str:
        if self._options.shm_client:
            return "; through shared memory only memory from allocate() can be registered"
        return "; check the memlock limit (ulimit -l)" if self._options.protocol == "rdma" else ""

    def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        """Which keys are there; unknown = False."""
        if self._memory_forgotten:
            return [False] * len(keys)
        absent = self._absent_among(keys)
        if not absent and 0 < len(keys) <= _EXISTS_BATCH:
            return self._exists_batch(keys)
        asked = [key for key in keys if key not in absent]
        found: list[bool] = []
        for start in range(0, len(asked), _EXISTS_BATCH):
            found += self._exists_batch(asked[start : start + _EXISTS_BATCH])
        if not absent:
            return found
        answers = iter(found)
        return [key not in absent and next(answers) for key in keys]

    def _exists_batch(self, keys: Sequence[str]) -> Sequence[bool]:
        codes = self._caller.call(lambda raw: raw.batch_is_exist(keys), len(keys)).codes
        if len(codes) == len(keys) and min(codes) >= 0:
            return [code == 1 for code in codes]
        self._count_codes(code for code in codes if code < 0)
        return [code == 1 for code in codes] + [False] * (len(keys) - len(codes))

    def get(self, buffers: Sequence[StoreBuffer]) -> Sequence[GetOutcome]:
        """Read each object into its buffer. Keys must be distinct; if not, nothing is read."""
        if not buffers:
            return ()
        if self._memory_forgotten:
            return [GetOutcome.MISS] * len(buffers)
        keys = [buffer.key for buffer in buffers]
        addresses = [buffer.address for buffer in buffers]
        sizes = [buffer.nbytes for buffer in buffers]
        if len(set(keys)) != len(keys):
            self._caller.count("duplicate_keys")
            event(_LOG, "a read names a key twice; nothing was read", level=logging.ERROR, keys=len(keys))
            return [GetOutcome.MISS] * len(keys)
        if not self._absent and self._is_one_call(addresses, sizes):
            return self._read(keys, addresses, sizes)
        return self._read_in_parts(buffers)

    def _is_one_call(self, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
        first = min(addresses)
        return (
            len(sizes) <= self._options.max_batch_keys
            and min(sizes) > 0
            and sum(sizes) <= self._options.max_batch_bytes
            and self._ranges.contains(first, max(map(add, addresses, sizes)) - first)
        )

    def _read_in_parts(self, buffers: Sequence[StoreBuffer]) -> Sequence[GetOutcome]:
        absent = self._absent_among([buffer.key for buffer in buffers])
        readable = [buffer for buffer in self._touchable(buffers) if buffer.key not in absent]
        outcomes: dict[str, GetOutcome] = {}
        for part in self._batches(readable):
            keys = [buffer.key for buffer in part]
            part_outcomes = self._read(keys, [one.address for one in part], [one.nbytes for one in part])
            outcomes.update(zip(keys, part_outcomes, strict=True))
        return [outcomes.get(buffer.key, GetOutcome.MISS) for buffer in buffers]

    def _read(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[GetOutcome]:
        reply = self._caller.call(lambda raw: raw.batch_get_into(keys, addresses, sizes), len(keys))
        if reply.codes == sizes:
            return [GetOutcome.HIT] * len(keys)
        if not reply.asked:
            return [GetOutcome.MISS] * len(keys)
        codes = [*reply.codes, *[int(Code.RPC_FAIL)] * (len(keys) - len(reply.codes))][: len(keys)]
        expired = [index for index, code in enumerate(codes) if code == Code.LEASE_EXPIRED]
        if expired:
            for index, code in zip(expired, self._read_again(keys, addresses, sizes, expired), strict=True):
                codes[index] = code
        return self._judge(keys, sizes, codes)

    def _read_again(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], indexes: Sequence[int]
    ) -> Sequence[int]:
        """Ask once more for objects whose lease ran out before they were read; a new question takes a new lease."""
        self._caller.count("lease_expired", len(indexes))
        some_keys = [keys[index] for index in indexes]
        places, lengths = [addresses[index] for index in indexes], [sizes[index] for index in indexes]
        self._caller.call(lambda raw: raw.batch_is_exist(some_keys), len(some_keys))
        reply = self._caller.call(lambda raw: raw.batch_get_into(some_keys, places, lengths), len(some_keys))
        return [*reply.codes, *[int(Code.LEASE_EXPIRED)] * (len(indexes) - len(reply.codes))][: len(indexes)]

    def _judge(self, keys: Sequence[str], sizes: Sequence[int], codes: Sequence[int]) -> Sequence[GetOutcome]:
        unreadable: list[str] = []
        for key, nbytes, code in zip(keys, sizes, codes, strict=True):
            if error := get_error(code, nbytes):
                self._caller.count(error)
            if code in _UNREADABLE:
                unreadable.append(key)
        if unreadable:
            with self._lock:
                self._absent.add(unreadable, self._clock())
        return [get_outcome(code, nbytes) for code, nbytes in zip(codes, sizes, strict=True)]

    def put(self, buffers: Sequence[StoreBuffer]) -> Sequence[PutOutcome]:
        """Write each object unless its key exists. A repeated key is written once, from its first buffer."""
        first: dict[str, StoreBuffer] = {}
        for buffer in buffers:
            first.setdefault(buffer.key, buffer)
        outcomes: dict[str, PutOutcome] = {}
        for part in self._batches(self._touchable(first.values())):
            outcomes.update(self._put_batch(part))
        results: list[PutOutcome] = []
        for buffer in buffers:
            outcome = outcomes.get(buffer.key, PutOutcome.FAILED)
            repeated = buffer is not first[buffer.key]
            results.append(PutOutcome.EXISTS if repeated and outcome is PutOutcome.STORED else outcome)
        return results

    def discard(self, keys: Sequence[str]) -> None:
        """Remove objects, leased or not; those that are not there are not missed."""
        reply = self._caller.call(lambda raw: [raw.remove(key, True) for key in keys], len(keys))
        removed = sum(code == 0 for code in reply.codes)
        if removed:
            self._caller.count("discarded", removed)
            event(_LOG, "removed objects that could not be read", level=logging.INFO, keys=removed)

    def _put_batch(self, buffers: Sequence[StoreBuffer]) -> Mapping[str, PutOutcome]:
        if self._clock() < self._puts_resume_at:
            self._caller.count("put_paused", len(buffers))
            return {}
        keys = [buffer.key for buffer in buffers]
        found = self._caller.call(lambda raw: raw.batch_is_exist(keys), len(keys))
        self._count_codes(code for code in found.codes if code < 0)
        if not any(code >= 0 for code in found.codes):
            return {}  # nobody answers; writing would wait for the same nobody
        present = {key for key, code in zip(keys, found.codes, strict=False) if code == 1}
        outcomes = dict.fromkeys(present, PutOutcome.EXISTS)
        missing = [buffer for buffer in buffers if buffer.key not in present]
        if missing:
            outcomes.update(self._write(missing))
        return outcomes

    def _write(self, buffers: Sequence[StoreBuffer]) -> Mapping[str, PutOutcome]:
        keys = [buffer.key for buffer in buffers]
        addresses = [buffer.address for buffer in buffers]
        sizes = [buffer.nbytes for buffer in buffers]
        reply = self._caller.call(lambda raw: raw.batch_put_from(keys, addresses, sizes, self._replicate), len(buffers))
        outcomes = {key: _put_outcome(code) for key, code in zip(keys, reply.codes, strict=False)}
        failed = [code for code in reply.codes if _put_outcome(code) is PutOutcome.FAILED]
        self._count_codes(failed)
        if self._options.shm_client and reply.codes:
            self._note_memory(all(code == Code.INVALID_PARAMS for code in reply.codes))
        with self._lock:
            if Code.NO_SPACE in failed:
                self._puts_resume_at = self._clock() + self._options.no_space_pause_s
            if self._absent:
                for key, outcome in outcomes.items():
                    if outcome is PutOutcome.STORED:
                        self._absent.discard(key)
        return outcomes

    def _note_memory(self, forgotten: bool) -> None:
        """A mooncake_client that restarted within a second does not know our memory, and nobody tells it.

        Registering again is not passed on. Writes go on trying: after a longer outage it is told by itself.
        """
        if forgotten and not self._memory_forgotten:
            reason = "it restarted too quickly; stop it for ten seconds or restart this engine"
            event(_LOG, "the mooncake_client forgot our memory", level=logging.ERROR, reason=reason)
        if forgotten:
            self._caller.count("memory_forgotten")
        self._memory_forgotten = forgotten

    def close(self) -> None:
        """Wait for calls in flight, unregister, leave; memory from `allocate` is gone then. Idempotent."""
        with self._lock:
            registered = [address for address, _ in self._ranges]
            self._ranges.clear()
        self._connection.close(registered)

    def _absent_among(self, keys: Sequence[str]) -> frozenset[str]:
        if not self._absent:
            return frozenset()
        with self._lock:
            absent = self._absent.among(keys, self._clock())
        if absent:
            self._caller.count("known_unreadable", len(absent))
        return absent

    def _touchable(self, buffers: Iterable[StoreBuffer]) -> Sequence[StoreBuffer]:
        """Those whose memory is registered; the others are counted and left alone."""
        good: list[StoreBuffer] = []
        for buffer in buffers:
            if buffer.nbytes <= 0:
                self._caller.count("zero_size")
            elif not self._ranges.contains(buffer.address, buffer.nbytes):
                self._caller.count("unregistered_memory")
            else:
                good.append(buffer)
        return good

    def _batches(self, buffers: Sequence[StoreBuffer]) -> Iterable[Sequence[StoreBuffer]]:
        """Cut into calls that are short enough for a lease; an object above the limit goes alone."""
        part: list[StoreBuffer] = []
        part_bytes = 0
        for buffer in buffers:
            too_many = len(part) >= self._options.max_batch_keys
            if part and (too_many or part_bytes + buffer.nbytes > self._options.max_batch_bytes):
                yield part
                part, part_bytes = [], 0
            part.append(buffer)
            part_bytes += buffer.nbytes
        if part:
            yield part

    def _count_codes(self, codes: Iterable[int]) -> None:
        for code in codes:
            self._caller.count(name_of(code))


def _put_outcome(code: int) -> PutOutcome:
    if code == Code.OBJECT_ALREADY_EXISTS:
        return PutOutcome.EXISTS
    return PutOutcome.STORED if code == 0 else PutOutcome.FAILED
