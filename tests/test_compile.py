"""Compiled blocks: `block.compile()`, before wrap or after it, gives the bits of plain torch running the same compiled blocks, in
every mode and inside the budget, and compiles as often as there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from nets import TIGHT, Block, Chain, inputs, steps
from standin import StandIn
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import MIB, Loop, adamw, assert_equal, bits, fit, run

import protrain
from protrain.device import compute

MODES = ["keep", "swap", "checkpoint", "checkpoint_swap"]
MIXED = [*MODES, *MODES]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(make: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    """make()'s model, its blocks compiled."""

    def made() -> Any:
        model = make()
        for block in model.blocks:
            block.compile(**(options if "mode" in options else {"backend": "aot_eager", **options}))
        return model

    return made


def frames() -> tuple[int, int]:
    """Frames that dynamo looked at and graphs that it made since it was asked last."""
    counters = torch._dynamo.utils.counters
    found = counters["frames"]["total"], counters["stats"]["unique_graphs"]
    counters.clear()
    torch._dynamo.reset()
    return found


def both(make: Callable[[], Any], loop: Loop, *, away: bool = True, **options: Any) -> protrain.Status:
    """Train in plain torch and wrapped: the same bits, the same number of frames compiled."""
    options = {"memory": TIGHT, **options}
    want = run(make, loop)
    looked_at = frames()
    got = run(make, loop, **options)
    assert frames() == looked_at
    status = assert_equal(got, want, options["memory"])
    assert not away or status.disk_read_bytes > 0
    return status


@pytest.mark.parametrize("mode", [*MODES, "mixed", "planned"])
def test_compiled_blocks(mode: str) -> None:
    modes = {"mixed": MIXED, "planned": None}.get(mode, [mode] * 8)
    both(compiled(Chain), steps(inputs(5)), block_modes=modes)


@pytest.mark.parametrize("mode", ["swap", "checkpoint"])
def test_accumulation_clipping_and_bf16(mode: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, plain: bool) -> list[Any]:
        figures = []
        for number, x in enumerate(inputs(6)):
            loss = model(x)
            (loss / 2).backward()
            figures.append(loss.item())
            if number % 2:
                if plain:
                    figures.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                optimizer.step()
                if not plain:
                    figures.append(optimizer.grad_norm.item())  # type: ignore[attr-defined]
                optimizer.zero_grad()
        return figures

    both(compiled(Chain), loop, accumulate=2, max_grad_norm=0.1, block_modes=[mode] * 8)


class DropoutBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(super().forward(x))


class Dropouts(Chain):
    block = DropoutBlock


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout(backend: str) -> None:
    both(compiled(Dropouts, backend=backend), steps(inputs(4)), block_modes=MIXED)


def test_train_and_eval_in_turns() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(4):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                figures += [loss.item(), model(x).item()]
            figures.append(model(x).item())  # with a graph that nobody uses
            model.train()
        return figures

    both(compiled(Dropouts), loop, block_modes=MIXED)


@pytest.mark.parametrize("mode", ["planned", "checkpoint", "swap"])
def test_other_lengths_compile_as_in_plain_torch(mode: str) -> None:
    batches = [inputs(1, rows, seed)[0] for seed, rows in enumerate([8, 8, 16, 24, 8, 16])]
    both(compiled(Chain), steps(batches), memory=22 * MIB, block_modes=None if mode == "planned" else [mode] * 8)


class Breaks(Block):
    """Compiled in three parts, with an operation on a parameter of its own between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(self.norm_in(x)))
        torch._dynamo.graph_break()
        y = y * self.up.weight.mean()
        torch._dynamo.graph_break()
        z: torch.Tensor = x + self.square(self.down(y))
        return z


class Broken(Chain):
    block = Breaks


@pytest.mark.parametrize("mode", ["mixed", "planned"])
def test_graph_breaks(mode: str) -> None:
    both(compiled(Broken), steps(inputs(4)), block_modes=MIXED if mode == "mixed" else None)


class Twice(Chain):
    """Each block is called twice."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(block(x))
        return self.head(x).square().mean()  # type: ignore[no-any-return]


