"""Parameters that lie otherwise than contiguous: channels last, transposed, with holes. All bit for bit and stride for stride.

Convolutions choose by layout, and round by what they chose, most visibly where the processor has no AVX-512.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_bf16 as masters
import torch
import transformers
from nets import TIGHT, Chain, both, inputs, steps
from safetensors.torch import load_file, save_file
from torch import nn
from twins import Loop, adamw, assert_equal, bits, run

import protrain
from protrain.state import torchfiles


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


def transpose(p: nn.Parameter) -> None:
    """The same values, the first two dimensions exchanged in memory."""
    p.data = p.data.transpose(0, 1).contiguous().transpose(0, 1)


class Transposed(Chain):
    """Weights that lie transposed in every block, one of three dimensions, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            transpose(block.up.weight)
            transpose(block.square.weight)
        self.cube = nn.Parameter(torch.randn(2, 64, 4).permute(2, 0, 1).mul_(0.1))
        self.frozen = nn.Parameter(torch.randn(256, 256).t().mul_(0.01), requires_grad=False)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        x = x + (x.view(-1, 4, 1, 64) * self.cube).sum(2).flatten(1) + x @ self.frozen
        y: torch.Tensor = super().forward(x, **given)
        return y


class Image(nn.Module):
    """0.31 M parameters: convolutions of three and of one, which lies channels last and contiguous alike, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module
        self.wide, self.norm = nn.Conv2d(128, 128, 3, padding=1), nn.BatchNorm2d(128)
        self.deep, self.point = nn.Conv2d(128, 128, 3, padding=1, bias=False), nn.Conv2d(128, 128, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.point(torch.tanh(self.deep(torch.relu(self.norm(self.wide(x))))))
        return y


class Images(Chain):
    """Channels last; inputs lie contiguous, so that the weights decide how outputs lie."""

    block = Image

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(16, 128, 1, bias=False)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, *, skip: Any = (), loss: bool = True) -> torch.Tensor:
        y = self.blocks[0](self.stem(x.view(-1, 16, 4, 4)))
        for block in self.blocks[1:]:
            y = block(y)
        return self.head(y.mean((2, 3)).repeat(1, 2)).square().mean() if loss else y


def fit(batches: list[torch.Tensor], accumulate: int = 1, clip: float | None = None) -> Loop:
    """The ordinary loop; figures are losses, norms, and the strides of parameters and of what the model gives."""

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures: list[Any] = []
        for number, x in enumerate(batches):
            loss = model(x)
            (loss / accumulate).backward()
            figures.append(loss.item())
            if (number + 1) % accumulate:
                continue
            if clip and plain:
                figures.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            if clip and not plain:
                figures.append(float(optimizer.grad_norm))
            optimizer.zero_grad()
        with torch.no_grad():
            out = model(batches[0], loss=False)
        return [*figures, bits(out), out.stride(), [p.stride() for p in model.parameters()]]

    return loop


def rms(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.5, centered=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)


# ---- training ----


@pytest.mark.parametrize(
    ("make", "optimizer", "accumulate", "clip"),
    [(Images, adamw, 1, None), (Transposed, adamw, 2, 0.05), (Images, rms, 2, 0.05), (Transposed, rms, 1, None)],
)
def test_training(make: Callable[[], nn.Module], optimizer: Any, accumulate: int, clip: float | None) -> None:
    options = {"accumulate": accumulate} | ({"max_grad_norm": clip} if clip else {})
    both(make, fit(inputs(3 * accumulate, rows=2), accumulate, clip), optimizer, **options)


def test_all_in_memory() -> None:
    both(Images, fit(inputs(2, rows=2)), sgd, all_in_memory=True, memory=1 << 30)


@pytest.mark.parametrize("mode", ["swap", "checkpoint"])
def test_modes(mode: str) -> None:
    both(Images, fit(inputs(2, rows=4)), memory=2 * TIGHT, block_modes=[mode] * 8)


class WithoutNorm(Images):
    """Batch norm takes no parameters of bf16 beside means of fp32."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.Identity()


@pytest.mark.parametrize("make", [WithoutNorm, Transposed])
def test_bf16(make: Callable[[], nn.Module]) -> None:
    def loop(model: Any, trainer: Any) -> list[Any]:
        figures: list[Any] = []
        for number, x in enumerate(inputs(4)):
            loss = model(x.bfloat16())
            loss.backward()
            figures.append(loss.item())
            if number % 2:
                figures.append(trainer.step(0.05))
                trainer.zero_grad()
        return [*figures, [p.stride() for p in model.parameters()]]

    status = masters.assert_equal(make, loop, memory=TIGHT, accumulate=2, max_grad_norm=0.05)
    assert status.disk_write_bytes > 0


