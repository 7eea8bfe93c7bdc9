"""The end of a process that used Mooncake.

A client of an HA group takes up to 30 s to close and holds the interpreter lock meanwhile; its handler at the normal
end of a process does the same. So such a client is not closed but kept, and the process ends without handlers.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

_KEPT: list[object] = []


def keep_for_ever(client: object) -> None:
    """Do without closing ``client``: its destructor would close it, too."""
    _KEPT.append(client)


def end_process(code: int) -> NoReturn:
    """Flush logs and output, then end at once. For the last line of a process whose own work is done."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
