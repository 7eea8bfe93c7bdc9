from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kvtier_worker.model.linear import Linear, PackedLinear, PlainLinear, packing_works

CPU = torch.device("cpu")
MAKERS: dict[str, Callable[..., Linear]] = {
    "plain": PlainLinear,
    "packed": PackedLinear,
    "unpacked": lambda weight, bias=None: PackedLinear(weight, bias, pack=False),
}


@pytest.mark.parametrize("rows", [1, 5, 63, 300])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_products_and_their_epilogues_are_what_they_say(
    name: str, biased: bool, rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    if name != "plain" and not packing_works(CPU, dtype):
        pytest.skip(f"this torch has no packed products for {dtype} on this machine")
    torch.manual_seed(rows)
    weight, x = torch.randn(37, 24).to(dtype), torch.randn(rows, 24).to(dtype)
    bias = torch.randn(37).to(dtype) if biased else None
    other = torch.randn(rows, 37).to(dtype)
    product = x.float() @ weight.float().t() + (0 if bias is None else bias.float())
    linear = MAKERS[name](weight, bias)
    with torch.inference_mode():
        for got, wanted in (
            (linear(x), product),
            (linear.silu(x), product * product.sigmoid()),
            (linear.plus(x, other.clone()), product + other.float()),
            (linear.times(x, other.clone()), product * other.float()),
        ):
            torch.testing.assert_close(got.float(), wanted, atol=tolerance, rtol=tolerance)


def test_packing_is_for_cpu_only() -> None:
    assert not packing_works(torch.device("meta"), torch.float32)
