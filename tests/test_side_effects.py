"""Blocks whose forward changes more than its output: recomputed, they see what their forward saw, and change nothing twice."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nets import TIGHT, Block, Chain, inputs, steps
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import BaseModelOutput
from twins import adamw, assert_equal, run

import protrain
from protrain.api import session_of
from protrain.model import modulestate, strides

AMPLE = 1 << 30


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


class Counts(Block):
    """In a list, a dict and a set that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.named: dict[str, int] = {}
        self.known: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(self.seen))
        self.named["calls"] = self.named.get("calls", 0) + 1
        self.known.add(len(self.known))
        return super().forward(x) * (1 + 0.1 * (len(self.seen) + self.named["calls"] + len(self.known)))


class Averages(Block):
    """In tensors that are no buffers: one is replaced, one changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.calls = torch.zeros(256), torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls.add_(1)
        return super().forward(x - self.mean) * self.calls


class Makes(Block):
    """What it goes on from in its first forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.scale, self.made = 2.0, torch.full((256,), 0.5)
            return super().forward(x)
        return super().forward(x * self.made) * self.scale


class Draws(Block):
    """From Python's numbers, NumPy's and those of a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(5)
        self.pythons, self.numpys, self.numpys_old = random.Random(5), np.random.default_rng(5), np.random.RandomState(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=self.own)
        scale = random.random() + float(np.random.random())
        scale += self.pythons.random() + float(self.numpys.random()) + float(self.numpys_old.random_sample())
        return super().forward(x + 0.1 * noise) * scale


class DrawsFromOthers(Block):
    """From a generator that it is given, and from one that the model has."""

    def forward(self, x: torch.Tensor, given: torch.Generator) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + torch.randn(x.shape, generator=given)) * float(self.models[0].random())


class Shared(Chain):
    """Generators, among all blocks."""

    block = DrawsFromOthers

    def __init__(self) -> None:
        super().__init__()
        self.given, self.numpys = torch.Generator().manual_seed(5), np.random.default_rng(5)
        for block in self.blocks:
            block.models = (self.numpys,)

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = block(x, self.given)
        y: torch.Tensor = self.head(x)
        return y.square().mean()


class Remembers(Block):
    """What it made last, in a tuple, in a buffer that was none, and as a tensor with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.last: tuple[torch.Tensor, ...] = ()
        self.register_buffer("mean", None)
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x + 0.1 * self.last[0].mean(0) + self.mean + 0.1 * self.seen.detach() if self.last else x)
        self.last, self.mean, self.seen = (y.detach(),), y.detach().mean(0), y
        return y


class CountsDeeper(Block):
    """In containers of other kinds, and in containers that are in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = collections.deque([1.0], maxlen=3)
        self.counts, self.sums = collections.Counter(n=1), collections.defaultdict[str, float](float, n=1.0)
        self.ordered, self.inner = collections.OrderedDict(n=1.0), {"list": [1.0], "dict": {"n": 1.0}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps: Any = self.inner
        scale = sum(self.ring) + self.counts["n"] + self.sums["n"] + self.ordered["n"] + sum(steps["list"]) + steps["dict"]["n"]
        self.ring.append(0.5)
        steps["list"].append(0.5)
        for counts in (self.counts, self.sums, self.ordered, steps["dict"]):
            counts["n"] += 1
        return super().forward(x) * (0.1 * scale)


class Sparse(Block):
    """It has a buffer that is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.eye(256).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.sparse.mm(self.mask, x.t()).t())


