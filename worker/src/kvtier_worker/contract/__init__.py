"""The contract of a worker pod: every flag of ``kvtier engine``, once, with its default, range and reason.

The operator renders a `WorkerSettings` with ``to_argv`` and the engine parses it with ``from_argv``; property:
``from_argv(s.to_argv(), s.to_env()) == s``. Pure: looks at no file, no environment, no machine; checks that need
those live in ``settings.py``.
"""

from kvtier_worker.contract.addresses import HostPort, StoreMaster, parse_host_port, parse_store_master
from kvtier_worker.contract.flags import Flag, FlagGroup, flag, flags_of
from kvtier_worker.contract.parsing import Parsed, parse_flags
from kvtier_worker.contract.rendering import help_text, markdown_table, render_argv
from kvtier_worker.contract.worker import WorkerSettings

__all__ = [
    "Flag",
    "FlagGroup",
    "HostPort",
    "Parsed",
    "StoreMaster",
    "WorkerSettings",
    "flag",
    "flags_of",
    "help_text",
    "markdown_table",
    "parse_flags",
    "parse_host_port",
    "parse_store_master",
    "render_argv",
]
