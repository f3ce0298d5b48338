"""Tensors of other classes beside parameters on disk: their classes are asked as plain torch asks them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import Chain, inputs, steps
from twins import adamw, assert_equal, run

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


@pytest.mark.parametrize("mode", ["keep", "checkpoint", "swap"])
@pytest.mark.parametrize("kind", [Plain, Larger])
def test_their_functions_are_asked_as_beside_plain_parameters(kind: type, mode: str) -> None:
    model_class = type("Of", (Of,), {"kind": kind})
    memory = 10 * sum(p.numel() for p in model_class().parameters())
    kinds: list[type] = []

    def noted(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        kinds.append(type(loss))
        return loss

    loop = steps(inputs(3), noted)
    with pytest.warns(UserWarning, match="cannot foresee"):
        found = run(model_class, loop, memory=memory, block_modes=[mode] * 8)
    status = assert_equal(found, run(model_class, loop), memory)
    assert status.plan.n_persist < status.plan.n_chunks
    assert kinds == [kind] * 6


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
