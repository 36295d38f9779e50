"""The widened product equals the plain one, whichever processor runs the tests."""

from __future__ import annotations

import pytest
import torch

import engine.linear
from engine.linear import linear


@pytest.fixture(params=[False, True], ids=["emulated", "native"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(engine.linear, "has_half_arithmetic", lambda: request.param)
    monkeypatch.setattr(engine.linear, "BLOCK_ELEMENTS", 64)  # several blocks even here
    return bool(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 16), (9, 16), (2, 5, 16), (0, 16)])
def test_equals_float64(arithmetic: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape).to(dtype), torch.randn(21, 16).to(dtype), torch.randn(21).to(dtype)
    with torch.no_grad():
        got = linear(x, weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    assert got.dtype == dtype and got.shape == expected.shape
    assert torch.allclose(got.double(), expected, rtol=2e-2, atol=5e-2)


def test_the_compiled_kernel_equals_float64() -> None:
    gemv = pytest.importorskip("engine.gemv", reason="needs the extra `fast`").gemv
    torch.manual_seed(0)
    weight, x, y = torch.randn(37, 51).bfloat16(), torch.randn(51), torch.empty(37)
    for threads in (1, 2):
        gemv(weight.view(torch.uint16).numpy(), x.numpy(), y.numpy(), threads)
        assert torch.allclose(y.double(), weight.double() @ x.double(), atol=1e-5)


def test_without_the_kernel_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.linear, "has_half_arithmetic", lambda: False)
    x, weight = torch.randn(2, 16).bfloat16(), torch.randn(21, 16).bfloat16()
    with torch.no_grad():
        fast = linear(x, weight)
        monkeypatch.setattr(engine.linear, "_compiled_gemv", lambda: None)
        assert torch.allclose(fast.float(), linear(x, weight).float(), rtol=2e-2, atol=5e-2)


def test_gradients(arithmetic: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 16).bfloat16().requires_grad_()
    weight = torch.randn(21, 16).bfloat16().requires_grad_()
    linear(x, weight).float().square().sum().backward()
    wide_x, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    (wide_x @ wide_weight.T).square().sum().backward()
    assert torch.allclose(x.grad.double(), wide_x.grad, rtol=3e-2, atol=2.0)
    assert torch.allclose(weight.grad.double(), wide_weight.grad, rtol=3e-2, atol=2.0)