class Shared(Chain):
    """Blocks with the same matrix."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.square.weight = self.blocks[0].square.weight


class Frozen(Chain):
    def __init__(self) -> None:
        super().__init__()
        for block in list(self.blocks)[:3]:
            block.requires_grad_(False)


class Half(Chain):
    """Every other block is compiled, and parts of others; the head too."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            if number % 2 == 0:
                block.compile(backend="aot_eager")
            if number % 2 or number == 4:
                block.up.compile(backend="aot_eager")
        self.head.compile(backend="aot_eager")


@pytest.mark.parametrize("mode", ["mixed", "planned"])
@pytest.mark.parametrize("make", [compiled(Twice), compiled(Shared), compiled(Frozen), Half])
def test_other_models(make: Callable[[], Any], mode: str) -> None:
    both(make, steps(inputs(4)), memory=22 * MIB, block_modes=MIXED if mode == "mixed" else None)


class Wide(nn.Module):
    """2.1 M parameters in four matrices, of 2 MiB each: a block of several chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(256, 2048, bias=False), nn.Linear(2048, 256, bias=False)] * 1)
        self.more = nn.ModuleList([nn.Linear(256, 2048), nn.Linear(2048, 256)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in (self.parts, self.more):
            x = x + down(torch.tanh(up(x)))
        return x


class Wides(Chain):
    block = Wide


class ByValue(Wides):
    """Looks at values, so that there is no dry run."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        if x.sum().item() > 1e9:
            raise AssertionError
        return super().forward(x)


@pytest.mark.parametrize("mode", ["mixed", "planned"])
@pytest.mark.parametrize("make", [Wides, ByValue])
def test_blocks_of_several_chunks(make: Callable[[], Any], mode: str) -> None:
    status = both(compiled(make), steps(inputs(5)), memory=80 * MIB, block_modes=MIXED if mode == "mixed" else None)
    assert status.plan.n_chunks > 16
    assert status.plan.n_persist < status.plan.n_chunks


def test_compiled_after_wrap() -> None:
    """As compiled before the first step; steps made before that are those of plain torch too."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, plain: bool) -> list[Any]:
        figures = steps(inputs(3))(model, optimizer, plain)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        model.head.compile(backend="aot_eager")
        return figures + steps(inputs(3, seed=2))(model, optimizer, plain)

    both(Chain, loop, block_modes=MIXED)
    both(Wides, loop, memory=80 * MIB)


def test_compile_after_wrap_is_refused_where_it_would_be_before() -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    for target in (model, model.blocks):
        with pytest.raises(protrain.PlanError, match=r"block\.compile"):
            target.compile(backend="aot_eager")
    with pytest.raises(protrain.PlanError, match=r"block\.compile"):
        torch.compile(model, backend="aot_eager")(inputs(1)[0])
    with pytest.raises(protrain.PlanError, match=r"block\.compile"):
        torch.compile(model.blocks[0], backend="aot_eager")(inputs(1)[0])
    loss = model(inputs(1)[0])
    loss.backward()
    with pytest.raises(protrain.StepError, match="compile"):
        model.blocks[0].compile(backend="aot_eager")
    optimizer.step()
    optimizer.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    protrain.unwrap(model)


def _with_compiled(part: str) -> Any:
    model: Any = Chain()
    if part == "model":
        model.compile(backend="aot_eager")
    elif part == "blocks":
        model.blocks.compile(backend="aot_eager")
    elif part == "a block, by torch.compile":
        model.blocks[3] = torch.compile(model.blocks[3], backend="aot_eager")
    elif part == "the model, by torch.compile":
        model = torch.compile(model, backend="aot_eager")
    elif part == "a forward":
        model.blocks[3].forward = torch.compile(model.blocks[3].forward, backend="aot_eager")
    else:
        model.blocks[3].compile(backend="aot_eager")
        model.blocks[3].up.compile(backend="aot_eager")
        model.extra = model.blocks[3].up
    return model


@pytest.mark.parametrize(
    "part", ["model", "blocks", "a block, by torch.compile", "the model, by torch.compile", "a forward", "shared"]
)
def test_what_cannot_be_is_refused(part: str) -> None:
    model = _with_compiled(part)
    before = list(model.parameters())
    with pytest.raises(protrain.PlanError, match="compile"):
        protrain.wrap(model, adamw(model), memory=TIGHT)
    with pytest.raises(protrain.PlanError, match="compile"):
        protrain.plan(model, inputs(1)[0], memory=TIGHT)
    assert all(type(p) is nn.Parameter for p in before)


def test_copies_checkpoints_and_unwrap(fresh_disk: Path) -> None:
    make = compiled(Chain)
    model: Any = make()
    other: Any = make()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    steps(inputs(2))(model, optimizer, False)
    twin = copy.deepcopy(model)
    assert all(block._compiled_call_impl is None for block in twin.blocks)  # as torch copies
    with torch.no_grad():
        assert twin(inputs(1)[0]).item() == model(inputs(1)[0]).item()
    protrain.save(model, optimizer, fresh_disk / "saved")
    want = {name: bits(value) for name, value in model.state_dict().items()}

    other, again = protrain.wrap(other, adamw(other), memory=22 * MIB)
    protrain.load(other, again, fresh_disk / "saved")
    assert {name: bits(value) for name, value in other.state_dict().items()} == want
    protrain.unwrap(other)

    frames()
    protrain.unwrap(model)
    assert {name: bits(value) for name, value in model.state_dict().items()} == want
    model(inputs(1)[0]).backward()
    assert frames()[1] > 0  # what was compiled still is
    assert all(p.grad is not None and type(p) is nn.Parameter for p in model.parameters())


class Mistakes(Block):
    """Raises where it is told to."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        if self.fails:
            raise KeyError("asked for")
        return y * 2


