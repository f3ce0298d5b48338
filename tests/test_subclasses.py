"""Tensors of other classes beside parameters on disk: their classes are asked as plain torch asks them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import Chain
from torch import nn
from twins import adamw

import protrain


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


class Plain(torch.Tensor):
    """As it is without a function of its own."""


class Larger(torch.Tensor):
    """Products are larger than others'; what is asked inside of its function is a call of torch's as well."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert isinstance(types, tuple)
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result + result * 0.5 if func is F.linear and result is not NotImplemented else result


class Wrapped:
    """No tensor, but torch's functions take it: they are called with what is in it."""

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [one.inner if isinstance(one, cls) else one for one in args]
        return cls(func(*inner, **(kwargs or {})))


class Refusing(torch.Tensor):
    """Of which nothing is computed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class Of(Chain):
    """All is of one class from behind the first block on."""

    kind: Any = Plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y: torch.Tensor = self.blocks[0](x).as_subclass(self.kind)
        for block in self.blocks[1:]:
            y = block(y)
        return self.head(y).square().mean()


def trained(model: nn.Module, optimizer: Any) -> list[tuple[type, float]]:
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(3):
        loss = model(torch.randn(8, 256, generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((type(loss), loss.item()))
    return found


@pytest.mark.parametrize("mode", ["keep", "checkpoint", "swap"])
@pytest.mark.parametrize("kind", [Plain, Larger])
def test_their_functions_are_asked_as_beside_plain_parameters(kind: type, mode: str) -> None:
    model_class = type("Of", (Of,), {"kind": kind})
    torch.manual_seed(0)
    model: Any = model_class()
    torch.manual_seed(0)
    plain = model_class()
    memory = 10 * sum(p.numel() for p in model.parameters())
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory, block_modes=[mode] * len(model.blocks))
    with pytest.warns(UserWarning, match="cannot foresee"):
        found = trained(model, optimizer)
    assert protrain.status(model).plan.n_persist < protrain.status(model).plan.n_chunks
    protrain.unwrap(model)
    assert found == trained(plain, adamw(plain))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def on_disk(model: Any) -> Any:
    model, _ = protrain.wrap(model, adamw(model), memory=10 * sum(p.numel() for p in model.parameters()))
    status = protrain.status(model)
    assert status.plan.n_persist < status.plan.n_chunks
    return model


def test_what_only_holds_a_tensor_calls_with_it() -> None:
    model: Any = Chain()
    x = torch.randn(8, 256)
    expected = F.linear(x, model.head.weight, model.head.bias).detach()
    model = on_disk(model)
    assert torch.equal(F.linear(Wrapped(x), model.head.weight, model.head.bias).inner, expected)  # type: ignore[arg-type]
    protrain.unwrap(model)


def test_what_nobody_computes_is_refused_as_plain_torch_refuses_it() -> None:
    model: Any = Chain()
    x = torch.randn(8, 256).as_subclass(Refusing)
    with pytest.raises(TypeError, match="Refusing"):
        model.head(x)
    model = on_disk(model)
    with pytest.raises(TypeError, match=r"no implementation found for torch.* on types .*Refusing"):
        F.linear(x, model.head.weight, model.head.bias)
    protrain.unwrap(model)
