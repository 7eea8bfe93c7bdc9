"""How slow and how unlucky fake workers are. Mutable on purpose: a test turns faults on and off while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Faults:
    """Probabilities of one thing going wrong, per rank and message unless said otherwise."""

    prefetch_item_lost: float = 0.0  # per item: exists, but cannot be read
    prefetch_malformed: float = 0.0  # an answer of the wrong length
    copy_fails: float = 0.0  # device -> host on one rank
    put_fails: float = 0.0
    restore_aborts: float = 0.0  # the forward says so
    registers_short: float = 0.0  # the ACK lacks a block, and the forward computes nonsense without saying so
    forward_fails: float = 0.0
    store_down: bool = False


@dataclass(slots=True)
class Delays:
    """Virtual seconds of each kind of work, each drawn from half of it to one and a half."""

    forward: float = 0.010
    register: float = 0.001
    prefetch: float = 0.004
    copy: float = 0.003
    put: float = 0.020
    probe: float = 0.002
