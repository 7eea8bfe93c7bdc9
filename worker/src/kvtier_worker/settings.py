"""Settings of one engine process, judged whole before anything starts: the flags, their combinations, this machine.

`load_settings` is the only door: it returns settings that can work, or raises one ConfigError with everything that
cannot, from a mistyped flag to a port that is taken.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_worker.api.chat_template import load_chat_template
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.contract.rules import Violation, violation, violations
from kvtier_worker.core.ids import DType
from kvtier_worker.core.layout import SLOT_ALIGNMENT
from kvtier_worker.engine.sizing import cpu_cache_bytes
from kvtier_worker.errors import ConfigError
from kvtier_worker.machine.memory import physical_memory_bytes
from kvtier_worker.machine.ports import hold_port, port_holder
from kvtier_worker.machine.rdma import RdmaPort, rdma_ports, rdma_violations
from kvtier_worker.model.config import ModelConfig, load_config
from kvtier_worker.model.packaged import with_model_folder

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks need to know of this machine.

    Attributes:
        memory_bytes: of the machine, or of the container where that is less.
        rdma: its RDMA ports.
        has_cuda: whether a CUDA device is visible.
    """

    memory_bytes: int
    rdma: tuple[RdmaPort, ...]
    has_cuda: bool

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        has_cuda = any(Path("/dev").glob("nvidia[0-9]*"))
        return cls(physical_memory_bytes(), rdma_ports(), has_cuda)


def load_settings(argv: Sequence[str], env: Mapping[str, str], machine: Machine) -> WorkerSettings:
    """Parse a command line and check that it can work here; a packaged model becomes its folder, made on first use.

    Raises:
        ConfigError: with every violation.
    """
    parsed = WorkerSettings.parse(argv, env)
    settings = parsed.settings
    unread = {name for name, _ in parsed.errors}
    found = list(parsed.errors)
    found += [(name, text) for name, text in violations(settings) if name not in unread]
    try:
        settings = with_model_folder(settings)
    except ConfigError as error:
        found += [("model", text) for text in error.violations]
    wrong = {name for name, _ in found}
    for check in _CHECKS:
        if not wrong & check.needs:
            found += check.run(settings, machine)
    if found:
        raise ConfigError(list(dict.fromkeys(text for _, text in found)))
    return settings


@dataclass(frozen=True, slots=True)
class _Check:
    """One look at the machine.

    Attributes:
        needs: flags it relies on; skipped when one of them is wrong already.
        run: yields violations.
    """

    needs: frozenset[str]
    run: Callable[[WorkerSettings, Machine], Iterator[Violation]]


def _model_folder(settings: WorkerSettings, _: Machine) -> Iterator[Violation]:
    folder = Path(settings.model)
    if not folder.is_dir():
        yield violation(settings, "model", "no such folder", "give the folder of a Hugging Face model on this machine")
        return
    try:
        config = load_config(folder)
    except ConfigError as error:
        yield from (("model", text) for text in error.violations)
    else:
        tp_size, longest = settings.tp_size, settings.max_model_len
        yield from (("model", text) for text in config.violations(tp_size=tp_size, max_model_len=longest))
    if not (folder / "tokenizer.json").is_file():
        yield violation(settings, "model", "has no tokenizer.json", "put the model's tokenizer.json beside config.json")
    if settings.load_format == "auto" and not any(folder.glob("*.safetensors")):
        fix = "put the weights there, or use --load_format=dummy for random ones"
        yield violation(settings, "model", "has no *.safetensors", fix)


def _chat_template(settings: WorkerSettings, _: Machine) -> Iterator[Violation]:
    try:
        load_chat_template(Path(settings.model), settings.chat_template)
    except ConfigError as error:
        yield from (("chat_template", text) for text in error.violations)


def _ports(settings: WorkerSettings, _: Machine) -> Iterator[Violation]:
    yield from _port(settings, "port", settings.host, settings.port)
    if settings.admin_port:
        yield from _port(settings, "admin_port", settings.host, settings.admin_port)


def _port(settings: WorkerSettings, name: str, host: str, port: int) -> Iterator[Violation]:
    if problem := _why_taken(host, port):
        fix = f"free it, or choose another --{name}"
        yield violation(settings, name, f"cannot listen on {host}: {problem}", fix)


def _why_taken(host: str, port: int) -> str:
    """Why nobody can listen there now; empty = one can."""
    try:
        hold_port(host, port).close()
    except OSError as error:
        reason = error.strerror or str(error)
        return f"{reason}, held by {port_holder(port)}" if error.errno == errno.EADDRINUSE else reason
    return ""


