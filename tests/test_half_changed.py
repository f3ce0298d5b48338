"""What is left of a change that was refused or failed in its middle: all of it, none, or a model that says it is a mixture."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import Rows, adamw
from torch import nn

import protrain
from protrain import errors
from protrain.optim.foreign import _Step

MIB = 1 << 20
MEMORY = 7 * MIB  # of 13 MiB of states


def rows(seed: int) -> torch.Tensor:
    return torch.randn(128, 128, generator=torch.Generator().manual_seed(seed))


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, foreach=False)


def step(model: Any, optimizer: Any, seed: int) -> None:
    model(rows(seed)).backward()
    optimizer.step()
    optimizer.zero_grad()


def pair(
    disk: Path, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw, memory: int = MEMORY, **options: Any
) -> tuple[Any, Any, Any, Any]:
    """Plain torch's and a wrapped one, after three steps."""
    plain, model = Rows(512), Rows(512)
    optimizer = make(plain)
    model, wrapped = protrain.wrap(model, make(model), memory=memory, disk=str(disk), **options)
    for seed in range(3):
        step(plain, optimizer, seed)
        step(model, wrapped, seed)
    return plain, optimizer, model, wrapped


def on_disk(model: nn.Module) -> list[str]:
    """Weights, one of each chunk that is not in memory."""
    session = model._protrain_session
    found: dict[int, str] = {}
    for name, p in model.named_parameters():
        entry = session.layout.entries[session.wrapped.number_of[id(p)]]
        if not session.engine.in_memory(entry.chunk) and p.dim() == 2:
            found.setdefault(entry.chunk, name)
    return list(found.values())


def same(model: nn.Module, plain: nn.Module) -> bool:
    return all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


class Failing:
    """An engine, or another object, one of whose methods fails from its call `first` on."""

    def __init__(self, inner: Any, method: str, first: int = 1, *, torn: bool = False, write: bool = False) -> None:
        self._inner, self._method, self._left = inner, method, first
        self._torn, self._write, self.failed = torn, write, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._call if name == self._method else self._stats if name == "stats" else found

    def _stats(self) -> Any:
        return {**self._inner.stats(), "torn_writes": self._inner.stats()["torn_writes"] + self._torn * self.failed}

    def _call(self, *args: Any) -> Any:
        if not self._write or args[-1] is True:
            self._left -= 1
            if self._left <= 0:
                self.failed += 1
                raise errors.from_record(3, "write failed", errno.EIO, "/disk", 4096, 0, 0, 0)
        return getattr(self._inner, self._method)(*args)


@contextmanager
def writes_fail(model: Any, first: int = 1, *, torn: bool = False) -> Iterator[None]:
    """Inside, writes of values fail from the one of this number on. torn: when some of it was written."""
    values = model._protrain_session.values
    inner = values.engine
    values.engine = values.loads._engine = Failing(inner, "transfer", first, torn=torn, write=True)
    try:
        with pytest.raises(protrain.DiskError):
            yield
    finally:
        values.engine = values.loads._engine = inner


def test_an_operation_on_several_that_is_refused_changes_none(disk: Path) -> None:
    """The slot of the first alone was forgotten, and forward and update went on with what had become of the others."""
    plain, optimizer, model, wrapped = pair(disk)
    names = on_disk(model)
    assert len(names) >= 2
    params = dict(model.named_parameters())
    for first in names:
        for second in names:
            if first == second:
                continue
            model(rows(7)).backward()
            with torch.no_grad(), pytest.raises(protrain.StepError, match="cannot be written in the middle of a step"):
                torch._foreach_mul_([params[first], params[second]], 0.5)
            wrapped.zero_grad()
            with torch.no_grad():
                assert model(rows(8)).item() == plain(rows(8)).item()
    step(plain, optimizer, 9)
    step(model, wrapped, 9)
    assert same(model, plain)


def test_an_operation_that_ends_in_its_middle_has_done_what_it_has_done(disk: Path) -> None:
    plain, _, model, _ = pair(disk)
    for name in on_disk(model):
        for one in (plain, model):
            p = dict(one.named_parameters())[name]
            with torch.no_grad(), pytest.raises(RuntimeError, match="must match the size"):
                torch._foreach_add_([p, p], [torch.full(p.shape, 0.1), torch.ones(3)])
        assert same(model, plain)
        with torch.no_grad():
            assert model(rows(8)).item() == plain(rows(8)).item()


