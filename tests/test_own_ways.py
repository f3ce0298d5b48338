"""What programs do to a model in ways of their own: hooks on a block's inputs, entries of a state dict, values put in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import TIGHT, Block, Chain, inputs, steps
from torch import nn
from twins import MIB, adamw, assert_equal, run

import protrain


class Halving(Block):
    """Its hooks change the gradient of what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
            if x.grad_fn is not None:
                x.grad_fn.register_hook(lambda grads, _outer: tuple(g * 1.5 if g is not None else None for g in grads))
        return super().forward(x)


class Halvings(Chain):
    block = Halving


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint", "checkpoint_swap"])
def test_hooks_that_a_block_puts_on_its_inputs_run_once(mode: str) -> None:
    loop = steps([x.requires_grad_() for x in inputs(3)])
    assert_equal(run(Halvings, loop, memory=TIGHT, block_modes=[mode] * 8), run(Halvings, loop), TIGHT)


class Attending(nn.Module):
    """Asks whether it was given one tensor three times."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(256, 4, batch_first=True), nn.LayerNorm(256)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = query + self.norm(self.attention(query, key, value, need_weights=False)[0])
        return found


class Attendings(Chain):
    block = Attending

    def forward(self, x: torch.Tensor, *, skip: Any = (), loss: bool = True) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, x, x)
        y: torch.Tensor = self.head(x)
        return y.square().mean()


class Image(nn.Module):
    """Its kernel is chosen by how its input lies."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.GroupNorm(4, 32), nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(self.norm(x)).tanh() + x
        return found


class Images(Chain):
    block = Image

    def forward(self, x: torch.Tensor, *, skip: Any = (), loss: bool = True) -> torch.Tensor:
        x = (
            x[:1].reshape(1, 1, 16, 16).expand(1, 32, 16, 16).contiguous(memory_format=torch.channels_last)
            * self.head.weight[0, 0]
        )
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("mode", ["swap", "checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("make", [Attendings, Images])
def test_a_recomputed_block_has_its_inputs_as_they_were(make: Any, mode: str) -> None:
    loop = steps([x.unsqueeze(0) if make is Attendings else x for x in inputs(3)])
    memory = 40 * MIB
    assert_equal(run(make, loop, memory=memory, block_modes=[mode] * 8), run(make, loop), memory)


class Padded(nn.Embedding):
    """Saves the rows that are in use alone."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"][:20]


class Saving(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256, 256))
        self.words = Padded(64, 256)
        self.register_state_dict_post_hook(self._in_half)

    @staticmethod
    def _in_half(_module: nn.Module, state_dict: dict[str, Any], _prefix: str, _metadata: Any) -> None:
        for name, value in list(state_dict.items()):
            state_dict[name] = value.half()

    def forward(self, x: torch.Tensor, *, skip: Any = (), loss: bool = True) -> torch.Tensor:
        return super().forward(x @ self.scale + self.words.weight[0], skip=skip, loss=loss)


@pytest.mark.parametrize("memory", [TIGHT, 200 * MIB])
def test_what_a_program_makes_of_a_state_dict_stays(memory: int) -> None:
    loop = steps(inputs(2))
    got, want = run(Saving, loop, memory=memory), run(Saving, loop)
    assert_equal(got, want, memory)
    assert len(want.tensors["words.weight"]) < 20 * 256 * 2 + 64


class Bounded(nn.Linear):
    """Puts other values into its weight in each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class Bounding(Chain):
    def __init__(self) -> None:
        super().__init__()
        blocks, head = self.blocks, self.head
        del self.blocks, self.head
        self.first, self.blocks, self.head = Bounded(256, 256), blocks, head  # in the first chunk, the last to leave memory

    def forward(self, x: torch.Tensor, *, skip: Any = (), loss: bool = True) -> torch.Tensor:
        return super().forward(self.first(x), skip=skip, loss=loss)


@pytest.mark.parametrize("memory", [40, 200])
def test_values_that_a_forward_puts_into_data_are_trained(memory: int) -> None:
    loop = steps(inputs(4))
    status = assert_equal(run(Bounding, loop, memory=memory * MIB), run(Bounding, loop), memory * MIB)
    assert status.plan.n_persist > 0
    assert status.plan.n_persist < status.plan.n_chunks or memory > 40


class Own(nn.Parameter):
    """As of a library of manifolds, whose optimizer asks for the class."""


def test_a_parameter_of_a_class_of_its_own_is_refused() -> None:
    model = Chain()
    model.head.weight = Own(model.head.weight.detach())
    with pytest.raises(protrain.PlanError, match=r"parameter head\.weight is of the class Own"):
        protrain.wrap(model, adamw(model), memory=TIGHT)


def test_a_norm_to_clip_by_keeps_no_graph() -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=40 * MIB, max_grad_norm=1.0)
    for x in inputs(3):
        model(x).backward(create_graph=True)
        optimizer.step()
        assert not optimizer.grad_norm.requires_grad
        optimizer.zero_grad()
    protrain.unwrap(model)