class Conditioned(Block):
    """By what others put there."""

    def __init__(self) -> None:
        super().__init__()
        self.shift: Any = None
        self.register_buffer("scale", torch.ones(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale if self.shift is None else x * self.scale + self.shift)


class Auxiliary(Block):
    """It leaves what it computed within for a loss of its own."""

    aux: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = super().forward(x)
        return torch.tanh(self.aux)


class Takes(Block):
    """Its input out of a dict, into which its output goes."""

    def forward(self, given: Any) -> None:  # type: ignore[override]
        given["x"] = super().forward(given["x"])


class Passes(Chain):
    """A dict through all blocks."""

    block = Takes

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        given = {"x": x}
        for block in self.blocks:
            block(given)
        y: torch.Tensor = self.head(given["x"])
        return y.square().mean()


Pair = collections.namedtuple("Pair", ["x", "none"])


class Writes(Block):
    """To what it is given in a container of `kind`; puts what it makes into another one."""

    kind: Callable[[torch.Tensor], Any]

    def forward(self, given: Any) -> Any:
        (x, *_) = given.values() if isinstance(given, dict) else given
        x.mul_(1.01)
        return type(self).kind(super().forward(x))


def passes(kind: Callable[[torch.Tensor], Any]) -> type[Chain]:
    class Containers(Chain):
        block = type("WritesTo", (Writes,), {"kind": staticmethod(kind)})

        def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
            given = kind(x * 1)
            for block in self.blocks:
                given = block(given)
            (x, *_) = given.values() if isinstance(given, dict) else given
            y: torch.Tensor = self.head(x)
            return y.square().mean()

    return Containers


CONTAINERS = {
    "OrderedDict": lambda x: collections.OrderedDict(x=x),
    "defaultdict": lambda x: collections.defaultdict(list, x=x),
    "deque": lambda x: collections.deque([x]),
    "namedtuple": lambda x: Pair(x, None),
    "output of a model": lambda x: BaseModelOutput(last_hidden_state=x),
}


class Skips(Block):
    """Half of them leave what they were given in a list, the others take it out."""

    puts = True

    def forward(self, x: torch.Tensor, left: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        if self.puts:
            left.append(x)
            return super().forward(x)
        return super().forward(x + left.pop())


class HandsOn(Block):
    """A state in an object: a tensor and numbers that it sets, a list that it adds to, a tensor that it counts in."""

    def forward(self, state: Any) -> Any:
        state.depth += 1
        state.seen.append(state.depth)
        state.counts.add_(0)
        state.x = super().forward(state.x) * (1 + 0.1 * state.depth + 0.01 * sum(state.seen) / len(state.seen))
        return state


@dataclasses.dataclass
class State:
    x: torch.Tensor
    depth: int = 0
    seen: list[int] = dataclasses.field(default_factory=list)
    counts: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(2))


class InObject(Chain):
    """Blocks are given one object, and hand it on."""

    block = HandsOn
    kind: Callable[..., Any] = State

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        state = type(self).kind(x=x + 0 * self.head.bias, depth=0, seen=[], counts=torch.zeros(2))
        for block in self.blocks:
            state = block(state)
        y: torch.Tensor = self.head(state.x)
        return y.square().mean()


class InNamespace(InObject):
    kind = SimpleNamespace


@dataclasses.dataclass(slots=True)
class InSlots:
    x: torch.Tensor
    depth: int
    seen: list[int]
    counts: torch.Tensor


class InObjectWithSlots(InObject):
    kind = InSlots


class FirstSeen(Block):
    """Given a set that it adds to."""

    def forward(self, x: torch.Tensor, seen: set[int]) -> torch.Tensor:  # type: ignore[override]
        new = id(self) not in seen
        seen.add(id(self))
        return super().forward(x if new else 0.5 * x)


class Anneals(Block):
    """By a number of NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = np.float64(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature = self.temperature * 0.9
        return super().forward(x * float(self.temperature))


class RegistersOnce(Block):
    """A buffer, where it had none, and hooks on a parameter and behind its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[Any] = []
        self.behind = 0

    def _count(self, _parameter: torch.Tensor) -> None:
        self.behind += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.handles:
            self.handles.append(self.up.weight.register_hook(lambda gradient: gradient * 0.5))
            self.handles.append(self.down.weight.register_post_accumulate_grad_hook(self._count))
        x = x * (1 + 0.1 * self.behind)
        if "before" not in self._buffers:
            self.register_buffer("before", x.detach().mean(0), persistent=False)
            return super().forward(x)
        return super().forward(x + self.before)


class ForcesCounted(Block):
    """Asks for a gradient in its forward, behind a buffer that it has changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(torch.tanh(self.up(y)).square().sum(), y, create_graph=True)
        return super().forward(x) + 0.1 * force * self.calls


class InContainer(Chain):
    """Blocks are given one container of `kind`, beside what the one before has made."""

    kind: Callable[[], Any]

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        given = type(self).kind()
        for block in self.blocks:
            x = block(x, given)
        y: torch.Tensor = self.head(x)
        return y.square().mean()


class Net(InContainer):
    """A U-Net."""

    block, kind = Skips, list

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[4:]:
            block.puts = False


class InSet(InContainer):
    block, kind = FirstSeen, set


def chain_of(kind: type[Block]) -> Callable[[], Chain]:
    return type(f"ChainOf{kind.__name__}", (Chain,), {"block": kind})


def seeded(loop: Any) -> Any:
    def begun(*args: Any) -> Any:
        random.seed(3)
        np.random.seed(3)
        found = loop(*args)
        return [*found, random.random(), float(np.random.random())]

    return begun


MODELS = {
    "containers": chain_of(Counts),
    "tensors": chain_of(Averages),
    "made in forward": chain_of(Makes),
    "random numbers": chain_of(Draws),
    "generators that blocks share": Shared,
    "what it made last": chain_of(Remembers),
    "more containers": chain_of(CountsDeeper),
    "a dict that it is given": Passes,
    "a list that it is given": Net,
    "an object that it is given": InObject,
    "a namespace that it is given": InNamespace,
    "an object with slots that it is given": InObjectWithSlots,
    "a set that it is given": InSet,
    "a number of NumPy's": chain_of(Anneals),
    "what it registers once": chain_of(RegistersOnce),
    "a gradient that it asks for": chain_of(ForcesCounted),
}


@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap", "swap"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_a_recomputed_block_sees_what_its_forward_saw(make: Callable[[], nn.Module], mode: str) -> None:
    loop = seeded(steps(inputs(4)))
    assert_equal(run(make, loop, memory=2 * TIGHT, block_modes=[mode] * 8), run(make, loop), 2 * TIGHT)


class Adapted(Block):
    """One of two modules, and of two functions, adapts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(256, 256), nn.Linear(256, 256)
        self.choose(0)

    def choose(self, number: int) -> None:
        self.active = (self.one, self.other)[number]
        self.function = (nn.functional.silu, nn.functional.softsign)[number]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.function(self.active(x)))


