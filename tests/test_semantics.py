"""What users do to a model beyond the ordinary loop: steps of odd shape, odd parameters, changes between steps. All bit for bit.

Each test trains twice, in plain torch and wrapped with most of the state on disk. Where a situation is one that the suites of
other systems test, because it broke there once, the docstring names the suite's file.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import TIGHT, Block, Chain, both, inputs, rigid, steps
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from twins import MIB, adafactor, adamw, bits

import protrain
from protrain.model.parameters import ChunkParameter


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


# ---- steps ----


@pytest.mark.parametrize("optimizer", [adamw, adafactor], ids=["kernel", "its own step"])
def test_under_a_profiler_that_records_stacks(optimizer: Any) -> None:
    """It asks modules and optimizers that it sees for their tensors."""

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        with torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True):
            return steps(inputs(2))(model, optimizer, plain)

    both(Chain, loop, optimizer)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("passes", [(3, 2, 3, 1), (1, 1, 1, 1), (2, 3, 1, 3)])
def test_a_step_of_fewer_passes_than_agreed(passes: tuple[int, ...], clip: float | None) -> None:
    """The last window of an epoch is shorter. DeepSpeed tests/unit/runtime/zero/test_zero.py, gradient accumulation."""

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures = []
        for number, count in enumerate(passes):
            for x in inputs(count, seed=number):
                loss = model(x)
                (loss / 3).backward()
                figures.append(loss.item())
            if clip and plain:
                figures.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            if clip and not plain:
                figures.append(optimizer.grad_norm.item())
            optimizer.zero_grad()
        return figures

    both(Chain, loop, accumulate=3, max_grad_norm=clip)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_parameter_with_a_gradient_in_some_passes_of_a_step(clip: float | None) -> None:
    """Blocks that only one of the passes uses. DeepSpeed tests/unit/runtime/zero/test_ignore_unused_parameters.py."""

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures = []
        for number in range(4):
            for place, x in enumerate(inputs(2, seed=number)):
                loss = model(x, skip=(1, 2, 6) if place == number % 2 else ())
                loss.backward()
                figures.append(loss.item())
            if clip and plain:
                figures.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            if clip and not plain:
                figures.append(optimizer.grad_norm.item())
            optimizer.zero_grad()
        return figures

    both(Chain, loop, accumulate=2, max_grad_norm=clip)


def test_several_losses_of_one_forward() -> None:
    """Two backward passes over one graph. DeepSpeed tests/unit/runtime/zero/test_zero_multiple_run.py."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(4):
            y = model(x, loss=False)
            first, second = y.square().mean(), y.abs().mean()
            first.backward(retain_graph=True)
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures += [first.item(), second.item()]
        return figures

    both(Chain, loop, accumulate=2)


def test_two_forwards_then_two_backwards() -> None:
    """Both graphs live at once. DeepSpeed tests/unit/runtime/zero/test_zero_leaf_module.py, several forwards in a step."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for number in range(4):
            losses = [model(x) for x in inputs(2, seed=number)]
            for loss in losses if number % 2 else reversed(losses):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures += [loss.item() for loss in losses]
        return figures

    both(Chain, loop, accumulate=2)


def test_nothing_moves_for_a_larger_batch_whose_backward_is_that_of_a_smaller_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of the first forward would lie elsewhere in its backward: they stay, and the step is refused where their state
    cannot give way."""
    rigid(monkeypatch)
    model = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=42 * MIB, block_modes=["checkpoint"] * 8)
    with pytest.raises(protrain.BudgetError):
        (model(inputs(1, 8)[0]) + model(inputs(1, 512)[0])).backward()
    optimizer.zero_grad()
    model(inputs(1, 8)[0]).backward()
    protrain.unwrap(model)