def _store_ports(settings: WorkerSettings, _: Machine) -> Iterator[Violation]:
    if not settings.enable_kvcache_store:
        return
    for rank in range(settings.tp_size):
        endpoint = settings.store_endpoint(rank)
        if problem := _why_taken(endpoint.host, endpoint.port):
            problem = f"port {endpoint.port} of rank {rank} is not free: {problem}"
            fix = f"choose a base port with {settings.tp_size} free ports, on an address of this machine"
            yield violation(settings, "store_local_hostname", problem, fix)


def _rdma(settings: WorkerSettings, machine: Machine) -> Iterator[Violation]:
    if settings.enable_kvcache_store and settings.store_protocol == "rdma":
        for problem in rdma_violations(settings.store_rdma_devices, machine.rdma):
            yield "store_protocol", f"--store_protocol=rdma: {problem}"


def _memory(settings: WorkerSettings, machine: Machine) -> Iterator[Violation]:
    """Refuse an arena that cannot fit, before the workers spend minutes on filling memory."""
    try:
        config = load_config(settings.model)
    except ConfigError:
        return  # told already
    on_cuda = settings.device == "cuda" or (settings.device == "auto" and machine.has_cuda)
    device_bytes = _device_cache_bytes(settings, machine, on_cuda=on_cuda)
    arena_bytes = _arena_bytes(settings, config, device_bytes, on_cuda=on_cuda)
    resident_bytes = 0 if on_cuda else device_bytes + _weight_bytes(settings, config)
    if arena_bytes + resident_bytes <= machine.memory_bytes:
        return
    if not arena_bytes:
        problem = f"weights and device cache would take {_gib(resident_bytes)} of this machine's"
        yield violation(
            settings, "max_cache_size", f"{problem} {_gib(machine.memory_bytes)}", "use a smaller --max_cache_size"
        )
        return
    fits = (machine.memory_bytes - resident_bytes) / arena_bytes * settings.host_blocks_factor
    problem = (
        f"the host arena would take {_gib(arena_bytes)}"
        + (f", weights and device cache {_gib(resident_bytes)}" if resident_bytes else "")
        + f", and this machine has {_gib(machine.memory_bytes)}"
    )
    smaller = f"use at most --host_blocks_factor={fits:.1f}, or a" if fits > 1 else "use a"
    yield violation(settings, "host_blocks_factor", problem, f"{smaller} smaller --max_cache_size")


def _device_cache_bytes(settings: WorkerSettings, machine: Machine, *, on_cuda: bool) -> int:
    """Device caches of all ranks; 0 = unknown here, as CUDA's default depends on the device's free memory."""
    if settings.max_cache_size or on_cuda:
        return settings.max_cache_size * settings.tp_size
    return cpu_cache_bytes(settings, machine.memory_bytes)


def _arena_bytes(settings: WorkerSettings, config: ModelConfig, device_bytes: int, *, on_cuda: bool) -> int:
    """Host arenas of all ranks, as long as the device caches and a little more: slots are aligned."""
    if not settings.has_host_tier:
        return 0
    itemsize = _itemsize(settings, config, on_cuda=on_cuda)
    heads_bytes = config.num_layers * 2 * config.num_kv_heads // settings.tp_size * config.head_dim * itemsize
    block_bytes = max(heads_bytes * settings.block_size, 1)
    return int(device_bytes * settings.host_blocks_factor * (1 + SLOT_ALIGNMENT / block_bytes))


def _weight_bytes(settings: WorkerSettings, config: ModelConfig) -> int:
    on_disk = sum(path.stat().st_size for path in Path(settings.model).glob("*.safetensors"))
    return on_disk * _itemsize(settings, config, on_cuda=False) // config.checkpoint_dtype.itemsize


def _itemsize(settings: WorkerSettings, config: ModelConfig, *, on_cuda: bool) -> int:
    named = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16}
    default = config.checkpoint_dtype if on_cuda else DType.FLOAT32
    return named.get(settings.dtype, default).itemsize


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB"


_CHECKS = (
    _Check(frozenset({"model", "tp_size", "max_model_len", "load_format"}), _model_folder),
    _Check(frozenset({"model", "chat_template"}), _chat_template),
    _Check(frozenset({"host", "port", "admin_port"}), _ports),
    _Check(frozenset({"store_local_hostname", "tp_size", "enable_kvcache_store"}), _store_ports),
    _Check(frozenset({"store_protocol", "store_rdma_devices", "enable_kvcache_store"}), _rdma),
    _Check(
        frozenset({"model", "max_cache_size", "max_memory_utilization", "host_blocks_factor", "tp_size", "device"}),
        _memory,
    ),
)


def describe(error: ConfigError, command: str) -> str:
    """What a terminal shows of a ConfigError."""
    number = len(error.violations)
    head = f"{command}: {'a setting' if number == 1 else f'{number} settings'} cannot work, nothing was started:"
    return "\n".join([head, *(f"  {text}" for text in error.violations), f"`{command} --help` explains every flag."])
