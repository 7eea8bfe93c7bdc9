"""Amounts as the API server writes them back, so that it never echoes another text than we applied. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from kvtier_operator.api.units import parse_amount

_BINARY = ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki")
_DECIMAL = ("E", "P", "T", "G", "M", "k")
_SMALL = ("m", "u", "n")
_KIBI = 1024


def bytes_text(size: int) -> str:
    """A number of bytes."""
    return _binary(size) if size % _KIBI == 0 else _decimal(Fraction(size))


def canonical(value: Any) -> str:
    """An amount as somebody wrote it, in the server's spelling: ``1024Mi`` is ``1Gi``, ``0.5`` is ``500m``."""
    amount = parse_amount(value)
    if amount is None:
        return str(value)  # the server will say what is wrong with it
    if str(value).endswith("i") and amount >= _KIBI and amount.denominator == 1:
        return _binary(int(amount))
    return _decimal(amount)


def canonical_resources(resources: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """``requests`` and ``limits`` of a container."""
    return {
        kind: {name: canonical(amount) for name, amount in amounts.items()}
        for kind, amounts in resources.items()
        if amounts
    }


def _binary(size: int) -> str:
    for exponent, suffix in zip(range(len(_BINARY), 0, -1), _BINARY, strict=True):
        unit = _KIBI**exponent
        if size >= unit and size % unit == 0:
            return f"{size // unit}{suffix}"
    return _decimal(Fraction(size))


def _decimal(amount: Fraction) -> str:
    if amount == 0:
        return "0"
    for exponent, suffix in zip(range(len(_DECIMAL), 0, -1), _DECIMAL, strict=True):
        scaled = amount / 1000**exponent
        if scaled.denominator == 1:
            return f"{scaled.numerator}{suffix}"
    for exponent, suffix in enumerate(("", *_SMALL)):
        scaled = amount * 1000**exponent
        if scaled.denominator == 1:
            return f"{scaled.numerator}{suffix}"
    return f"{-(-amount * 10**9 // 1)}n"  # nothing is smaller: the server rounds up