def test_one_backward_over_several_forwards() -> None:
    """A loss over two outputs, one output that nobody uses, an evaluation before backward. Autograd holds the gradients of the
    second forward until those of the first are there to be added, so the budget needs room for all of them."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for number in range(4):
            a, b, c = inputs(3, seed=number)
            left, right = model(a, loss=False), model(b, loss=False)
            unused = model(c, loss=False)
            with torch.no_grad():
                figures.append(model(c).item())
            loss = (left - right).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures += [loss.item(), unused.sum().item()]
        return figures

    both(Chain, loop, room=16 * MIB)


def test_a_step_without_gradients_changes_nothing() -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(4):
            optimizer.step()
            figures.append(steps([x])(model, optimizer, False)[0])
            optimizer.step()
        return figures

    both(Chain, loop)


def test_gradients_that_are_not_dropped_are_not_forgotten() -> None:
    """Plain torch would add the next step's to them; they have left memory, so to use what is there is an error, not a smaller
    sum."""
    model = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    (x,) = inputs(1)
    model(x).backward()
    optimizer.step()
    before = {name: bits(value) for name, value in model.state_dict().items()}
    for _ in range(2):
        model(x).backward()
        with pytest.raises(protrain.StepError, match="zero_grad"):
            optimizer.step()
    assert {name: bits(value) for name, value in model.state_dict().items()} == before
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
    assert protrain.status(model).steps == 2
    protrain.unwrap(model)


def test_gradients_set_by_hand() -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for number, x in enumerate(inputs(4)):
            figures += steps([x])(model, optimizer, False)
            for p in list(model.parameters())[number::3]:
                p.grad = torch.full_like(p, 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return figures

    both(Chain, loop)


def test_gradients_dropped_one_by_one() -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(4):
            loss = model(x)
            loss.backward()
            optimizer.step()
            for p in model.parameters():
                p.grad = None
            figures.append(loss.item())
        return figures

    both(Chain, loop)


def test_gradients_dropped_one_by_one_where_plans_change() -> None:
    """A longer batch moves chunks to disk after their gradients were dropped."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for rows in (4, 4, 4, 600, 4):
            loss = model(inputs(1, rows=rows)[0])
            loss.backward()
            optimizer.step()
            for block in model.blocks:
                block.zero_grad()
            for p in model.head.parameters():
                p.grad = None
            figures.append(loss.item())
        return figures

    both(Chain, loop)


class Around(nn.Module):
    """Holds a wrapped model, as Lightning's modules do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def test_gradients_dropped_by_a_module_around() -> None:
    """Which is sent to where it is before, as trainers do at their end."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        around, figures = Around(model), []
        for x in inputs(4):
            loss = model(x)
            loss.backward()
            optimizer.step()
            around.cpu().float().to("cpu")
            around.zero_grad()
            figures.append(loss.item())
        return figures

    both(Chain, loop)


def test_a_module_around_drops_nothing_of_a_step_under_way() -> None:
    """Nor does it fill gradients that have left memory with zeros, nor does a conversion hide that they have."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    around, (x,) = Around(model), inputs(1)
    model(x).backward()
    with pytest.raises(protrain.StepError, match="has left memory"):
        around.zero_grad()
    optimizer.step()
    around.cpu()
    with pytest.raises(protrain.StepError, match="has left memory"):
        around.zero_grad(set_to_none=False)
    with pytest.raises(protrain.StepError, match="has left memory"):
        _ = [p.grad for p in model.parameters()]
    around.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    protrain.unwrap(model)


def test_a_closure() -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        def closure(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            return loss

        return [optimizer.step(lambda x=x: closure(x)).item() for x in inputs(4)]

    both(Chain, loop)


def test_gradient_penalty() -> None:
    """autograd.grad with a graph of its own, whose loss is differentiated once more."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(4):
            x.requires_grad_()
            y = model(x, loss=False)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = y.square().mean() + (slope.norm() - 1).square()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    both(Chain, loop, room=12 * MIB)