@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap", "swap"])
def test_a_module_that_was_exchanged_since_is_there_in_the_recomputation(mode: str) -> None:
    def two(model: Any, optimizer: Any, _plain: bool) -> list[float]:
        losses = []
        for x in inputs(3):
            for block in model.blocks:
                block.choose(0)
            first = model(x)
            for block in model.blocks:
                block.choose(1)
            loss = first + model(2 * x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    make = chain_of(Adapted)
    assert_equal(run(make, two, memory=AMPLE, block_modes=[mode] * 8), run(make, two), AMPLE)


class Whitens(Block):
    """By statistics which the kernel writes past their version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.zeros(256))
        self.register_buffer("spread", torch.ones(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.batch_norm(x, self.middle, self.spread, training=self.training))


def test_statistics_that_a_later_forward_changes_are_an_error_in_the_recomputation() -> None:
    model: Any = chain_of(Whitens)()
    model, optimizer = protrain.wrap(model, adamw(model), memory=AMPLE, block_modes=["checkpoint"] * 8)
    try:
        steps(inputs(1))(model, optimizer, False)
        model.eval()
        loss = model(inputs(1)[0])
        model.train()
        loss = loss + model(3 * inputs(1)[0])
        with pytest.raises(RuntimeError, match="recomputed, and its tensor middle was changed after its forward began"):
            loss.backward()
    finally:
        protrain.unwrap(model)


class FailsBehindAChange(Block):
    """Behind a change of its input, which is in the graph of the blocks before."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(x)
        if self.fails:
            raise MemoryError
        return super().forward(x)


class FromAResult(Chain):
    """What the first block is given is in a graph, and may be changed in place."""

    block = FailsBehindAChange

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * self.head.bias.add(1))


@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
def test_a_forward_that_fails_behind_a_change_of_its_input_leaves_no_graph(mode: str) -> None:
    model: Any = FromAResult()
    model, optimizer = protrain.wrap(model, adamw(model), memory=AMPLE, block_modes=[mode] * 8)
    steps(inputs(1))(model, optimizer, False)
    held = []
    for _ in range(3):
        model.blocks[7].fails = True
        with pytest.raises(MemoryError):
            model(inputs(1)[0])
        model.blocks[7].fails = False
        optimizer.zero_grad()
        gc.collect()
        held.append(session_of(model).engine.held()["live_bytes"])
    assert held[0] == held[2]
    protrain.unwrap(model)