class Mistaken(Chain):
    block = Mistakes


@pytest.mark.parametrize("mode", ["mixed", "planned"])
def test_exceptions_leave_the_last_step(mode: str) -> None:
    """In forward, and in a recomputation."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, plain: bool) -> list[Any]:
        figures = steps(inputs(2))(model, optimizer, plain)
        model.blocks[6].fails = True
        with pytest.raises(KeyError):
            model(inputs(1)[0])
        model.blocks[6].fails = False
        if not plain:
            classes = [type(p).__name__ for p in model.parameters()]
            assert "ChunkParameter" in classes[:-4]
        optimizer.zero_grad()
        return figures + steps(inputs(2, seed=2))(model, optimizer, plain)

    both(compiled(Mistaken), loop, block_modes=MIXED if mode == "mixed" else None)


def test_shapes_in_flight_that_compile_anew_are_told() -> None:
    """A recomputation that runs other code than its forward is an error, never other numbers."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        figures = []
        for _ in range(2):
            losses = [model(x) for x in (inputs(1, 8)[0], inputs(1, 16)[0], inputs(1, 24)[0])]
            loss = sum(losses)
            loss.backward()  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())  # type: ignore[attr-defined]
        return figures

    for mode in ("keep", "swap"):
        both(compiled(Chain), loop, away=False, memory=96 * MIB, block_modes=[mode] * 8)
    both(compiled(Chain, dynamic=True), loop, away=False, memory=96 * MIB, block_modes=["checkpoint"] * 8)
    with pytest.raises(RuntimeError, match="other compiled code"):
        run(compiled(Chain), loop, memory=96 * MIB, block_modes=["checkpoint"] * 8)


class Outside(Chain):
    """A compiled function that reads parameters which it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.read = torch.compile(lambda x, w, b: torch.tanh(F.linear(x, w, b)) @ w, backend="aot_eager")

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x + self.read(x, block.up.weight, block.up.bias)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["mixed", "planned"])
@pytest.mark.parametrize("make", [Outside, compiled(Outside)])
def test_compiled_functions_of_parameters(make: Callable[[], Any], mode: str) -> None:
    """Their graphs end at each parameter on disk."""
    options: dict[str, Any] = {"memory": TIGHT, "block_modes": MIXED if mode == "mixed" else None}
    want = run(make, steps(inputs(4)))
    torch._dynamo.reset()
    assert_equal(run(make, steps(inputs(4)), **options), want, TIGHT)


class Attribute(torch.autograd.Function):
    """Keeps the matrix as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.w = w
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] @ ctx.w.t(), x.flatten(0, -2).t() @ grads[0].flatten(0, -2)


class AttributeBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(Attribute.apply(x, self.square.weight))  # type: ignore[no-untyped-call]
        return y


class Attributes(Chain):
    block = AttributeBlock


def test_parameters_that_hooks_do_not_see_are_refused() -> None:
    with pytest.raises(protrain.PlanError, match="save_for_backward"):
        run(compiled(Attributes), steps(inputs(3)), memory=TIGHT)


class Normed(Block):
    """Running means, and an input that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.batch_norm(super().forward(x))
        return y


class Norms(Chain):
    block = Normed


class InPlaceBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return super().forward(x)


class InPlaces(Chain):
    block = InPlaceBlock

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["mixed", "planned"])
@pytest.mark.parametrize("make", [compiled(Norms), compiled(InPlaces)])
def test_what_a_forward_changes(make: Callable[[], Any], mode: str) -> None:
    both(make, steps(inputs(4)), memory=24 * MIB, block_modes=MIXED if mode == "mixed" else None)


def test_an_optimizer_without_a_kernel() -> None:
    def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters(), lr=1e-4)

    want = run(compiled(Chain), steps(inputs(3)), rmsprop)
    assert_equal(run(compiled(Chain), steps(inputs(3)), rmsprop, memory=24 * MIB, block_modes=MIXED), want, 24 * MIB)


def test_gradients_that_are_one_tensor() -> None:
    """Two biases have the same gradient."""

    class Biases(Block):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.zeros(256)), nn.Parameter(torch.zeros(256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x) + self.one + self.other
            return y

    class Biased(Chain):
        block = Biases

    both(compiled(Biased), steps(inputs(4)), block_modes=MIXED)


def test_forward_hooks_of_a_block() -> None:
    def hooked() -> Any:
        model = Chain()
        for block in model.blocks:
            block.register_forward_hook(lambda _module, _args, output: output * 1.5)
            block.register_forward_pre_hook(lambda _module, args: (args[0] * 0.5,))
        return model

    both(compiled(hooked), steps(inputs(4)), block_modes=MIXED)


class Inner(Block):
    """A part of it is recomputed by torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + checkpoint(super().forward, x, use_reentrant=False)
        return y


class Inners(Chain):
    block = Inner


def test_whole_graphs_and_torchs_own_recomputation() -> None:
    both(compiled(Chain, fullgraph=True), steps(inputs(3)), block_modes=MIXED)
    both(compiled(Inners, fullgraph=True), steps(inputs(3)), block_modes=MIXED)


def test_two_backwards_of_one_graph() -> None:
    """As plain torch allows it: without donated buffers."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(3):
            loss = model(x)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    with torch._functorch.config.patch(donated_buffer=False):
        both(compiled(Chain), loop, accumulate=2, memory=32 * MIB, block_modes=MIXED)


class Viewed(Chain):
    """Blocks are given views of what came before."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block((x * 1.0).view(-1, 256))
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def test_inputs_that_are_views() -> None:
    """What dynamo compiled for any length depends on it."""
    batches = [inputs(1, rows, seed)[0] for seed, rows in enumerate([64, 96, 128, 64])]
    for mode in ("checkpoint", "checkpoint_swap"):
        both(compiled(Viewed), steps(batches), memory=24 * MIB, block_modes=[mode] * 8)