def test_gradients_asked_for_by_autograd_grad() -> None:
    """They are handed out, and no step comes of them."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(4):
            grads = torch.autograd.grad(model(x), list(model.parameters()))
            figures += [grad.double().norm().item() for grad in grads]
            figures += steps([x])(model, optimizer, False)
        return figures

    both(Chain, loop, room=24 * MIB)


def test_gradients_asked_for_where_no_pass_may_be() -> None:
    """Between backward and step, between step and zero_grad: nothing is accumulated, which a second backward pass would do."""

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures, parameters = [], [model.blocks[0].up.weight, model.blocks[5].down.weight, model.head.bias]
        for x, other in zip(inputs(3), inputs(3, seed=2), strict=True):
            model(x).backward()
            figures += map(bits, torch.autograd.grad(model(other), parameters))
            if not plain:
                with pytest.raises(
                    protrain.StepError, match=r"^backward pass 2 .*optimizer\.step\(\) first, or optimizer\.zero_grad\(\) where"
                ):
                    model(other).backward()
            optimizer.step()
            figures += map(bits, torch.autograd.grad(model(other), parameters))
            optimizer.zero_grad()
        return figures

    both(Chain, loop, room=24 * MIB)


@pytest.mark.parametrize("optimizer", [adamw, adafactor], ids=["kernel", "its own step"])
def test_a_generator_that_is_trained_through_its_discriminator(optimizer: Any) -> None:
    """Its backward leaves gradients in the discriminator, which are dropped when that is to be trained again and not before."""

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures: list[Any] = []
        torch.manual_seed(3)
        generator = nn.Linear(*[inputs(1)[0].shape[-1]] * 2)
        other = torch.optim.SGD(generator.parameters(), lr=0.1)
        for number, (x, noise) in enumerate(zip(inputs(4), inputs(4, seed=2), strict=True)):
            optimizer.zero_grad()
            for of in (x, generator(noise).detach()):
                loss = model(of)
                loss.backward()
            optimizer.step()
            other.zero_grad()
            through = model(generator(noise))
            through.backward()
            figures += [bits(loss), bits(through), *(bits(p.grad) for p in generator.parameters())]
            other.step()
            if number % 2 and not plain:
                with pytest.raises(protrain.StepError, match="gradients of the last step are still there, and used"):
                    optimizer.step()
                with pytest.raises(protrain.StepError, match="has left memory"):
                    model.blocks[5].down.weight.grad  # noqa: B018 - to look at it is what is refused
        return figures

    both(Chain, loop, optimizer, accumulate=2)


class Corrected(torch.autograd.Function):
    """Its backward asks for gradients of parameters through another graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            found = torch.autograd.grad(ctx.layer(grad).square().mean(), list(ctx.layer.parameters()))
        return grad * (1 + found[0].mean() + found[1].mean()), None


class CorrectedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.corrects = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Corrected.apply(x, self.corrects))


class CorrectedChain(Chain):
    block = CorrectedBlock


def test_gradients_asked_for_inside_backward() -> None:
    both(CorrectedChain, steps(inputs(3)))


def test_gradients_asked_for_of_views() -> None:
    """Of a detached one, of one with a graph, and of a frozen parameter, which torch refuses."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = steps(inputs(1))(model, optimizer, False)
        p = model.blocks[6].up.weight
        for view in (p.detach().requires_grad_(), p.t()):
            grads = torch.autograd.grad((view * view).sum(), {"p": p, "view": view}, allow_unused=True)
            figures += [grad is not None and bits(grad) for grad in grads.values()]
        p.requires_grad_(False)
        with pytest.raises(RuntimeError, match="One of the differentiated Tensors does not require grad"):
            torch.autograd.grad(model(inputs(1)[0]), p, allow_unused=True)
        p.requires_grad_(True)
        return figures

    both(Chain, loop)


@pytest.mark.parametrize("names", ["all", "some", "one"])
def test_backward_to_inputs_that_are_named(names: str) -> None:
    """They are places in the graph: no chunk is brought for them, so what suffices for all gradients does."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        chosen: dict[str, Any] = {
            "all": list(model.parameters()),
            "some": [p for number in (2, 5) for p in model.blocks[number].parameters()],
            "one": model.blocks[4].up.weight,
        }
        for number, x in enumerate(inputs(4)):
            loss = model(x)
            if number % 2:
                torch.autograd.backward([loss], inputs=chosen[names])
            else:
                loss.backward(inputs=chosen[names])
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    both(Chain, loop, memory=8 * MIB)  # parameters take more