def test_an_object_whose_tensor_is_changed_in_place_is_an_error_once_and_then_exact() -> None:
    """Its tensor that is differentiated through; every block writes to it, and a copy is kept from then on."""

    def forward(self: Block, state: State) -> State:
        y = Block.forward(self, state.x.sigmoid())
        state.x += y
        return state

    block = type("Adds", (Block,), {"forward": forward})
    make = type("Adding", (InObject,), {"block": block})

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        if not plain:
            with pytest.raises(RuntimeError, match=r"changed its tensor State\.x"):
                model(inputs(1)[0]).backward()
            optimizer.zero_grad()
        return steps(inputs(3))(model, optimizer, plain)

    assert_equal(run(make, loop, memory=1 << 30, block_modes=["checkpoint"] * 8), run(make, loop), 1 << 30)


@pytest.mark.parametrize("memory", ["1GiB", TIGHT])
@pytest.mark.parametrize("make", [chain_of(Draws), Passes, Net, InObject], ids=["a generator", "a dict", "a list", "an object"])
def test_what_a_block_changes_keeps_no_model_from_being_foreseen(make: Callable[[], nn.Module], memory: Any) -> None:
    plan = protrain.plan(make(), inputs(1)[0], memory=memory)
    assert (plan.n_persist == plan.n_chunks and set(plan.block_modes) == {"keep"}) == (memory == "1GiB")