class Returns(Block):
    """Gives a view of a parameter beside its output."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.norm_in.weight.view(1, 256)


class Returned(Chain):
    block = Returns

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        seen = []
        for block in self.blocks:
            x, w = block(x)
            seen.append(w)
        return (self.head(x) * sum(seen)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["keep", "planned"])
def test_views_of_parameters_that_a_block_returns(mode: str) -> None:
    both(compiled(Returned), steps(inputs(4)), block_modes=["keep"] * 8 if mode == "keep" else None)


def test_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    both(compiled(Dropouts, backend="inductor"), steps(inputs(4)), block_modes=MIXED)


class Attending(Chain):
    """Blocks that save three parts of one buffer."""

    class block(nn.Module):  # noqa: N801
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(256, 768), nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.inner(x).view(1, -1, 3, 4, 64).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*parts, is_causal=True)
            out: torch.Tensor = x + self.outer(y.transpose(1, 2).flatten(0, 1).flatten(1))
            return out


def test_parts_of_a_buffer_of_inductors_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    batch, make = inputs(1, 512)[0], compiled(Attending, backend="inductor")
    both(make, steps([batch] * 3), memory=80 * MIB, block_modes=["swap"] * 8, away=False)
    model: Any = make()
    own = {p.data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # which keeps their addresses apart

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    x = batch
    for block in model.blocks:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            x = block(x.detach().requires_grad_())
    model, _ = protrain.wrap(model, adamw(model), memory=80 * MIB, block_modes=["swap"] * 8)
    model(batch).backward()
    put_bytes = protrain.session_of(model).engine.stats()["stash_put_bytes"]
    protrain.unwrap(model)
    saved_bytes = sum(storage.nbytes() for storage in saved.values())
    assert 0.9 * saved_bytes <= put_bytes <= saved_bytes


def test_frozen_parameters_are_refused() -> None:
    """Inductor would keep the values of one moment as constants."""
    model: Any = compiled(Chain, backend="inductor", options={"freezing": True})()
    with pytest.raises(protrain.PlanError, match="freezing"):
        protrain.wrap(model, adamw(model), memory=TIGHT)
    model = compiled(Chain)()
    model, _ = protrain.wrap(model, adamw(model), memory=TIGHT)
    with torch._inductor.config.patch(freezing=True), torch.no_grad(), pytest.raises(protrain.PlanError, match="freezing"):
        model(inputs(1)[0])
    protrain.unwrap(model)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers(kind: str, causal_lm: Any, token_batches: Any) -> None:
    def make() -> Any:
        model = causal_lm(kind, hidden=128, layers=4)
        layers = model.transformer.h if kind == "gpt2" else model.model.layers
        for layer in layers:
            layer.compile(backend="aot_eager")
        return model

    for modes in (MODES, None):
        both(make, fit(token_batches(4, 2, 64)), away=False, memory=48 * MIB, block_modes=modes)


@pytest.mark.parametrize("modes", [MIXED, None])
def test_over_a_device(modes: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "stand_in", StandIn())
    both(compiled(Dropouts), steps(inputs(4)), host_memory=24 * MIB, block_modes=modes)
    model: Any = compiled(Chain, mode="reduce-overhead")()
    with pytest.raises(protrain.PlanError, match="CUDA graphs"):
        protrain.wrap(model, adamw(model), memory=TIGHT, host_memory=24 * MIB)


def test_bf16() -> None:
    """As the same model of bf16 parameters, compiled: forward of the first batch."""
    model: Any = compiled(Chain)()
    plain = compiled(lambda: Chain().bfloat16())()
    x = inputs(1)[0].bfloat16()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, precision="bf16", block_modes=MIXED)
    want = plain(x)
    got = model(x)
    assert got.item() == want.item()
    got.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.isfinite(model(x)).item()
    protrain.unwrap(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plans_of_compiled_blocks(precision: str) -> None:
    """A block of several chunks has a slot for each of them."""
    batches = [x.to(torch.bfloat16 if precision == "bf16" else torch.float32) for x in inputs(3)]
    options: dict[str, Any] = {"memory": 80 * MIB, "precision": precision, "block_modes": MIXED}
    model: Any = compiled(Wides)()
    plan = protrain.plan(model, batches[0], **options)
    model, optimizer = protrain.wrap(model, adamw(model), plan=plan, **options)
    steps(batches)(model, optimizer, False)
    status = protrain.status(model)
    assert status.plan.n_buffer == plan.n_buffer > 2
    assert status.peak_memory_bytes <= 80 * MIB
    protrain.unwrap(model)