def test_backward_to_inputs_that_are_views_or_frozen() -> None:
    """A view with a graph keeps its gradient; torch refuses a frozen parameter."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = steps(inputs(1))(model, optimizer, False)
        p = model.blocks[6].up.weight
        view = p.t()
        (view * view).sum().backward(inputs=[view])
        figures.append(bits(view.grad))
        p.requires_grad_(False)
        with pytest.raises(RuntimeError, match="requires_grad=False"):
            model(inputs(1)[0]).backward(inputs=[p])
        p.requires_grad_(True)
        return figures

    both(Chain, loop)


class Handmade(torch.autograd.Function):
    """Two layers, recomputed by hand in backward; it asks for what it saved once more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        return nn.functional.linear(torch.tanh(nn.functional.linear(x, *weights[:2])), *weights[2:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = ctx.saved_tensors[0].abs().mean()
        with torch.enable_grad():
            x, *weights = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            y = nn.functional.linear(torch.tanh(nn.functional.linear(x, *weights[:2])), *weights[2:])
        return torch.autograd.grad(y, (x, *weights), grad * scale)


class HandmadeBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Handmade.apply(self.norm_in(x), self.up.weight, self.up.bias, self.down.weight, self.down.bias)
        return x + self.square(y)


class HandmadeChain(Chain):
    block = HandmadeBlock


@pytest.mark.parametrize("mode", [None, "keep", "checkpoint"])
@pytest.mark.filterwarnings("error:protrain cannot foresee")
def test_functions_that_recompute_by_hand(mode: str | None) -> None:
    both(HandmadeChain, steps(inputs(3)), **({"block_modes": [mode] * 8} if mode else {}))


class Asks(torch.autograd.Function):
    """Its backward asks for a gradient through other layers, and goes on with the weight that it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, others: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.others = others
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            z = y
            for other in ctx.others:
                z = other(z)
            (found,) = torch.autograd.grad(z.square().mean(), y)
        return grad @ weight + found, grad.t() @ x, None


class AsksBlock(Block):
    others: tuple[nn.Module, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Asks.apply(self.norm_in(x), self.square.weight, self.others)
        return super().forward(x) + y


class AsksChain(Chain):
    block = AsksBlock

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            other, third = self.blocks[(number + 3) % 8], self.blocks[(number + 5) % 8]
            block.others = (other.up, other.down, third.square)


@pytest.mark.parametrize("mode", [None, "swap", "checkpoint"])
def test_what_a_function_saved_is_still_there_behind_a_backward_inside_of_its_own(mode: str | None) -> None:
    """Whatever chunks that one brings into the same slots."""
    both(AsksChain, steps(inputs(3)), memory=10 * MIB, **({"block_modes": [mode] * 8} if mode else {}))


def test_hooks_of_users_on_parameters() -> None:
    """A hook that changes a gradient is obeyed."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        handles = [p.register_hook(lambda grad: grad * 0.5) for p in list(model.parameters())[::3]]
        figures = steps(inputs(3))(model, optimizer, False)
        for handle in handles:
            handle.remove()
        return figures + steps(inputs(2, seed=5))(model, optimizer, False)

    both(Chain, loop)


def test_hooks_at_the_nodes_that_accumulate() -> None:
    """torch finds such a node by a view of the parameter, in register_multi_grad_hook and as others do by hand."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures: list[Any] = []
        p, q = model.blocks[1].up.weight, model.blocks[5].down.bias
        node = p.expand_as(p).grad_fn.next_functions[0][0]
        handles = [
            torch.autograd.graph.register_multi_grad_hook([p, q], lambda grads: figures.extend(map(bits, grads))),
            node.register_hook(lambda *_: figures.append(type(node).__name__)),
        ]
        figures += steps(inputs(2))(model, optimizer, False)
        for handle in handles:
            handle.remove()
        return figures

    both(Chain, loop)


# ---- parameters ----


class Odd(Chain):
    """A hanging parameter, one of no elements, of one, of no dimension, one never used, lists and dicts of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0, 5))
        self.never = nn.Parameter(torch.ones(3000))
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(256) * 0.1) for _ in range(3)])
        self.named = nn.ParameterDict({"in": nn.Parameter(torch.ones(256)), "out": nn.Parameter(torch.zeros(256))})

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        x = x * self.named["in"] * self.scale + self.rows[0] + torch.stack(list(self.rows)).sum(0) + self.empty.sum()
        y: torch.Tensor = super().forward(x, **given)
        return y + (self.named["out"].sum() + self.shift).squeeze()