@pytest.mark.parametrize("mode", ["checkpoint", "keep"])
def test_what_was_trained_in_forward_is_trained_in_backward(mode: str) -> None:
    """As loops of two models switch it, between forward and backward."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(3):
            for block in model.blocks[::2]:
                block.square.requires_grad_(False)
            loss = model(x)
            for block in model.blocks[::2]:
                block.square.requires_grad_(True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    assert_equal(run(Chain, loop, memory=2 * TIGHT, block_modes=[mode] * 8), run(Chain, loop), 2 * TIGHT)


@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("kind", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_tensors_in_containers_may_be_changed_in_place(kind: Callable[[torch.Tensor], Any], mode: str) -> None:
    make, loop = passes(kind), steps(inputs(2))
    assert_equal(run(make, loop, memory=1 << 30, block_modes=[mode] * 8), run(make, loop), 1 << 30)


class Attends(Block):
    """With a scale that the default dtype says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = super().forward(x * torch.zeros(()).element_size()).view(1, 4, -1, 64)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(x.shape)
        return x + torch.tanh(y)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AROUND = {
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "default dtype": lambda: default_dtype(torch.float64),
    "mode": Doubles,
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
def test_what_stands_around_forward_alone_stands_around_the_recomputation(around: Any) -> None:
    """And no longer than that."""

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        with around():
            loss: torch.Tensor = model(x)
        return loss

    make, loop = chain_of(Attends), steps(inputs(2), loss_of)
    assert_equal(run(make, loop, memory=1 << 30, block_modes=["checkpoint"] * 8), run(make, loop), 1 << 30)
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")
class FailsOnce(Counts):
    """Behind what it changes, when it is told to."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.fails:
            type(self).fails = False
            raise MemoryError
        return torch.tanh(y)


class FailsAndWrites(FailsOnce):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x * self.calls)


def after_a_failure(kind: type[FailsOnce], fails: bool) -> list[torch.Tensor]:
    model: Any = chain_of(kind)()
    model, optimizer = protrain.wrap(model, adamw(model), memory="64MiB", block_modes=["checkpoint"] * 8)
    loss = model(inputs(1)[0])
    if fails:
        kind.fails = True
        with pytest.raises(MemoryError):
            loss.backward(retain_graph=True)
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return [p.detach() for p in protrain.unwrap(model).parameters()]


def test_a_recomputation_after_one_that_failed_sees_what_forward_saw() -> None:
    for one, other in zip(after_a_failure(FailsOnce, False), after_a_failure(FailsOnce, True), strict=True):
        assert torch.equal(one, other)


def test_a_recomputation_after_one_that_failed_is_an_error_where_the_copy_is_spent() -> None:
    with pytest.raises(RuntimeError, match=r"changes its tensor calls in forward, and its recomputation failed before"):
        after_a_failure(FailsAndWrites, True)


def test_a_recomputed_block_may_have_a_sparse_buffer() -> None:
    make, loop = chain_of(Sparse), steps(inputs(2))
    assert_equal(run(make, loop, memory=1 << 30, block_modes=["checkpoint"] * 8), run(make, loop), 1 << 30)


@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
def test_tensors_too_large_to_be_copied_are_kept_where_forward_puts_others_there(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modulestate, "COPIED_BYTES", 0)
    make, loop = chain_of(Remembers), steps(inputs(3))
    assert_equal(run(make, loop, memory=1 << 30, block_modes=[mode] * 8), run(make, loop), 1 << 30)


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_large_tensors_that_forward_writes_to_are_copied_from_then_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time it is an error."""

    class Writes(Block):
        def __init__(self) -> None:
            super().__init__()
            calls = torch.zeros(1)
            if kind == "buffer":
                self.register_buffer("calls", calls)
            else:
                self.calls = calls

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return super().forward(x) * self.calls

    def loop(model: Any, optimizer: torch.optim.Optimizer, plain: bool) -> list[Any]:
        if not plain:
            with pytest.raises(RuntimeError, match="changed its tensor calls in forward for the first time"):
                model(inputs(1)[0]).backward()
            optimizer.zero_grad()
        for block in model.blocks:
            block.calls.zero_()
        return steps(inputs(3))(model, optimizer, plain)

    monkeypatch.setattr(modulestate, "COPIED_BYTES", 0)
    make = chain_of(Writes)
    assert_equal(run(make, loop, memory=1 << 30, block_modes=["checkpoint"] * 8), run(make, loop), 1 << 30)


@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("key", ["shift", "scale"])
def test_what_others_set_for_a_forward_is_there_in_its_recomputation(key: str, mode: str) -> None:
    """Two forwards with another condition each; and one that is computed, and taken away at the forward's end."""

    def put(model: Any, value: Any) -> None:
        for block in model.blocks:
            setattr(block, key, value)

    def loop(model: Any, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(3):
            put(model, x[0])
            first = model(x)
            put(model, x[1])
            second = model(2 * x)
            put(model, model.head.bias * x[2])
            third = model(x)
            put(model, None if key == "shift" else torch.ones(256))
            loss = first + second + third
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        put(model, torch.ones(256))
        return figures

    make = chain_of(Conditioned)
    options = {"memory": 1 << 30, "block_modes": [mode] * 8}
    assert_equal(run(make, loop, **options), run(make, loop), 1 << 30)


class Leaves(Block):
    """What it computes last, in a buffer and in an object, which hold its graph. in_place: changes what it is given."""

    fails = in_place = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", None)
        self.held = SimpleNamespace(last=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(x) if self.in_place else x
        if self.fails:
            raise MemoryError
        y = super().forward(x)
        self.last, self.held.last = y.mean(0), y
        return y


class Leaving(FromAResult):
    block = Leaves


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")
@pytest.mark.parametrize("kind", ["dropped", "forward fails", "settling fails"])
def test_nothing_stays_of_forwards_that_are_dropped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Leaves, "in_place", kind != "dropped")
    model: Any = Leaving()
    wrapped, optimizer = protrain.wrap(model, adamw(model), memory=1 << 30, block_modes=["checkpoint"] * 8)
    x = inputs(1, rows=512)[0]
    try:
        if kind == "dropped":
            steps([x])(wrapped, optimizer, False)
        if kind == "settling fails":
            monkeypatch.setattr(modulestate.ModuleState, "settle", fail)
        model.blocks[7].fails = kind == "forward fails"
        live = []
        for _ in range(3):
            with contextlib.suppress(MemoryError):
                wrapped(x)
            for block in model.blocks:
                block.held = SimpleNamespace(last=None)
            optimizer.zero_grad()
            gc.collect()
            live.append(session_of(wrapped).engine.held()["live_bytes"])
        assert live[2] == live[1]
    finally:
        protrain.unwrap(wrapped)


@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
def test_what_a_forward_that_ended_early_has_left_is_differentiated_through(mode: str) -> None:
    """As by hooks that look for features, and need no more than these."""

    class FoundError(Exception):
        pass

    def loop(model: Any, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        figures, found = [], []

        def ends(_module: nn.Module, _given: Any, y: torch.Tensor) -> None:
            found.append(y.square().mean())
            raise FoundError

        for x in inputs(2):
            handle = model.blocks[3].up.register_forward_hook(ends)
            with pytest.raises(FoundError):
                model(x)
            handle.remove()
            found[-1].backward()
            figures.append(found[-1].item())
            optimizer.step()
            optimizer.zero_grad()
        return figures + steps(inputs(1))(model, optimizer, False)

    assert_equal(run(Chain, loop, memory=1 << 30, block_modes=[mode] * 8), run(Chain, loop), 1 << 30)


def test_what_others_change_in_place_after_a_forward_is_an_error_in_its_recomputation() -> None:
    model = chain_of(Conditioned)()
    wrapped, _ = protrain.wrap(model, adamw(model), memory=1 << 30, block_modes=["checkpoint"] * 8)
    try:
        loss = wrapped(inputs(1)[0])
        model.blocks[4].scale.mul_(2)
        with pytest.raises(RuntimeError, match="recomputed, and its tensor scale was changed after its forward began"):
            loss.backward()
    finally:
        protrain.unwrap(model)


@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
def test_a_tensor_that_forward_left_behind_is_still_its_own_after_backward(mode: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(3):
            loss = model(x)
            for block in model.blocks:
                block.aux.retain_grad()
            loss.backward()
            figures += [loss.item(), *(block.aux.grad.tolist() for block in model.blocks)]
            optimizer.step()
            optimizer.zero_grad()
        return figures

    make = chain_of(Auxiliary)
    assert_equal(run(make, loop, memory=1 << 30, block_modes=[mode] * 8), run(make, loop), 1 << 30)


def test_tensors_that_forward_replaces_are_foreseen() -> None:
    """Those of the step before stay until the recomputation, which may need them."""

    class Features(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.features = torch.tanh(self.square(x))
            return x + torch.sin(self.square(self.features))

    make, batches, modes = chain_of(Features), inputs(3, rows=2048), ["checkpoint"] * 8
    with pytest.raises(protrain.BudgetError) as refused:
        run(make, steps(batches), memory=TIGHT, block_modes=modes)
    memory = refused.value.smallest_bytes
    assert_equal(run(make, steps(batches), memory=memory, block_modes=modes), run(make, steps(batches)), memory)


@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("only", ["", "blocks.3.up.weight"])
def test_parameters_of_functional_call_are_those_of_the_recomputation(only: str, mode: str) -> None:
    """Which it gives to the modules for the forward alone."""

    def loop(model: Any, _optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        names = [only] if only else [name for name, _ in model.named_parameters()]
        given = {name: (model.get_parameter(name).detach().clone() * 0.5).requires_grad_() for name in names}
        loss = torch.func.functional_call(model, given, (inputs(1)[0],))
        return [loss.item(), *(grad.tolist() for grad in torch.autograd.grad(loss, list(given.values())))]

    assert_equal(run(Chain, loop, memory=1 << 30, block_modes=[mode] * 8), run(Chain, loop), 1 << 30)


def scaled(scale: float) -> Callable[..., Any]:
    """A hook on what a module is given."""
    return lambda _module, given: (given[0] * scale + 0.25,)


@pytest.mark.parametrize("memory", [TIGHT, 1 << 30], ids=["tight", "ample"])
@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
def test_hooks_around_the_forward_alone_are_around_the_recomputation(mode: str, memory: int) -> None:
    """As adapters put them onto layers for one call; those that come after it run with the next one. All in their order."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        figures = []
        for scale, x in zip([0.5, 1.5, 0.75], inputs(3), strict=True):
            own = [block.up.register_forward_pre_hook(scaled(scale)) for block in model.blocks]
            own += [block.down.register_forward_hook(lambda *given, by=scale: given[-1] * by) for block in model.blocks[::2]]
            stays = model.blocks[1].up.register_forward_pre_hook(scaled(1.25))
            loss = model(x)
            for handle in own:
                handle.remove()
            late = model.blocks[2].square.register_forward_hook(lambda *given: given[-1] * 2)
            loss.backward()
            figures.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            figures.append(model(x).item())
            stays.remove()
            late.remove()
        return figures

    assert_equal(run(Chain, loop, memory=memory, block_modes=[mode] * 8), run(Chain, loop), memory)


class Sums(Block):
    """Over all of what it is given, the order of which is that of memory. `writes`: changes it in place."""

    writes = False

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        scale = torch.tanh(x.sum() * 0.01)
        if self.writes:
            x.mul_(1.25)
        y = x if y is None else y
        return super().forward(x) * scale + torch.tanh(y.sum(-1, keepdim=True))


class SumsAndWrites(Sums):
    writes = True


class Adds(Block):
    """What is trained to what is not, which is seen through another tensor."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x.add_(self.norm_in.bias + 0.5)
        return super().forward(x) * torch.tanh(y.sum(-1, keepdim=True))


class Parts(Chain):
    """Blocks that are given a part of a tensor."""

    block = Sums

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = torch.tanh(block(torch.cat([x, 0.5 * x], -1)[:, 1:257]))
        y: torch.Tensor = self.head(x)
        return y.square().mean()


class PartsWritten(Parts):
    block = SumsAndWrites


class Twice(Chain):
    """Blocks that are given a tensor and what lies in its memory."""

    block = SumsAndWrites

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        for number, block in enumerate(self.blocks):
            x = x * 1 if number else x.clone()
            x = block(x, (x[:, 5:100], x.detach(), x.view(-1, 256))[number % 3])
        y: torch.Tensor = self.head(x)
        return y.square().mean()


class TwiceAdded(Twice):
    block = Adds


@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
@pytest.mark.parametrize("make", [Parts, PartsWritten, Twice, TwiceAdded])
def test_copies_of_inputs_lie_as_these_do(make: Callable[[], nn.Module], mode: str) -> None:
    """And those of tensors that share memory share it: what a block changes in place is seen through the others."""
    loop = steps(inputs(3, rows=201))
    assert_equal(run(make, loop, memory=1 << 30, block_modes=[mode] * 8), run(make, loop), 1 << 30)


def test_copies_of_rows_that_lie_apart_have_no_others_between_them() -> None:
    rows = torch.arange(4000.0).view(1000, 4)
    parts = [rows[:4], rows[2:6], rows[-4:]]
    made = strides.copies(parts)
    assert all(torch.equal(made[id(part)], part) for part in parts)
    assert {made[id(part)].untyped_storage().nbytes() for part in parts} == {6 * 16, 4 * 16}
    assert strides.copied_bytes(parts) == 10 * 16
    made[id(parts[0])].zero_()
    assert not made[id(parts[1])][:2].any()


def test_arrays_of_numpy_over_one_memory_are_copied() -> None:
    """Whose tensors each have a storage of their own, which end where they do."""
    numbers = np.arange(1000, dtype=np.float32)
    parts = [torch.from_numpy(numbers[:10]), torch.from_numpy(numbers)]
    made = strides.copies(parts)
    assert all(torch.equal(made[id(part)], part) for part in parts)
    assert made[id(parts[0])].data_ptr() == made[id(parts[1])].data_ptr()


@pytest.mark.parametrize("mode", ["checkpoint", "checkpoint_swap"])
def test_a_block_may_begin_to_draw_from_numpy_at_any_step(mode: str) -> None:
    class Augments(Block):
        draws = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * float(np.random.random()) if self.draws else x)

    def loop(model: Any, optimizer: torch.optim.Optimizer, plain: bool) -> list[Any]:
        figures = steps(inputs(1))(model, optimizer, plain)
        for block in model.blocks:
            block.draws = True
        return figures + steps(inputs(2))(model, optimizer, plain)

    make = chain_of(Augments)
    assert_equal(run(make, seeded(loop), memory=1 << 30, block_modes=[mode] * 8), run(make, seeded(loop)), 1 << 30)


def test_numpys_numbers_are_not_drawn_by_who_looks_ahead() -> None:
    class Drops(Chain):
        def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
            scale = float(np.random.random())
            return super().forward(x) * scale

    loop = seeded(steps(inputs(3)))
    assert_equal(run(Drops, loop, memory=1 << 30), run(Drops, loop), 1 << 30)