@pytest.mark.parametrize("first", [1, 3])
def test_no_step_of_a_part_of_the_gradients_where_the_disk_failed(disk: Path, first: int) -> None:
    plain, optimizer, model, wrapped = pair(disk, max_grad_norm=1e9)
    gradients = model._protrain_session.gradients
    inner, gradients._engine = gradients._engine, Failing(gradients._engine, "gradient", first)
    with pytest.raises(protrain.DiskError):
        model(rows(7)).backward()
    gradients._engine = inner
    with pytest.raises(protrain.StepError, match=r"for want of the disk or of memory.*call optimizer\.zero_grad\(\)"):
        wrapped.step()
    assert same(model, plain)
    wrapped.zero_grad()
    model(rows(9)).backward()
    wrapped.step()
    plain(rows(9)).backward()
    optimizer.step()
    assert same(model, plain)


def test_a_given_gradient_that_step_refuses_stays(disk: Path) -> None:
    _, _, model, wrapped = pair(disk)
    p = dict(model.named_parameters())[on_disk(model)[0]]
    p.grad = torch.zeros_like(p.detach()).to_sparse()
    for _ in range(2):
        with pytest.raises(protrain.PlanError, match="only dense"):
            wrapped.step()
        assert p.grad is not None


def test_a_step_that_cannot_be_taken_back_leaves_a_mixture_that_says_so(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training went on with it."""
    plain, optimizer, model, wrapped = pair(disk, rmsprop, 40 * MIB)
    protrain.save(model, wrapped, str(tmp_path / "before"))
    put_back, lost = _Step._put_back, []

    def fails_once(self: Any, number: int, kept: Any) -> None:
        if not lost:
            lost.append(number)
            raise errors.from_record(3, "read failed", errno.EIO, "/disk", 4096, 0, 0, 0)
        put_back(self, number, kept)

    monkeypatch.setattr(_Step, "_put_back", fails_once)
    model(rows(7)).backward()
    inner = model._protrain_session.engine
    model._protrain_session.engine = Failing(inner, "stage_rest")
    with pytest.raises(protrain.DiskError, match=r"could not be put back.*load a checkpoint"):
        wrapped.step()
    model._protrain_session.engine = inner
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, plain.state_dict()[name])]
    assert len(lost) == len(changed) == 1
    monkeypatch.undo()
    wrapped.zero_grad()
    for call in (lambda: model(rows(7)), lambda: protrain.save(model, wrapped, str(tmp_path / "after"))):
        with pytest.raises(protrain.StepError, match="a step failed, could not be taken back and left a mixture"):
            call()
    protrain.load(model, wrapped, str(tmp_path / "before"))
    step(plain, optimizer, 9)
    step(model, wrapped, 9)
    assert same(model, plain)


def test_a_parameter_that_was_written_in_part_is_not_trained(disk: Path) -> None:
    plain, optimizer, model, wrapped = pair(disk)
    name = on_disk(model)[0]
    p = dict(model.named_parameters())[name]
    with writes_fail(model, torn=True):
        p.data = torch.zeros_like(p.detach())
    with pytest.raises(protrain.StepError, match=f"the disk failed while {name} was written and left a mixture of parameters"):
        model(rows(7))
    model.load_state_dict(plain.state_dict())
    step(plain, optimizer, 9)
    step(model, wrapped, 9)
    assert same(model, plain)


def test_a_write_that_never_began_leaves_all_as_it_was(disk: Path) -> None:
    plain, optimizer, model, wrapped = pair(disk)
    p = dict(model.named_parameters())[on_disk(model)[0]]
    with writes_fail(model):
        p.data = torch.zeros_like(p.detach())
    step(plain, optimizer, 9)
    step(model, wrapped, 9)
    assert same(model, plain)


def test_state_that_lies_half_in_new_strides_is_not_trained(disk: Path) -> None:
    """The step after it was made with moments in another order than their parameter's."""
    _, _, model, _ = pair(disk)
    p = dict(model.named_parameters())[on_disk(model)[0]]
    with writes_fail(model, 2):
        p.data = p.detach().clone().t().contiguous().t()
    with pytest.raises(protrain.StepError, match="was to lie otherwise, which failed half-way and left a mixture"):
        model(rows(7))