def test_hanging_and_odd_parameters() -> None:
    """ColossalAI tests/kit/model_zoo/custom/hanging_param_model.py."""
    both(Odd, steps(inputs(5)))


class Spectral(Block):
    """Real parameters that are read as complex ones, conjugated, and negated, which is done when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = nn.Parameter(torch.randn(129, 129, 2) * 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.view_as_complex(self.modes)
        y = torch.fft.rfft(self.norm_in(x)) @ modes @ modes.mH
        y = y + x[:, :129] @ modes.conj().imag
        return super().forward(x + torch.fft.irfft(y, n=256))


class SpectralChain(Chain):
    block = Spectral


def test_parameters_read_as_complex_ones() -> None:
    both(SpectralChain, steps(inputs(3)))


class Repeated(Chain):
    """One module called several times in a forward, and one block of the list called again after the others."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for block in (*self.blocks, self.blocks[2], self.blocks[2]):
            x = block(torch.tanh(self.shared(x)))
        return self.head(x).square().mean()


def test_repeated_layer() -> None:
    """ColossalAI tests/kit/model_zoo/custom/repeated_computed_layers.py."""
    both(Repeated, steps(inputs(5)))


class Tied(Chain):
    """Weights tied across blocks and across chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[7].up.weight = self.blocks[0].up.weight
        self.blocks[5].down = self.blocks[1].down
        self.head.weight = self.blocks[3].square.weight


def test_tied_across_blocks() -> None:
    """DeepSpeed tests/unit/runtime/zero/test_zero_tiled.py and test_zero.py, tied weights; ColossalAI's tied embeddings."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = steps(inputs(3))(model, optimizer, False)
        model.head.weight = model.blocks[3].square.weight  # as tie_weights() does
        return figures + steps(inputs(2, seed=4))(model, optimizer, False)

    both(Tied, loop)


class Outer(nn.Module):
    """A model within modules: what is wrapped is one part of it, or what holds all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.inner = nn.ModuleDict({"core": Chain()})
        self.last = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner["core"](self.first(x), loss=False)).square().mean()


def test_nested_model() -> None:
    """ColossalAI tests/kit/model_zoo/custom/nested_model.py."""
    both(Outer, steps(inputs(5)))


def test_a_part_of_a_larger_model() -> None:
    """The wrapped part trains inside a plain one with an optimizer of its own."""

    def train(memory: int | None) -> list[Any]:
        torch.manual_seed(0)
        model = Outer()
        core, outer = model.inner["core"], [*model.first.parameters(), *model.last.parameters()]
        ours: Any = adamw(core)
        theirs = torch.optim.AdamW(outer, lr=1e-3, fused=True)
        if memory:
            core, ours = protrain.wrap(core, ours, memory=memory)
        figures = []
        for x in inputs(5):
            loss = model(x)
            loss.backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            figures.append(loss.item())
        figures += [value.double().sum().item() for value in model.state_dict().values()]
        if memory:
            assert protrain.status(core).disk_read_bytes > 0
            protrain.unwrap(core)
        return figures

    assert train(TIGHT) == train(None)


def test_a_branch_that_alternates() -> None:
    """Blocks that some steps leave out: no update there, and no weight decay. DeepSpeed
    tests/unit/runtime/zero/test_ignore_unused_parameters.py."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for number, x in enumerate(inputs(8)):
            loss = model(x, skip=((), (0, 3), (7,), tuple(range(8)))[number % 4])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    both(Chain, loop)