class Tied(Transposed):
    """One strided weight in two blocks, and one used through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[5].up.weight = self.blocks[1].up.weight
        transpose(self.head.weight)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        x = x + torch.tanh(x @ self.head.weight.t()[:, :].view(256, 256)) + self.head.weight[3:11].sum(0) + self.head.weight.T[5]
        y: torch.Tensor = super().forward(x, **given)
        return y


def test_tied_weights_and_views() -> None:
    both(Tied, fit(inputs(3)))


def test_gradients_that_lie_otherwise() -> None:
    """Set by hand, and left in memory or taken: each belongs to the element that it has in its place."""

    def loop(turned: bool) -> Loop:
        def train(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
            for x in inputs(3):
                generator = torch.Generator().manual_seed(int(x[0, 0].abs() * 1000))
                for p in model.parameters():
                    if p.requires_grad:
                        grad = torch.empty_strided(p.shape, p.stride()).copy_(torch.randn(p.shape, generator=generator))
                        p.grad = grad if not turned else grad.contiguous() if not grad.is_contiguous() else _turned(grad)
                optimizer.step()
                optimizer.zero_grad()
            return []

        return train

    assert_equal(run(Transposed, loop(True), memory=TIGHT), run(Transposed, loop(False)), TIGHT)


def _turned(grad: torch.Tensor) -> torch.Tensor:
    return grad.t().contiguous().t() if grad.dim() == 2 else grad.repeat_interleave(2)[::2] if grad.dim() == 1 else grad


# ---- what lies with holes ----


class Holes(Chain):
    """Parameters that are a part of larger memory."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[:4]:
            block.up.weight = nn.Parameter(torch.nn.functional.pad(block.up.weight.detach(), (0, 8))[:, :-8])


class Whole(Holes):
    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.data = p.data.contiguous()


def test_what_lies_with_holes_is_contiguous() -> None:
    loop = fit(inputs(2))
    assert_equal(run(Holes, loop, memory=TIGHT), run(Whole, loop), TIGHT)


# ---- states and checkpoints ----


@pytest.mark.parametrize("optimizer", [adamw, rms])
def test_states_to_and_from_plain_torch(optimizer: Any) -> None:
    """A step here, one there, in both directions, equal two in plain torch; also from states that lie otherwise."""
    batches = inputs(2)

    def first(model: Any, made: Any, plain: bool) -> list[Any]:
        return steps(batches[:1])(model, made, plain)

    def through(wrapped_first: bool, contiguous: bool) -> Loop:
        def loop(model: Any, made: Any, plain: bool) -> list[Any]:
            with torch.random.fork_rng([]):
                other = Transposed()
            other_made = optimizer(other)
            if wrapped_first:
                other, other_made = protrain.wrap(other, other_made, memory=TIGHT)
            figures = first(other, other_made, plain)
            weights, state = other.state_dict(), other_made.state_dict()
            if contiguous:
                weights = {name: value.contiguous() for name, value in weights.items()}
                state = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, state)
            if wrapped_first:
                protrain.unwrap(other)
            model.load_state_dict(weights)
            made.load_state_dict(state)
            return figures + steps(batches[1:])(model, made, plain)

        return loop

    want = run(Transposed, steps(batches), optimizer)
    assert run(Transposed, through(True, False), optimizer) == want
    assert_equal(run(Transposed, through(False, False), optimizer, memory=TIGHT), want, TIGHT)
    if optimizer is adamw:  # plain torch's fused update takes a state as it lies, wherever its elements are
        assert_equal(run(Transposed, through(False, True), optimizer, memory=TIGHT), want, TIGHT)


