"""Which settings can work together. Pure; every rule says the flag, its value and the fix.

A violation is ``(flag, sentence)``; the flag lets a caller drop what follows from a value that could not be read.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvtier_worker.contract.addresses import parse_host_port, parse_store_master, store_endpoint
from kvtier_worker.contract.flags import flags_of
from kvtier_worker.contract.parsing import bad_choice, out_of_range

if TYPE_CHECKING:
    from kvtier_worker.contract.worker import WorkerSettings

Violation = tuple[str, str]
_Rule = Callable[["WorkerSettings"], Iterator[Violation]]


def violation(settings: WorkerSettings, name: str, problem: str, fix: str) -> Violation:
    """One violation of flag ``name``, its value shown as it stands on a command line."""
    entry = flags_of(type(settings))[name]
    shown = "" if entry.env else entry.render(getattr(settings, name))
    return name, f"--{name}{'=' if shown else ''}{shown}: {problem}; {fix}"


def violations(settings: WorkerSettings) -> tuple[Violation, ...]:
    """All of them, ranges first."""
    found = list(_ranges(settings))
    unusable = {name for name, _ in found}
    for rule in _RULES:
        found += [(name, text) for name, text in rule(settings) if name not in unusable]
    return tuple(found)


def _ranges(settings: WorkerSettings) -> Iterator[Violation]:
    for name, entry in flags_of(type(settings)).items():
        value = getattr(settings, name)
        text = out_of_range(entry, value) if entry.kind in (int, float) else bad_choice(entry, str(value))
        if text and entry.kind is not bool:
            yield name, text


def _model(settings: WorkerSettings) -> Iterator[Violation]:
    if not settings.model:
        yield violation(settings, "model", "missing", "give the model's folder, e.g. --model=/models/SmolLM2-135M")
    elif not settings.model_id and not settings.model.strip("./"):
        yield violation(settings, "model_id", f"cannot be derived from --model={settings.model}", "give one")


def _server(settings: WorkerSettings) -> Iterator[Violation]:
    if not settings.host:
        yield violation(settings, "host", "empty", "use --host=127.0.0.1, or --host=0.0.0.0 for every address")
    if settings.admin_port and settings.admin_port == settings.port:
        yield violation(settings, "admin_port", "is the API's own port", "leave it out to serve /admin there")
    if not all("!" <= char <= "~" for char in settings.api_key):
        yield violation(settings, "api_key", "a header cannot carry it", "use visible ASCII characters without spaces")


def _host_tier(settings: WorkerSettings) -> Iterator[Violation]:
    if not settings.has_host_tier:
        return
    factor = f"--host_blocks_factor={settings.host_blocks_factor}"
    if not settings.enable_prefix_cache:
        yield violation(
            settings, "enable_prefix_cache", f"{factor} needs the prefix cache", "use --enable_prefix_cache=true"
        )
    if settings.kv_cache_dtype != "auto":
        yield violation(settings, "kv_cache_dtype", f"not with a host tier ({factor})", "use --kv_cache_dtype=auto")


def _store(settings: WorkerSettings) -> Iterator[Violation]:
    if not settings.enable_kvcache_store:
        return
    because = "--enable_kvcache_store=true needs"
    if not settings.has_host_tier:
        yield violation(settings, "host_blocks_factor", f"{because} more than 1", "use e.g. --host_blocks_factor=4")
        if not settings.enable_prefix_cache:
            yield violation(
                settings, "enable_prefix_cache", f"{because} the prefix cache", "use --enable_prefix_cache=true"
            )
    if not settings.store_master_server_address:
        fix = "use host:port, or etcd://host:2379;host:2379 for several masters"
        yield violation(settings, "store_master_server_address", f"missing, and {because} it", fix)
    if not settings.store_metadata_server:
        yield violation(settings, "store_metadata_server", "empty", "use --store_metadata_server=P2PHANDSHAKE")


def _store_addresses(settings: WorkerSettings) -> Iterator[Violation]:
    if settings.store_master_server_address:
        try:
            parse_store_master(settings.store_master_server_address)
        except ValueError as error:
            fix = "use host:port, or etcd://host:2379;host:2379"
            yield violation(settings, "store_master_server_address", str(error), fix)
    if settings.store_shm_client:
        try:
            parse_host_port(settings.store_shm_client)
        except ValueError as error:
            fix = "use host:port of a mooncake_client on this machine"
            yield violation(settings, "store_shm_client", str(error), fix)


def _store_local_hostname(settings: WorkerSettings) -> Iterator[Violation]:
    name = "store_local_hostname"
    try:
        base = store_endpoint(settings.store_local_hostname, 0)
        store_endpoint(settings.store_local_hostname, settings.tp_size - 1)
    except ValueError as error:
        yield violation(settings, name, str(error), "use host:base_port with base_port + --tp_size at most 65536")
        return
    if _is_unspecified(base.host):
        fix = "use an address of this machine that they can reach"
        yield violation(settings, name, "peers would dial themselves", fix)
    if not settings.enable_kvcache_store:
        return
    for other in ("port", "admin_port"):
        port = getattr(settings, other)
        if base.port <= port < base.port + settings.tp_size:
            span = f"{base.port}..{base.port + settings.tp_size - 1}"
            yield violation(settings, name, f"--{other}={port} is one of its ports {span}", "move one of them")


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def _chunks(settings: WorkerSettings) -> Iterator[Violation]:
    name, chunk = "max_tokens_per_chunk_for_prefill", settings.max_tokens_per_chunk_for_prefill
    budget = settings.max_tokens_per_batch
    if chunk == 0:
        yield violation(settings, name, "a prompt would never advance", "use -1 or at least 1")
    elif chunk > budget:
        yield violation(settings, name, f"above --max_tokens_per_batch={budget}", f"use at most {budget}, or -1")
    elif chunk > 0 and not settings.enable_chunked_prefill:
        yield violation(settings, name, "needs chunks", "use --enable_chunked_prefill=true or leave it out")
    if not settings.enable_chunked_prefill and settings.max_model_len > budget:
        problem = f"below --max_model_len={settings.max_model_len}, and without chunks a prompt must fit one step"
        fix = f"use --enable_chunked_prefill=true or at least {settings.max_model_len}"
        yield violation(settings, "max_tokens_per_batch", problem, fix)


def _scheduler(settings: WorkerSettings) -> Iterator[Violation]:
    budget = settings.max_tokens_per_batch
    if settings.max_seqs_per_batch > budget:
        problem = f"above --max_tokens_per_batch={budget}, and every sequence takes a token of a step"
        yield violation(settings, "max_seqs_per_batch", problem, "lower the first or raise the second")
    if settings.enable_in_batch_prefix_cache and not settings.enable_prefix_cache:
        name = "enable_in_batch_prefix_cache"
        yield violation(settings, name, "needs the prefix cache", "use --enable_prefix_cache=true")


def _distributed(settings: WorkerSettings) -> Iterator[Violation]:
    try:
        parse_host_port(settings.master_node_addr, minimum=0)
    except ValueError as error:
        yield violation(settings, "master_node_addr", str(error), "use host:port, port 0 for any free one")


_RULES: tuple[_Rule, ...] = (
    _model,
    _server,
    _host_tier,
    _store,
    _store_addresses,
    _store_local_hostname,
    _chunks,
    _scheduler,
    _distributed,
)