def test_parameters_frozen_and_thawed_between_steps() -> None:
    """requires_grad_ while wrapped. DeepSpeed tests/unit/runtime/zero/test_zero.py, frozen weights."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for number, x in enumerate(inputs(6)):
            for block in model.blocks[2:5]:
                block.requires_grad_(number % 3 != 1)
            figures += steps([x])(model, optimizer, False)
        return figures

    both(Chain, loop)


@pytest.mark.parametrize("leaf", ["up.bias", "norm_in.weight"])
def test_parameters_frozen_in_every_block_need_no_more_memory(leaf: str) -> None:
    """A block's other gradients do not wait in memory for one that does not come any more."""

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures = steps(inputs(2))(model, optimizer, plain)
        for block in model.blocks:
            block.get_parameter(leaf).requires_grad_(False)
        return figures + steps(inputs(3, seed=2))(model, optimizer, plain)

    both(Chain, loop)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_that_change_places_between_steps(accumulate: int, tmp_path: Any) -> None:
    """Tied, exchanged and left out after wrap: state dicts and checkpoints have them under the names that they have now."""

    def saved(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        values = [(name, bits(value)) for name, value in model.state_dict().items()]
        if not plain:
            protrain.save(model, optimizer, tmp_path / "saved")
            steps(inputs(1, seed=6))(model, optimizer, plain)
            protrain.load(model, optimizer, tmp_path / "saved")
        return values

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures = steps(inputs(2))(model, optimizer, plain)
        one, other, tied = model.blocks[1].up, model.blocks[2].up, model.blocks[3]
        one.weight, other.weight = other.weight, one.weight
        tied.down.weight = model.blocks[4].down.weight
        figures += steps(inputs(2, seed=2))(model, optimizer, plain) + saved(model, optimizer, plain)
        del model.blocks[6]
        figures += steps(inputs(2, seed=3))(model, optimizer, plain) + saved(model, optimizer, plain)
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        return figures + steps(inputs(2, seed=4))(model, optimizer, plain)

    both(Chain, loop, accumulate=accumulate)


@pytest.mark.parametrize("order", ["reversed", "some", "mixed"])
def test_an_optimizer_of_another_order(order: str) -> None:
    """Its parameters come in another order than the model's, or are only some of them."""

    def optimizer(model: nn.Module) -> Any:
        params = list(model.parameters())
        chosen = {"reversed": params[::-1], "some": params[1::2], "mixed": params[::2] + params[1::2]}[order]
        return torch.optim.AdamW(chosen, lr=1e-3, weight_decay=0.1, fused=True)

    both(Chain, steps(inputs(4)), optimizer, room=8 * MIB)


class Strided(Chain):
    """Weights that lie transposed, and channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)
        for block in self.blocks:
            block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous().t())

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        x = x + self.image(x.view(-1, 4, 8, 8)).mean(1).flatten(1).repeat(1, 4)
        y: torch.Tensor = super().forward(x, **given)
        return y


def test_parameters_that_are_not_contiguous() -> None:
    both(Strided, steps(inputs(4)))


def test_an_expanded_parameter_is_refused() -> None:
    model = Chain()
    model.wide = nn.Parameter(torch.ones(1).expand(100))
    with pytest.raises(protrain.PlanError, match="wide"):
        protrain.wrap(model, adamw(model), memory=TIGHT)


def test_parameters_changed_between_steps() -> None:
    """Clamped, copied from, written through .data and through views, averaged, tied again."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        average = [p.detach().clone() for p in model.parameters()]
        figures = []
        for x in inputs(4):
            figures += steps([x])(model, optimizer, False)
            with torch.no_grad():
                for p in model.blocks.parameters():
                    p.clamp_(-0.04, 0.04)
                for mean, p in zip(average, model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
                model.blocks[1].up.weight.data.copy_(model.blocks[2].up.weight)
                model.blocks[3].up.weight[5:9].fill_(0.25)
                model.blocks[4].down.weight.data = model.blocks[5].down.weight.data * 0.5
                model.head.bias.data = torch.full((256,), 0.125)
                torch._foreach_mul_(list(model.blocks[6].parameters()), 0.99)
            figures += [mean.double().sum().item() for mean in average]
        return figures

    both(Chain, loop, room=24 * MIB)


def test_one_call_over_views_of_all_parameters() -> None:
    """Chunks that share a slot each get their own, and views that were made before go there with their parameters."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn())
        figures = []
        for x in inputs(3):
            loss = model(x) + 1e-3 * parameters_to_vector(model.parameters()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            with torch.no_grad():
                torch._foreach_mul_([p.t() for p in model.parameters() if p.dim() == 2], 0.99)  # written through views
                figures += [loss.item(), bits(parameters_to_vector(model.parameters()))]
        return figures + [bits(p) for p in average.module.parameters()]

    both(Chain, loop, room=64 * MIB)


def test_views_that_are_kept_over_steps_show_their_parameters() -> None:
    """Also once an operation on all of them, or another plan, has given their chunks other places."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    steps(inputs(1))(model, optimizer, False)
    ways: list[Any] = [
        torch.Tensor.detach, torch.Tensor.t, lambda p: p.detach()[5:, ::2], lambda p: p.detach().view(torch.int32),
        lambda p: torch.view_as_complex(p.detach().view(-1, 2)).conj(), lambda p: torch._neg_view(p.detach()),
    ]  # fmt: skip
    read = [(p, way, way(p)) for block in model.blocks for p in (block.up.weight, block.square.weight) for way in ways]
    read = [each for each in read if isinstance(each[0], ChunkParameter)]
    homes = [isinstance(p, ChunkParameter) for p in model.parameters()]
    for rows in (8, 8, 700):
        steps(inputs(1, rows))(model, optimizer, False)
        with torch.no_grad():
            assert all(torch.equal(view.resolve_neg(), way(p.detach().clone()).resolve_neg()) for p, way, view in read)
            read[0][2].mul_(0.5)
            assert torch.equal(read[0][2], read[0][0])
            torch._foreach_norm([view for _, way, view in read if way is torch.Tensor.detach])
    assert homes != [isinstance(p, ChunkParameter) for p in model.parameters()]
    view, other = read[0][2], read[-1][0]
    view.data = torch.zeros(3)  # and shows another tensor from here on
    steps(inputs(1))(model, optimizer, False)
    assert view.tolist() == [0, 0, 0]
    view.data = other.data
    steps(inputs(1))(model, optimizer, False)
    assert torch.equal(view, other)
    protrain.unwrap(model)


def test_values_read_through_numpy() -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(3):
            figures += steps([x])(model, optimizer, False)
            arrays = [p.detach().numpy() for p in model.parameters()]
            figures += [float(array.sum(dtype="float64")) for array in arrays]
            figures += [p.detach().cpu().numpy()[0].tolist() for p in model.blocks[0].parameters()]
        return figures

    both(Chain, loop)


# ---- blocks ----


class Containers(Block):
    """Takes keywords, None and a dict; gives a tuple with a dict, None and a view of the input."""

    def forward(self, x: torch.Tensor, mask: Any = None, extra: Any = None, *, scale: Any = None) -> Any:  # type: ignore[override]
        y = super().forward(x) * (1 if scale is None else scale)
        if extra is not None:
            y = y + extra["bias"]
        return y, {"view": x[:, :128], "none": None}, None


class ContainerChain(Chain):
    block = Containers

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        total = x.new_zeros(())
        scale = torch.ones(256, requires_grad=True) * 0.9
        for number, block in enumerate(self.blocks):
            x, other, _ = block(x, None, {"bias": scale * 0.01} if number % 2 else None, scale=scale)
            total = total + other["view"].square().mean()
        return self.head(x).square().mean() + total


def test_blocks_of_containers_keywords_and_views() -> None:
    """ColossalAI's zoo has models that return tuples and dicts; DeepSpeed tests/unit/runtime/zero/test_zero_dynamic_class.py."""
    both(ContainerChain, steps(inputs(4)))


class Viewing(Block):
    """Its output is a view of its input in one branch, the input itself in another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return x.view(x.shape) if y.mean().item() > 1e9 else (x + y).view(x.shape)


class ViewingChain(Chain):
    block = Viewing


def test_a_model_whose_memory_is_not_foreseen() -> None:
    """Its control flow depends on values, so each step may be planned anew; gradients of a chunk that leaves memory after step()
    are dropped by zero_grad() like all others."""
    with pytest.warns(UserWarning, match="cannot foresee"):
        both(ViewingChain, steps(inputs(6)), block_modes=["checkpoint"] * 8)


class InPlace(Block):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += super().forward(x.clone())
        x.mul_(0.5)
        return x


class InPlaceChain(Chain):
    block = InPlace

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        y: torch.Tensor = super().forward(x * 1.0, **given)
        return y


@pytest.mark.parametrize("mode", ["planned", "keep", "swap", "checkpoint", "checkpoint_swap"])
def test_blocks_that_change_their_input_in_place(mode: str) -> None:
    both(InPlaceChain, steps(inputs(4)), block_modes=None if mode == "planned" else [mode] * 8)


class Normed(Block):
    """Buffers that forward updates: running means, a count, one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(256)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(256))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(self.norm(x) + self.mean) / (1 + 1e-3 * self.calls) * (1 + 1e-3 * self.count)


class NormedChain(Chain):
    block = Normed


@pytest.mark.parametrize("mode", ["planned", "keep", "swap", "checkpoint", "checkpoint_swap"])
def test_buffers_that_forward_updates(mode: str) -> None:
    """Recomputation updates them no second time, and sees those that forward saw. ColossalAI tests/kit/model_zoo has
    torchvision's models with batch norm."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = steps(inputs(4))(model, optimizer, False)
        return [*figures, *(block.calls for block in model.blocks)]

    both(NormedChain, loop, block_modes=None if mode == "planned" else [mode] * 8)


class Dropping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


class DroppingChain(Chain):
    block = Dropping


@pytest.mark.parametrize("mode", ["planned", "checkpoint"])
def test_the_training_flag_changes_before_backward(mode: str) -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(4):
            loss = model(x)
            model.eval()
            with torch.no_grad():
                figures.append(model(x).item())
            loss.backward()
            model.train()
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    both(DroppingChain, loop, block_modes=None if mode == "planned" else [mode] * 8)


class Methods(Chain):
    """The work is done by methods other than forward."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:4]:
            x = block(x)
        return x

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[4:]:
            x = block(x)
        return self.head(x).square().mean()


def test_a_model_whose_forward_is_never_called() -> None:
    """DeepSpeed tests/unit/runtime/zero/test_zero_nesting_init.py and its external parameters: modules called on their own."""
    both(Methods, steps(inputs(5), lambda model, x: model.decode(model.encode(x))))


def test_training_in_eval_mode() -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        model.eval()
        return steps(inputs(5))(model, optimizer, False)

    both(DroppingChain, loop)


# ---- a step between a forward and its backward ----


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint", "checkpoint_swap", None])
def test_a_step_between_a_forward_and_its_backward_is_noticed(mode: str | None) -> None:
    """What the graph saved of parameters is gone, and autograd says so by their versions. With torch's fused kernels, which leave
    versions alone, plain torch goes on with the new values, and so does a wrapped model but for blocks that would be recomputed
    with them, as a plan of its own (None) may have some."""

    def late_backward(fused: bool | None, wrap: bool) -> list[Any]:
        model = Chain()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        if wrap:
            options: dict[str, Any] = {"memory": TIGHT} if mode is None else {"memory": 256 * MIB, "block_modes": [mode] * 8}
            model, optimizer = protrain.wrap(model, optimizer, **options)
        figures = []
        for x in inputs(3):
            early, late = model(x), model(x + 1)
            early.backward()
            optimizer.step()
            optimizer.zero_grad()
            late.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures += [early.item(), late.item()]
        return figures

    for wrap in (False, True):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version \d+; expected version"):
            late_backward(None, wrap)
    try:
        found: Any = late_backward(True, True)
    except RuntimeError as error:
        found = str(error)
    if mode is not None:
        assert isinstance(found, str) == mode.startswith("checkpoint")
    if isinstance(found, str):
        block = "" if mode is None else "block blocks.7 "
        assert f"{block}is recomputed, and optimizer.step() changed its parameters" in found
    else:
        assert found == late_backward(True, False)


class Apart(nn.Module):
    """Blocks of which a forward runs one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)) for _ in range(2))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        y: torch.Tensor = self.blocks[number](x)
        return y.square().mean()


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("fused", [None, True])
def test_a_step_that_changed_other_blocks_is_none_between(fused: bool | None, mode: str) -> None:
    def losses(wrap: bool) -> list[float]:
        model: Any = Apart()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        if wrap:
            model, optimizer = protrain.wrap(model, optimizer, memory=256 * MIB, block_modes=[mode] * 2)
        figures = []
        for x in inputs(3):
            early, late = model(x, 0), model(x, 1)
            for loss in (early, late):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                figures.append(loss.item())
        return figures

    assert losses(True) == losses(False)