@pytest.mark.parametrize(("make", "optimizer"), [(Transposed, adamw), (Images, rms)])
def test_checkpoints(make: Callable[[], nn.Module], optimizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint holds elements in their order, as plain tools read them, and training goes on from it bit for bit."""
    monkeypatch.setattr("protrain.state.tensorfiles.SLICE_BYTES", 100 << 10)
    batches = inputs(2)

    def saves(model: Any, made: Any, plain: bool) -> list[Any]:
        figures = steps(batches[:1])(model, made, plain)
        protrain.save(model, made, tmp_path / "saved")
        return figures

    def loads(model: Any, made: Any, plain: bool) -> list[Any]:
        protrain.load(model, made, tmp_path / "saved")
        return steps(batches[1:])(model, made, plain)

    want = run(make, steps(batches), optimizer)
    saved = run(make, saves, optimizer, memory=TIGHT)
    assert saved.figures == want.figures[:1]
    files, strides = load_file(tmp_path / "saved" / "model.safetensors"), {n: v.stride() for n, v in make().state_dict().items()}
    assert {name: repr(strides[name]).encode() + bits(value) for name, value in files.items()} == {
        name: saved.tensors[name] for name in files
    }
    got = run(make, loads, optimizer, memory=1 << 30)
    assert got.figures == want.figures[1:]
    assert got.tensors == want.tensors


def test_states_in_files_of_torch(tmp_path: Path) -> None:
    """As the Trainer keeps an optimizer's state: each tensor lies in the file as it would in plain torch's."""
    model = WithoutNorm()
    _, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    steps(inputs(1))(model, optimizer, False)
    want = optimizer.state_dict()["state"]
    session = protrain.session_of(model)
    entries, get = session.layout.entries, session.values.get

    def later(number: int, array: int) -> torch.Tensor:
        return torchfiles.described(entries[number].shape, entries[number].strides, lambda: get(number, array))

    content = session.states.optimizer(later) | {"turned": want[0]["exp_avg"].transpose(0, 1)}
    torchfiles.save(content, str(tmp_path / "optimizer.pt"))
    protrain.unwrap(model)
    found = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    again = torchfiles.load_optimizer(str(tmp_path / "optimizer.pt"))["state"]
    assert found["turned"].stride() == content["turned"].stride()
    assert torch.equal(found["turned"], content["turned"])
    for number, entry in want.items():
        for name in ("exp_avg", "exp_avg_sq"):
            for got in (found["state"][number][name], again[number][name]):
                assert torch.equal(got, entry[name])
                assert got.stride() == entry[name].stride()


def test_unwrapped_and_copied() -> None:
    model = Images()
    strides, values = [p.stride() for p in model.parameters()], [p.detach().clone() for p in model.parameters()]
    protrain.wrap(model, adamw(model), memory=TIGHT)
    copied = copy.deepcopy(model)
    detached = [p.detach().clone() for p in model.parameters()]
    protrain.unwrap(model)
    for made in (model, copied):
        assert [p.stride() for p in made.parameters()] == strides
        assert all(map(torch.equal, values, made.parameters()))
    assert [p.stride() for p in detached] == strides


# ---- first values ----


def init(module: nn.Module) -> None:
    """What is drawn where depends on how a parameter lies."""
    for p in module.parameters(recurse=False):
        nn.init.normal_(p, float(p.dim() == 1), 0.02)


def init_data(module: nn.Module) -> None:
    """The same by `.data`, which makes matrices lie transposed."""
    init(module)
    for p in module.parameters(recurse=False):
        p.data = p.data.t().contiguous().t() * 2 if p.dim() == 2 else p.data * 2


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """It lies as it would in memory."""
    model = make()
    strides = [p.stride() for p in model.parameters()]
    for module in model.modules():
        for leaf, p in module._parameters.items():
            if p is not None:
                module._parameters[leaf] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
    assert strides == [p.stride() for p in model.parameters()]
    return model


@pytest.mark.parametrize(
    ("make", "fill", "precision"),
    [(WithoutNorm, init, "bf16"), (Transposed, init, "fp32"), (Chain, init_data, "fp32"), (Chain, init_data, "bf16")],
)
def test_initialised_by_a_function(make: Callable[[], nn.Module], fill: Any, precision: str) -> None:
    def drawn() -> nn.Module:
        model = make()
        torch.manual_seed(4)
        for module in model.modules():
            fill(module)
        torch.manual_seed(11)
        return model

    def loop(model: Any, trainer: Any) -> list[Any]:
        for x in inputs(1):
            model(x.to(model.head.weight.dtype)).backward()
            trainer.step()
            trainer.zero_grad()
        return [p.stride() for p in model.parameters()]

    model = on_meta(make)
    options: dict[str, Any] = {"memory": TIGHT, "param_init_fn": fill}
    if precision == "bf16":
        want, _ = masters.run(drawn, loop)
        torch.manual_seed(4)
        trainer = masters.Wrapped(model, adamw, **options)
        torch.manual_seed(11)
        got = masters.seen(model, trainer, loop(model, trainer))
        assert [name for name in want if got[name] != want[name]] == []
        protrain.unwrap(model)
        return
    torch.manual_seed(4)
    _, made = protrain.wrap(model, adamw(model), **options)
    loop(model, made)
    protrain.unwrap(model)
    plain = drawn()
    loop(plain, adamw(plain))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("memory", [TIGHT, 1 << 30])
def test_a_function_that_leaves_parameters_without_values_is_refused(memory: int) -> None:
    def skip(module: nn.Module) -> None:
        if not isinstance(module, nn.LayerNorm):
            module.reset_parameters()  # type: ignore[operator]

    model = on_meta(Chain)
    with pytest.raises(protrain.PlanError, match=r"left blocks\.0\.norm_in\.bias, .* and \d+ more without values"):
        protrain.wrap(model, adamw(model), memory=memory, param_init_fn=skip)
    assert all(p.is_meta for p in model.parameters())
    model, _ = protrain.wrap(model, adamw(model), memory=memory, param_init_fn=lambda module: module.reset_parameters())
    protrain.unwrap(model)


def test_a_function_that_replaces_parameters_is_refused() -> None:
    def replace(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.zeros(module.weight.shape))

    model = on_meta(Chain)
    with pytest.raises(protrain.PlanError, match="param_init_fn replaced the parameter weight of a Linear"):
        protrain.wrap(model, adamw(model), memory=TIGHT, param_init_fn=replace)


@pytest.mark.parametrize("budget", [TIGHT, 1 << 30], ids=["tight", "ample"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_function_that_fails_leaves_the_model_on_meta(precision: str, budget: int) -> None:
    """Its own error is told, and the same model can be wrapped again, with the same numbers."""

    def fill(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.normal_(p)
        calls.append(module)
        if len(calls) == attempts[-1]:
            raise ArithmeticError("of the function itself")

    def attempt(fails: int) -> None:
        calls.clear()
        attempts.append(fails)
        torch.manual_seed(3)
        protrain.wrap(model, adamw(model), memory=budget, precision=precision, param_init_fn=fill)

    calls: list[nn.Module] = []
    attempts: list[int] = []  # the number of the call that fails; 0: none
    model = on_meta(Chain)
    for fails in (1, 7, 30):
        with pytest.raises(ArithmeticError, match="of the function itself") as caught:
            attempt(fails)
        assert not hasattr(caught.value, "__notes__")
        assert {(p.device.type, p.dtype, type(p)) for p in model.parameters()} == {("meta", torch.float32, nn.Parameter)}
    attempt(0)
    protrain.unwrap(model)
    want = Chain()
    torch.manual_seed(3)
    for module in want.modules():
        for p in module.parameters(recurse=False):
            nn.init.normal_(p)
    for ours, theirs in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype))


def test_a_function_that_fails_while_something_refers_to_a_parameter() -> None:
    def fill(module: nn.Module) -> None:
        part = next(module.parameters(recurse=False))[:2]
        raise ArithmeticError(f"with a view of {part.shape}")

    model = on_meta(Chain)
    with pytest.raises(ArithmeticError, match="with a view") as caught:
        protrain.wrap(model, adamw(model), memory=TIGHT, param_init_fn=fill)
    assert "cannot be on meta again: make the model anew" in caught.value.__notes__[0]


@pytest.mark.parametrize("memory", [TIGHT, 1 << 30])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", ["function", "weights"])
def test_parameters_that_were_not_on_meta_are_as_they_were_where_filling_fails(
    how: str, precision: str, memory: int, tmp_path: Path
) -> None:
    """Those of the chunk that was being filled: it has no home yet that holds them."""

    def fill(module: nn.Module) -> None:
        if module is model.blocks[0].down:
            raise ArithmeticError("of the function")

    model = on_meta(Chain)
    model.blocks[0].norm_in, model.blocks[0].up = Chain().blocks[0].norm_in, Chain().blocks[0].up
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.device.type != "meta"}
    options: dict[str, Any] = {"param_init_fn": fill}
    if how == "weights":
        options = {"weights": tmp_path}
        save_file({name: torch.ones_like(value) for name, value in before.items()}, tmp_path / "model.safetensors")
    with pytest.raises((ArithmeticError, ValueError), match=r"of the function|has no tensor blocks\.0\.down\.weight"):
        protrain.wrap(model, adamw(model), memory=memory, precision=precision, **options)
    after = {name: p.detach() for name, p in model.named_parameters() if p.device.type != "meta"}
    assert after.keys() == before.keys()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def test_a_buffer_on_meta_of_a_class_that_takes_more_than_a_config_is_refused_by_name() -> None:
    class Own(transformers.LlamaForCausalLM):
        def __init__(self, config: Any, heads: int) -> None:
            torch.rand(heads)
            super().__init__(config)

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    with torch.device("meta"):
        model = Own(transformers.LlamaConfig(**sizes), 2)
    with pytest.raises(protrain.PlanError, match=r"buffer model\.rotary_emb\.\w+ is on meta and it is not known how to compute"):
        protrain.wrap(model, adamw(model), memory=1 << 28, param_init_fn=lambda _module: None)


def test_data_of_another_shape_from_a_function_is_refused() -> None:
    def fill(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            p.data = torch.ones(3)

    model = on_meta(Chain)
    with pytest.raises(protrain.PlanError, match=r"was given data of shape \(3,\)"):
        protrain.wrap(model, adamw(model), memory=1 << 30, param_init_fn=fill)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_read_from_a_folder(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_model

    monkeypatch.setattr("protrain.state.materialise.SLICE_BYTES", 32 << 10)  # several slices of each tensor
    model = Transposed()
    save_model(model, str(tmp_path / "model.safetensors"))
    values = [p.detach().clone() for p in model.parameters()]
    empty = on_meta(Transposed)
    protrain.wrap(empty, adamw(empty), memory=TIGHT, weights=tmp_path, precision=precision)
    session = protrain.session_of(empty)
    for number, (p, value) in enumerate(zip(empty.parameters(), values, strict=True)):
        assert p.stride() == value.stride()
        assert torch.equal(p, value.to(p.dtype))
        if precision == "bf16" and p.requires_grad:
            assert torch.equal(session.values.get(number, session.wrapped.master_array), value)
    protrain.unwrap(empty)


# ---- other strides, later ----


@pytest.mark.parametrize("memory", [TIGHT, 1 << 30], ids=["disk", "memory"])
def test_a_model_that_becomes_channels_last(memory: int) -> None:
    """After wrap, as one may after the optimizer was made; and back again, where the optimizer keeps nothing for elements."""

    class Later(Images):
        def __init__(self) -> None:
            super().__init__()
            self.to(memory_format=torch.contiguous_format)

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures: list[Any] = []
        for form in (torch.channels_last, torch.contiguous_format, torch.channels_last):
            model.to(memory_format=form)
            figures += fit(inputs(1))(model, optimizer, plain)
        return figures

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    both(Later, loop, make_optimizer, all_in_memory=memory > TIGHT, memory=memory)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("memory", [TIGHT, 1 << 30], ids=["disk", "memory"])
def test_data_that_lies_otherwise(memory: int, precision: str) -> None:
    """A parameter's state goes on with the element that it belongs to, whichever way the parameter lies."""

    def train(turns: bool) -> list[torch.Tensor]:
        model, optimizer = Chain(), None
        model, optimizer = protrain.wrap(model, adamw(model), memory=memory, precision=precision)
        for number, x in enumerate(inputs(4)):
            generator = torch.Generator().manual_seed(number)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                for block in model.blocks:
                    square = block.square.weight
                    if turns:
                        transpose(block.up.weight)
                        square.data = square.data.clone().t()
                    else:
                        square.data = square.data.t().contiguous()
            with torch.no_grad():
                model(x.to(p.dtype))
        found = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
        assert model.blocks[3].up.weight.stride() == ((1, 512) if turns else (256, 1))
        assert model.blocks[3].square.weight.stride() == ((1, 256) if turns else (256, 1))
        protrain.unwrap(model)
        return found + [p.detach() for p in model.parameters()]

    got, want = train(True), train(False)
    assert all(map(torch.equal, got, want))
    assert [a.stride() for a in got] != [a.stride() for a in want]


def test_a_square_view_of_itself() -> None:
    """It begins where it began, and lies otherwise all the same."""

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures = fit(inputs(2))(model, optimizer, plain)
        for block in model.blocks:
            block.square.weight.data = block.square.weight.data.t()
        return figures + fit(inputs(2))(model, optimizer, plain)

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    both(Chain, loop, make_optimizer, all_in_memory=True, memory=1 << 30)


def test_other_strides_in_the_middle_of_a_step_are_refused() -> None:
    model = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, accumulate=2)
    x = inputs(1)[0]
    for _ in range(2):
        model(x).backward()
    weight = model.blocks[7].up.weight
    with pytest.raises(protrain.StepError, match="in the middle of a step"):
        transpose(weight)
    assert weight.stride() == (256, 1)
    optimizer.step()
    optimizer.zero_grad()
    transpose(weight)
    assert weight.stride() == (1, 512)
    protrain.unwrap(model)
    assert weight.stride() == (1, 512)
