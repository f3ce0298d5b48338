"""Models that decide by numbers which they compute: one forward is listened to, and a dry run answered the same foresees them."""

from __future__ import annotations

import collections
import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from nets import Block, Chain, inputs, steps
from torch import nn
from torch.linalg import svdvals
from twins import MIB, adamw, assert_equal, run

import protrain
from protrain.dryrun import answers
from protrain.runtime import foreseeing


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


Ask = Callable[[torch.Tensor], torch.Tensor]


def by_item(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 if x.abs().max().item() > 1e-3 else x


def by_truth(x: torch.Tensor) -> torch.Tensor:
    return x if (x.abs() > 1e9).any() else x * 0.5


def by_list(x: torch.Tensor) -> torch.Tensor:
    """As many rows as a list of numbers says, one after the other."""
    sizes = x.detach().abs().mean(1)[:8].mul(10).long().clamp(0, 4).tolist()
    return x + sum(x[: size + 1].sum(0) for size in sizes)


def by_numpy(x: torch.Tensor) -> torch.Tensor:
    """As a matching by SciPy does."""
    order = x.detach().mean(1).cpu().numpy().argsort()
    return x[torch.as_tensor(order)]


def by_places(x: torch.Tensor) -> torch.Tensor:
    """As experts are called that somebody has chosen."""
    chosen = x.detach().sum(1) > 0
    (places,) = torch.where(chosen)
    return x.index_add(0, places, x[places].exp().tanh())


def by_mask(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    mask = x.detach().sum(1) > 0
    y[mask] = x[mask].tanh()
    return y


def by_selection(x: torch.Tensor) -> torch.Tensor:
    return x + x.masked_select(x.detach() > 0.5).tanh().sum() / x.numel()


def by_repeats(x: torch.Tensor) -> torch.Tensor:
    times = (x.detach().sum(1) > 0).long() + 1
    return x + torch.repeat_interleave(x, times, dim=0).mean()


def by_unique(x: torch.Tensor) -> torch.Tensor:
    kinds = torch.unique(x.detach().mul(3).round())
    return x * kinds.numel() / 64 + kinds.mean()


def by_distribution(x: torch.Tensor) -> torch.Tensor:
    """Which asks whether its arguments are in range, as no dry run does."""
    spread = torch.distributions.Normal(x, x.detach().abs() + 1e-3)
    return spread.mean + (x if float(x.detach().sum()) > 1e9 else -x) * 0.1


ASKS = (
    by_item, by_truth, by_list, by_numpy, by_places, by_mask, by_selection, by_repeats, by_unique, by_distribution,
)  # fmt: skip


class Asking(Chain):
    """Asks between block 3 and block 4."""

    ask: Ask = staticmethod(by_item)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for number, block in enumerate(self.blocks):
            x = block(x if number != 4 else type(self).ask(x))
        return self.head(x).square().mean()


class AskingBlock(Block):
    """A block that asks each time it runs."""

    ask: Ask = staticmethod(by_item)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return type(self).ask(super().forward(x))


def model_of(ask: Ask, inside: bool) -> nn.Module:
    if not inside:
        return type("Asking", (Asking,), {"ask": staticmethod(ask)})()
    block = type("AskingBlock", (AskingBlock,), {"ask": staticmethod(ask)})
    return type("Chained", (Chain,), {"block": block})()


def losses_of(model: nn.Module, optimizer: Any, rows: list[int]) -> Iterator[float]:
    generator = torch.Generator().manual_seed(1)
    for count in rows:
        loss = model(torch.randn(count, 256, generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def trained(make: Callable[[], nn.Module], memory: int, rows: list[int]) -> tuple[protrain.Status, list[bool], int]:
    """The same numbers as plain torch. What status says in the end, whether each batch was foreseen then, and how often it was
    told that one was not."""
    torch.manual_seed(0)
    model: Any = make()
    torch.manual_seed(0)
    plain = make()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = list(losses_of(model, optimizer, rows))
    status = protrain.status(model)
    foreseen = [run is not None for _, run in protrain.session_of(model).decider.dry_runs]
    protrain.unwrap(model)
    assert found == list(losses_of(plain, adamw(plain), rows))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert status.peak_memory_bytes <= memory
    return status, foreseen, sum("cannot foresee" in str(one.message) for one in caught)


@pytest.mark.parametrize(("inside", "memory"), [(False, 26), (True, 48), (False, 120)])
@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.__name__)
def test_what_was_asked_once_is_foreseen(ask: Ask, inside: bool, memory: int) -> None:
    status, foreseen, told = trained(lambda: model_of(ask, inside), memory * MIB, [1024] * 4)
    assert foreseen == [True]
    assert told == 1
    assert 0.98 <= status.plan.peak_bytes / status.peak_memory_bytes <= 1.1


def test_each_longer_batch_is_listened_to() -> None:
    """And a shorter one is known with it."""
    status, foreseen, told = trained(lambda: model_of(by_places, False), 48 * MIB, [256, 256, 1024, 512, 1024, 256])
    assert foreseen == [True]
    assert told == 1
    assert status.plan.n_persist > 0


def test_lengths_that_never_come_again_are_not_listened_to_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[None] = []
    before = answers.listening
    monkeypatch.setattr(foreseeing, "listening", lambda: (times.append(None), before())[1])
    _, _, told = trained(lambda: model_of(by_places, False), 48 * MIB, list(range(100, 240, 20)))
    assert len(times) == foreseeing.MOST_UNUSED
    assert told == 1


def test_what_a_program_writes_to_an_answer_changes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(x: torch.Tensor) -> torch.Tensor:
        """The mask is another one behind it, and places are counted on."""
        mask = x.detach()[:, 0] > 1.0
        first = x.detach()[mask]
        mask.logical_not_()
        places = mask.nonzero().add_(1)
        wide = x[mask.clone()].repeat(8, 1).exp().tanh()
        return x + first.mean() + wide.mean() + places.float().mean() * 1e-3

    kept: list[list[Any]] = []
    before = answers.Replies.__init__

    def noted(self: answers.Replies, found: answers.Answers | None = None) -> None:
        if found is not None:
            kept.append([repr(given) for given in found.of.values()])
        before(self, found)

    monkeypatch.setattr(answers.Replies, "__init__", noted)
    status, foreseen, _ = trained(lambda: model_of(ask, False), 64 * MIB, [512] * 4)
    assert foreseen == [True]
    assert len(kept) >= 3
    assert all(one == kept[0] for one in kept)
    assert 0.98 <= status.plan.peak_bytes / status.peak_memory_bytes <= 1.1


def test_a_forward_that_changes_its_batch() -> None:
    """Its containers, and words among its arguments, are other ones behind it."""

    class Popping(Asking):
        def forward(self, batch: dict[str, Any], options: dict[str, int]) -> torch.Tensor:  # type: ignore[override]
            options["seen"] += 1
            return super().forward(batch.pop("x"))

    torch.manual_seed(0)
    model: Any = Popping()
    model, optimizer = protrain.wrap(model, adamw(model), memory=48 * MIB)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model({"x": torch.randn(512, 256)}, {"seen": 0}).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [run is not None for _, run in protrain.session_of(model).decider.dry_runs] == [True]
    protrain.unwrap(model)


@pytest.mark.parametrize("name", ["eigvalsh", "svdvals", "nuc", "grad of prod"])
def test_what_computes_in_another_way_under_a_mode(name: str) -> None:
    """Has the bits of plain torch while it is listened to."""

    def ask(x: torch.Tensor) -> torch.Tensor:
        z = x.detach()[:64, :64]
        if name == "eigvalsh":
            return x * torch.linalg.eigvalsh(z.T @ z / 64).max().item()
        if name == "svdvals":
            return x * svdvals(z).max().item()
        if name == "nuc":
            return x * (z.norm("nuc") / torch.linalg.norm(z, "nuc") * torch.linalg.matrix_norm(z, "nuc")).item()
        with torch.enable_grad():
            z = z[:, :8].clone().requires_grad_()
            (slope,) = torch.autograd.grad(z.prod(1).sum(), z)
        return x + slope.abs().max().item()

    x = torch.randn(128, 256)
    plain = ask(x)
    with answers.listening() as heard:
        assert torch.equal(ask(x), plain)
    assert len(heard.of) > 0
    assert svdvals is torch.linalg.svdvals


def test_two_threads_that_listen_at_once() -> None:
    """Each hears its own, and torch is as it was behind the last."""
    names = [(where, name, getattr(where, name)) for where, all_names, _ in answers._OTHERS for name in all_names]
    entered, left, heard = threading.Event(), threading.Event(), []

    def one() -> None:
        with answers.listening() as found:
            entered.set()
            left.wait()
            torch.ones(1).tolist()
        heard.append(found)

    thread = threading.Thread(target=one)
    thread.start()
    entered.wait()
    with answers.listening() as found:
        torch.zeros(3).numpy()
    left.set()
    thread.join()
    assert [list(each.of.values()) for each in heard] == [[[1.0]]]
    assert [len(kept) for kept in found.of.values()] == [1]
    assert all(getattr(where, name) == was for where, name, was in names)
    assert "tolist" not in torch.Tensor.__dict__


def test_more_answers_than_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps take is planned with, as of any model that cannot be foreseen."""
    monkeypatch.setattr(answers, "MOST_ANSWERS", 4)
    _, foreseen, told = trained(lambda: model_of(by_list, False), 64 * MIB, [512] * 3)
    assert foreseen == [False]
    assert told == 1


@pytest.mark.parametrize("past", ["by its bytes", "at its address", "by DLPack"])
def test_what_is_asked_past_torch(past: str) -> None:
    """Nobody hears it, and nothing is read where no memory is."""

    def ask(x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        if past == "by its bytes":
            return x * 0.5 if x.untyped_storage()[3] < 256 else x
        if past == "at its address":
            return x * 0.5 if ctypes.string_at(x.data_ptr(), 4) else x
        return x * 0.5 if float(np.from_dlpack(x).max()) < 1e9 else x

    _, foreseen, told = trained(lambda: model_of(lambda x: x + ask(x), False), 64 * MIB, [512] * 3)
    assert foreseen == [False]
    assert told == 1


def test_a_forward_that_ends_early_is_heard_when_it_is_made_again() -> None:
    torch.manual_seed(0)
    model: Any = model_of(by_item, False)
    model, optimizer = protrain.wrap(model, adamw(model), memory=24 * MIB)
    ends = model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with warnings.catch_warnings(record=True), pytest.raises(ZeroDivisionError):
        model(torch.randn(1024, 256))
    ends.remove()
    assert [run for _, run in protrain.session_of(model).decider.dry_runs] == [None]
    found = list(losses_of(model, optimizer, [1024] * 3))
    assert [run is not None for _, run in protrain.session_of(model).decider.dry_runs] == [True]
    protrain.unwrap(model)
    torch.manual_seed(0)
    plain = model_of(by_item, False)
    assert found == list(losses_of(plain, adamw(plain), [1024] * 3))


def test_functions_that_are_compiled_stay_compiled() -> None:
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append("run")
            return graph(*args)

        return run

    halved = torch.compile(lambda x: x * 0.5 + x.tanh(), backend=backend)
    x = torch.randn(64)
    with answers.listening() as heard:
        first = halved(x)
        assert float(first.sum()) < 1e9
    assert calls == ["run"]
    assert torch.equal(first, halved(x))
    assert calls == ["run", "run"]
    assert [len(found) for found in heard.of.values()] == [1]
    assert "numpy" not in torch.Tensor.__dict__
    assert "tolist" not in torch.Tensor.__dict__


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + torch.norm(x) * 1e-3) + torch.linalg.norm(x, dim=-1, keepdim=True) * 1e-2


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_compiled_in_a_forward_that_is_listened_to_is_what_plain_torch_compiles(fullgraph: bool) -> None:
    """It calls functions of torch that have others in their place meanwhile."""
    torch._dynamo.reset()

    class Compiled(Asking):
        def __init__(self) -> None:
            super().__init__()
            self.ask = torch.compile(normed, backend="aot_eager", fullgraph=fullgraph)

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(self.ask(by_item(x)))

    _, foreseen, told = trained(Compiled, 512 * MIB, [256] * 3)
    assert (foreseen, told) == ([True], 1)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_with_compiled_blocks_is_not_listened_to(fullgraph: bool) -> None:
    torch._dynamo.reset()

    class Normed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return normed(super().forward(x))

    class Compiled(Asking):
        block = Normed

        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.compile(backend="aot_eager", fullgraph=fullgraph)

    _, foreseen, told = trained(Compiled, 512 * MIB, [256] * 3)
    assert (foreseen, told) == ([False], 1)


class Once(collections.OrderedDict[str, torch.Tensor]):
    """A batch that its class cannot make anew."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self["x"] = x.clone()


Row = collections.namedtuple("Row", "x scale")


class Scaled(Row):
    """The same of a named tuple."""

    def __new__(cls, x: torch.Tensor) -> Any:
        return super().__new__(cls, x, 0.5)


@pytest.mark.parametrize("batch", [Scaled, Once])
def test_a_batch_that_cannot_be_made_anew_is_trained_on(batch: Callable[[torch.Tensor], Any]) -> None:
    class Unpacking(Asking):
        def forward(self, inner: Any) -> torch.Tensor:  # type: ignore[override]
            return super().forward(inner["x"] if isinstance(inner, dict) else inner.x)

    loop = steps([batch(x) for x in inputs(3, rows=256)])
    with pytest.warns(UserWarning, match="cannot foresee"):
        found = run(Unpacking, loop, memory=64 * MIB)
    assert_equal(found, run(Unpacking, loop), 64 * MIB)


def test_what_is_too_large_is_not_kept() -> None:
    with answers.listening() as heard:
        assert len(torch.zeros(answers.MOST_ANSWERS + 1).tolist()) == answers.MOST_ANSWERS + 1
    assert heard.too_many
    assert not heard.of
    with answers.listening() as heard:
        torch.zeros(answers.MOST_BYTES + 1, dtype=torch.uint8).numpy()
    assert heard.too_many
    assert not heard.of


def test_a_model_within_another_is_heard_by_both() -> None:
    """And what is asked behind it by the outer one alone; both leave functions their bits."""
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(3))
    plain = svdvals(x)
    with answers.listening() as outer:
        with answers.listening() as inner:
            assert torch.tensor(3.0).item() == 3.0
            assert torch.tensor([4.0]).tolist() == [4.0]
            within = svdvals(x)
        assert torch.tensor(5).item() == 5
        behind = svdvals(x)
    assert torch.equal(within, plain)
    assert torch.equal(behind, plain)
    assert sum(map(len, inner.of.values())) == 2
    assert sum(map(len, outer.of.values())) == 3
    assert "tolist" not in torch.Tensor.__dict__
    assert not answers._listeners


def test_subclasses_are_told_the_names_of_torchs_own_functions() -> None:
    told: list[Any] = []

    class Told(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            told.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(2, 2).as_subclass(Told)

    def ask() -> None:
        x.tolist()
        x.numpy()
        torch.norm(x)

    ask()
    plain, told = told, []
    with answers.listening():
        ask()
    assert [func for func in told if func in plain] == [func for func in plain if func in told]
    assert {torch.Tensor.tolist, torch.Tensor.numpy, torch.functional.norm} <= set(told)


class Passing(torch.overrides.TorchFunctionMode):
    """Calls what is called, and notes it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def by_several(x: torch.Tensor) -> torch.Tensor:
    """By the last of them only half are chosen."""
    (places,) = torch.where(x.detach()[:, 0] > -1e9)
    (others,) = torch.where(x.detach()[:, 0] > x.detach()[:, 0].median())
    return x.index_add(0, others, x[others].exp().tanh()) + x[places[::2]].mean()


def test_modes_see_as_many_calls_as_without() -> None:
    x = torch.ones(3)
    with answers.listening() as heard, Passing() as mode:
        assert x.tolist() == [1.0] * 3
    assert len(mode.calls) == 1
    assert sum(map(len, heard.of.values())) == 3


@pytest.mark.parametrize("inside", [False, True])
def test_questions_are_those_of_the_program_beside_its_modes(inside: bool) -> None:
    with Passing():
        _, foreseen, _ = trained(lambda: model_of(by_several, inside), 64 * MIB, [512] * 3)
    assert foreseen == [True]


def test_what_only_one_of_the_runs_asks_shifts_no_other_answer() -> None:
    """And what is asked again in a recomputation is answered as before."""

    class Extra(Asking):
        """Asks a question of its own when it has data."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if type(x) is torch.Tensor:
                assert float(x.detach().abs().max()) < 1e9
            return super().forward(x)

    Extra.ask = staticmethod(by_list)
    _, foreseen, told = trained(Extra, 64 * MIB, [512] * 3)
    assert foreseen == [True]
    assert told == 1
