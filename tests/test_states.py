"""An optimizer's state and a model's, given and taken while the model is wrapped: what does not fit is refused before anything is
changed, and what a program holds is its own."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from nets import TIGHT, Chain, both, inputs, steps
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._pytree import tree_leaves
from twins import MIB, adafactor, adamw, bits

import protrain
from protrain.api import session_of

AMPLE = 200 * MIB


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


class Wide(nn.Module):
    """As wide in the middle as it is told."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(256, width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x)).square().mean()
        return y


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def bits_of(optimizer: Any) -> list[bytes]:
    return [bits(torch.as_tensor(value)) for value in tree_leaves(optimizer.state_dict()["state"])]


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Of plain torch, after two steps."""
    steps(inputs(2))(model, optimizer, True)
    return optimizer


@pytest.mark.parametrize("memory", [12 * MIB, AMPLE], ids=["disk", "memory"])
def test_state_of_another_shape_is_refused(memory: int) -> None:
    """As plain torch does in its next step; numbers beside the tensor would be read otherwise."""
    narrow = trained(small := Wide(64), adamw(small))
    model: Any = Wide(1024)
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    with pytest.raises(protrain.PlanError, match=r"exp_avg of up\.weight is of shape \(64, 256\), the parameter is of \(1024, "):
        optimizer.load_state_dict(narrow.state_dict())
    plain = Wide(1024)
    assert steps(inputs(2))(model, optimizer, False) == steps(inputs(2))(plain, adamw(plain), True)
    protrain.unwrap(model)


def test_wrapping_with_state_of_another_shape_is_refused() -> None:
    narrow = trained(small := Wide(64), adamw(small))
    model = Wide(1024)
    optimizer = adamw(model)
    optimizer.load_state_dict(narrow.state_dict())
    with pytest.raises(protrain.PlanError, match=r"exp_avg of up\.weight is of shape"):
        protrain.wrap(model, optimizer, memory=AMPLE)
    assert optimizer.state
    assert bits(model.up.weight) == bits(Wide(1024).up.weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_with_more_arrays_than_the_model_was_wrapped_with_is_refused(precision: str, tmp_path: Path) -> None:
    """In bf16 the array behind Adam's two is the master."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, amsgrad(model), memory=TIGHT, precision=precision)
    batches = [x.to(next(model.parameters()).dtype) for x in inputs(3)]
    steps(batches[:2])(model, optimizer, False)
    state = optimizer.state_dict()
    protrain.save(model, optimizer, tmp_path / "amsgrad")
    protrain.unwrap(model)

    losses = []
    for refused in (False, True):
        model = Chain()
        model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, precision=precision)
        steps(batches[:2])(model, optimizer, False)
        if refused:
            with pytest.raises(protrain.PlanError, match="group 0 needs 3 arrays of optimizer state, the model was"):
                optimizer.load_state_dict(state)
            with pytest.raises(protrain.PlanError, match=r"param_groups\[0\] needs 3 arrays of optimizer state"):
                protrain.load(model, optimizer, tmp_path / "amsgrad")
        assert not optimizer.param_groups[0]["amsgrad"]
        losses.append(steps(batches[2:])(model, optimizer, False))
        protrain.unwrap(model)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("kind", "options", "lacking"),
    [
        (torch.optim.AdamW, {"fused": True}, "fused"),
        (torch.optim.AdamW, {"maximize": True}, "maximize"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad"),
        (torch.optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.3}, "decoupled_weight_decay"),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, "nesterov"),
        (torch.optim.SGD, {"maximize": True}, "maximize"),
    ],
    ids=repr,
)
def test_options_that_a_loaded_dict_lacks(kind: Any, options: dict[str, Any], lacking: str) -> None:
    """As of an older torch's file: the class says what they are then, not the group that was there."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        losses = steps(inputs(2))(model, optimizer, False)
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            del group[lacking]
        optimizer.load_state_dict(state)
        names = [sorted(group) for group in optimizer.param_groups]
        return [*losses, *steps(inputs(2, seed=5))(model, optimizer, False), names, optimizer.param_groups[0][lacking]]

    both(Chain, loop, lambda model: kind(model.parameters(), lr=1e-3, **options))


def test_a_loaded_dict_without_a_rate_is_refused() -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    state = optimizer.state_dict()
    del state["param_groups"][0]["lr"]
    with pytest.raises(ValueError, match="group 0 of the given one has no lr"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    protrain.unwrap(model)


def test_state_that_comes_in_the_middle_of_a_step_is_refused_and_changes_nothing() -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    steps(inputs(2))(model, optimizer, False)
    state = optimizer.state_dict()
    state["param_groups"][0] = state["param_groups"][0] | {"lr": 7.0}
    model(inputs(3)[2]).backward()
    with pytest.raises(protrain.StepError, match=r"optimizer\.load_state_dict in the middle of a step"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    optimizer.zero_grad()
    plain = Chain()
    plain_optimizer = trained(plain, adamw(plain))
    assert steps(inputs(3)[2:])(model, optimizer, False) == steps(inputs(3)[2:])(plain, plain_optimizer, True)
    protrain.unwrap(model)


def test_a_state_dict_that_was_loaded_stays_the_programs() -> None:
    """A schedule fills the rate that is a tensor."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3)), memory=TIGHT)
    state = optimizer.state_dict()
    state["param_groups"] = [group | {"lr": group["lr"].clone()} for group in state["param_groups"]]
    optimizer.load_state_dict(state)
    optimizer.param_groups[0]["lr"].fill_(7.0)
    assert state["param_groups"][0]["lr"] == torch.tensor(1e-3)
    protrain.unwrap(model)


@pytest.mark.parametrize("memory", [TIGHT, AMPLE], ids=["disk", "memory"])
def test_shared_memory_is_refused(memory: int) -> None:
    """torch moves what is shared: the engine would update what nobody looks at any more."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    losses = steps(inputs(2))(model, optimizer, False)
    for module in (model, model.blocks[0], nn.Sequential(model)):
        with pytest.raises(protrain.PlanError, match="cannot be put into shared memory"):
            module.share_memory()
    if memory == TIGHT:
        with pytest.raises(protrain.PlanError, match="a parameter on disk cannot be put into shared memory"):
            model.head.weight.share_memory_()
    losses += steps(inputs(4)[2:])(model, optimizer, False)
    plain = Chain()
    assert losses == steps(inputs(4))(plain, adamw(plain), True)
    protrain.unwrap(model)


def test_a_parameter_in_memory_that_was_shared_is_noticed() -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=AMPLE)
    steps(inputs(2))(model, optimizer, False)
    before = {name: bits(value) for name, value in model.state_dict().items()}
    model.head.weight.share_memory_()
    with pytest.raises(protrain.PlanError, match=r"the memory of parameter .* was moved, as share_memory_\(\) does"):
        model(inputs(1)[0])
    protrain.unwrap(model)
    assert {name: bits(value) for name, value in model.state_dict().items()} == before


def fail_in_step(model: Any, optimizer: Any) -> None:
    """Four steps, and one that is not made: the rate changes when updates with the old one have begun."""
    steps(inputs(4))(model, optimizer, False)
    assert 0 < protrain.status(model).plan.n_persist < protrain.status(model).plan.n_chunks
    model(inputs(5)[4]).backward()
    optimizer.param_groups[0]["lr"] = 5e-4
    with pytest.raises(protrain.StepError, match="this step was not made"):
        optimizer.step()


def test_a_step_that_failed_is_not_made_of_the_gradients_in_memory_alone() -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    fail_in_step(model, optimizer)
    before = {name: bits(value) for name, value in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(protrain.StepError, match="its gradients are gone: run forward and backward again first"):
            optimizer.step()
    assert {name: bits(value) for name, value in model.state_dict().items()} == before
    assert protrain.status(model).steps == 4
    optimizer.zero_grad()
    optimizer.step()  # of nothing, as in plain torch
    protrain.unwrap(model)


def test_nothing_of_a_step_that_failed_is_in_the_next() -> None:
    """Without zero_grad() in between."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    fail_in_step(model, optimizer)
    losses = steps(inputs(7)[5:])(model, optimizer, False)
    plain = Chain()
    plain_optimizer = adamw(plain)
    steps(inputs(4))(plain, plain_optimizer, True)
    plain_optimizer.param_groups[0]["lr"] = 5e-4
    assert losses == steps(inputs(7)[5:])(plain, plain_optimizer, True)
    protrain.unwrap(model)


@pytest.mark.parametrize("memory", [TIGHT, AMPLE], ids=["disk", "memory"])
def test_unwrapped_in_the_middle_of_a_step_there_are_all_gradients_or_none(memory: int) -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    steps(inputs(4))(model, optimizer, False)
    model(inputs(1)[0]).backward()
    protrain.unwrap(model)
    assert {p.grad is None for p in model.parameters()} == {memory == TIGHT}


def test_the_models_zero_grad_is_of_all_parameters() -> None:
    """Also of those that another optimizer has."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for name, p in model.named_parameters() if "head" not in name], lr=1e-3, fused=True)

    def loop(model: Any, optimizer: torch.optim.Optimizer, _plain: bool) -> list[Any]:
        other = torch.optim.SGD(model.head.parameters(), lr=0.1)
        figures = []
        for x in inputs(4):
            loss = model(x)
            loss.backward()
            optimizer.step()
            other.step()
            model.zero_grad()
            figures.append(loss.item())
        return figures

    both(Chain, loop, made)


@pytest.mark.parametrize("memory", [TIGHT, AMPLE], ids=["disk", "memory"])
def test_what_was_frozen_at_wrap_is_not_left_untrained_unseen(memory: int) -> None:
    """The optimizer has it, so plain torch trains it from then on. One that no optimizer has may be unfrozen."""
    model: Any = Chain()
    model.blocks[3].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    parameters = [p for name, p in model.named_parameters() if name != "head.bias"]
    model, optimizer = protrain.wrap(model, torch.optim.AdamW(parameters), memory=memory)
    steps(inputs(2))(model, optimizer, False)
    model.head.bias.requires_grad_(True)
    steps(inputs(1))(model, optimizer, False)
    model.blocks[3].requires_grad_(True)
    with pytest.raises(protrain.PlanError, match=r"parameter blocks\.3\.norm_in\.weight was frozen at wrap"):
        model(inputs(1)[0])
    with pytest.raises(protrain.PlanError, match=r"parameter blocks\.3\.norm_in\.weight was frozen at wrap"):
        optimizer.step()
    with torch.no_grad():
        model(inputs(1)[0])
    protrain.unwrap(model)


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.blocks[0].square.weight


def test_a_state_dict_holds_nothing_but_its_entries() -> None:
    """What is taken out of it is not in the file that it is written to; tied parameters share one tensor as long as it lives."""
    model: Any = Tied()
    model, _ = protrain.wrap(model, adamw(model), memory=TIGHT)
    for _ in range(2):
        found = model.state_dict()
        assert found["head.weight"] is found["blocks.0.square.weight"]
        assert vars(found).keys() == vars(Tied().state_dict()).keys()
        for name in list(found):
            if not name.startswith("head"):
                del found[name]
        file = io.BytesIO()
        torch.save(found, file)
        assert len(file.getvalue()) < 2 * 4 * 257 * 256
        del found
    assert not session_of(model).states._copies
    protrain.unwrap(model)


def test_a_rate_that_is_a_tensor_is_one_after_a_load(tmp_path: Path) -> None:
    """torch's loop computes with it in fp32."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-4), weight_decay=0.17)

    plain = Chain()
    want = steps(inputs(6))(plain, made(plain), True)
    losses: list[Any] = []
    for batches, memory in ((inputs(3), TIGHT), (inputs(6)[3:], AMPLE)):
        model: Any = Chain()
        model, optimizer = protrain.wrap(model, made(model), memory=memory)
        if losses:
            protrain.load(model, optimizer, tmp_path / "saved")
            assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
        losses += steps(batches)(model, optimizer, False)
        protrain.save(model, optimizer, tmp_path / "saved")
        found = {name: bits(value) for name, value in model.state_dict().items()}
        protrain.unwrap(model)
    assert losses == want
    assert found == {name: bits(value) for name, value in plain.state_dict().items()}


def test_what_stands_in_groups_is_saved_or_refused_by_name(tmp_path: Path) -> None:
    """Names of parameters, numbers of NumPy, lists and tuples; a function is no plain value."""
    model: Any = Chain()
    named = torch.optim.AdamW(model.named_parameters(), lr=float(numpy.float32(1e-3)))
    named.param_groups[0] |= {"lr": numpy.float32(1e-3), "tags": ["a", "b"]}
    model, optimizer = protrain.wrap(model, named, memory=TIGHT)
    steps(inputs(1))(model, optimizer, False)
    before = optimizer.state_dict()["param_groups"]
    protrain.save(model, optimizer, tmp_path / "saved")
    optimizer.param_groups[0]["lr"] = 0.5
    protrain.load(model, optimizer, tmp_path / "saved")
    assert optimizer.state_dict()["param_groups"] == before
    optimizer.param_groups[0]["scale"] = lambda rate: rate
    with pytest.raises(protrain.PlanError, match="'scale' of group 0 is a function that cannot be saved"):
        protrain.save(model, optimizer, tmp_path / "saved")
    for value, kind in ((torch.ones(3), "Tensor"), ((torch.ones(3),), "tuple")):
        optimizer.param_groups[0]["scale"] = value
        with pytest.raises(protrain.PlanError, match=f"'scale' of group 0 is a {kind} that cannot be saved"):
            protrain.save(model, optimizer, tmp_path / "saved")
    protrain.unwrap(model)


def test_options_that_are_tensors_are_refused_where_torch_rounds_otherwise() -> None:
    betas = torch.tensor(0.9), torch.tensor(0.99)
    model = Chain()
    with pytest.raises(protrain.PlanError, match="betas is of tensors"):
        protrain.wrap(model, torch.optim.AdamW(model.parameters(), betas=betas), memory=TIGHT)

    def fused(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), betas=betas, fused=True)

    both(Chain, steps(inputs(3)), fused)


class Small(nn.Module):
    """A parameter of one element beside a Chain, whose gradient autograd gives as the negative of what lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.chain, self.shift = Chain(), nn.Parameter(torch.full((1,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.chain(x, loss=False)
        found = torch.complex(y.mean().reshape(1), self.shift).conj() * torch.complex(torch.ones(1), torch.ones(1))
        return found.imag.sum() + y.square().mean()


@pytest.mark.parametrize("memory", [TIGHT, AMPLE], ids=["disk", "memory"])
def test_gradients_that_are_negative_views(memory: int) -> None:
    """torch gives such a gradient away as it is, where it is of one element; a user may set one of any shape."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, plain: bool) -> list[Any]:
        figures = steps(inputs(3))(model, optimizer, plain)
        model(inputs(4)[3]).backward()
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch._neg_view(torch.full(p.shape, 0.01))
        optimizer.step()
        optimizer.zero_grad()
        return figures

    def made(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    seen = Small()
    seen(inputs(1)[0]).backward()
    assert seen.shift.grad is not None
    assert seen.shift.grad.is_neg()
    both(Small, loop, made, all_in_memory=memory == AMPLE, memory=memory)


class Buffered(Chain):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("odd", buffer)


ODD = {
    "complex": torch.view_as_complex(torch.arange(8.0).view(4, 2)),
    "conjugate": torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj(),
    "uint16": torch.arange(5).to(torch.uint16),
    "float8": torch.arange(4.0).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", ODD)
def test_buffers_of_any_type_of_safetensors_are_saved(name: str, tmp_path: Path) -> None:
    model: Any = Buffered(ODD[name].clone())
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    protrain.save(model, optimizer, tmp_path / "saved")
    want = ODD[name].resolve_conj()
    assert load_file(tmp_path / "saved" / "model.safetensors")["odd"].view(torch.uint8).equal(want.view(torch.uint8))
    model.odd = torch.zeros_like(want)
    protrain.load(model, optimizer, tmp_path / "saved")
    assert model.odd.view(torch.uint8).equal(want.view(torch.uint8))
    protrain.unwrap(model)


@pytest.mark.parametrize("buffer", [torch.zeros(3, dtype=torch.complex128), torch.eye(3).to_sparse()], ids=["type", "layout"])
def test_a_buffer_that_no_file_holds_is_refused_by_name(buffer: torch.Tensor, tmp_path: Path) -> None:
    model: Any = Buffered(buffer)
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    with pytest.raises(protrain.PlanError, match=r"model: odd is a torch\..* which cannot be saved"):
        protrain.save(model, optimizer, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
    protrain.unwrap(model)


def test_weights_of_numbers_that_stand_for_others_are_refused(tmp_path: Path) -> None:
    """As those of a quantised model, whose factors nobody would multiply."""
    tensors = {name: value.to(torch.float8_e4m3fn) for name, value in Wide(64).state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Wide(64)
    with pytest.raises(ValueError, match=r"up\.weight in .* is of torch\.float8_e4m3fn"):
        protrain.wrap(model, adamw(model), memory=AMPLE, weights=tmp_path)


@pytest.mark.parametrize("make", [adamw, adafactor, sgd])
def test_the_state_of_a_wrapped_optimizer_has_names_and_no_values(make: Callable[..., Any]) -> None:
    """Those of plain torch, and what looks through it to move it to a device changes nothing."""
    plain: Any = Chain()
    want = make(plain)
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, make(model), memory=TIGHT)
    assert not optimizer.state
    assert model.head.weight not in optimizer.state
    assert len(optimizer.state[model.head.weight]) == 0
    steps(inputs(1))(plain, want, True)
    steps(inputs(1))(model, optimizer, False)
    expected = {name: set(want.state[p]) for name, p in plain.named_parameters()}
    assert {name: set(optimizer.state[p]) for name, p in model.named_parameters()} == expected
    assert len(optimizer.state) == len(expected)
    before = bits_of(optimizer)
    for entry in optimizer.state.values():
        for name, value in entry.items():
            entry[name] = value
    assert bits_of(optimizer) == before
    entry = optimizer.state[model.head.weight]
    name = next(iter(entry))

    def set_value() -> None:
        entry[name] = torch.zeros(1)

    def set_entry() -> None:
        optimizer.state[model.head.weight] = {}

    refused: list[Callable[[], Any]] = [
        lambda: entry[name].shape, lambda: entry.pop(name), set_value, set_entry, optimizer.state.clear,
        lambda: setattr(optimizer, "state", {}), lambda: float(entry[name]), lambda: len(entry[name]), lambda: 2 * entry[name],
        lambda: entry[name] + 1, lambda: entry[name] > 1, lambda: entry[name][0],
    ]  # fmt: skip
    for call in refused:
        with pytest.raises(
            protrain.PlanError, match=r"optimizer\.state: .* state_dict\(\) gives copies of it, and load_state_dict"
        ):
            call()
    assert bits_of(optimizer) == before
    protrain.unwrap(model)
    with pytest.raises(protrain.PlanError, match="unwrapped"):
        _ = optimizer.state


def dampened(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)


OPTIONS = {"momentum": (dampened, 0.9, 0.0), "amsgrad": (amsgrad, True, False)}


def switched(model: Any, optimizer: Any, option: str, values: list[Any], batches: list[torch.Tensor]) -> list[Any]:
    """A step of each batch with a value of the option; the last one of the values stays."""
    figures = []
    for value, x in zip(values, batches, strict=False):
        optimizer.param_groups[0][option] = value
        figures += steps([x])(model, optimizer, False)
    optimizer.param_groups[0][option] = values[-1]
    return figures


@pytest.mark.parametrize("way", ["save", "state_dict"])
@pytest.mark.parametrize("option", OPTIONS)
def test_state_that_an_option_makes_no_use_of_is_kept(option: str, way: str, tmp_path: Path) -> None:
    """A buffer of momentum waits for the momentum to come back, also in a checkpoint; one that begins late begins with the
    gradient, which nothing dampens."""
    made, on, off = OPTIONS[option]
    values, batches = [off, on, on, off] if option == "momentum" else [on, on, off], inputs(7)
    plain = Chain()
    plain_optimizer = made(plain)
    want = switched(plain, plain_optimizer, option, values, batches)
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, made(model), memory=TIGHT)
    losses = switched(model, optimizer, option, values, batches)
    state, kept = optimizer.state_dict(), plain_optimizer.state_dict()["state"]
    assert {n: list(entry) for n, entry in state["state"].items()} == {n: list(entry) for n, entry in kept.items()}
    if way == "save":
        protrain.save(model, optimizer, tmp_path / "saved")
    weights = model.state_dict()
    protrain.unwrap(model)
    model = Chain()
    model, optimizer = protrain.wrap(model, made(model), memory=AMPLE)
    if way == "save":
        protrain.load(model, optimizer, tmp_path / "saved")
    else:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    losses += switched(model, optimizer, option, [off, on, on], batches[4:])
    assert losses == want + switched(plain, plain_optimizer, option, [off, on, on], batches[4:])
    protrain.unwrap(model)


@pytest.mark.parametrize("option", OPTIONS)
def test_state_that_is_there_at_wrap_is_kept_though_no_option_uses_it(option: str) -> None:
    made, on, off = OPTIONS[option]
    found: list[Any] = []
    for wrapped in (False, True):
        model: Any = Chain()
        optimizer = made(model)
        losses = switched(model, optimizer, option, [on, off], inputs(2))
        if wrapped:
            model, optimizer = protrain.wrap(model, optimizer, memory=TIGHT)
        losses += switched(model, optimizer, option, [off, on], inputs(4)[2:])
        found.append((losses, [bits(value) for value in model.state_dict().values()]))
        if wrapped:
            protrain.unwrap(model)
    assert found[0] == found[1]


class Telling(Chain):
    """Has what is neither a parameter nor a buffer."""

    def __init__(self, told: Any = None) -> None:
        super().__init__()
        self.told = told

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state


def test_what_modules_give_as_extra_state_is_saved_or_refused_by_name(tmp_path: Path) -> None:
    scale = torch.arange(6.0).view(2, 3).t()
    model: Any = Telling({"seen": 3, "scale": scale, "again": [scale, float("inf")]})
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    protrain.save(model, optimizer, tmp_path / "saved")
    assert "_extra_state" not in load_file(tmp_path / "saved" / "model.safetensors")
    model.told = None
    protrain.load(model, optimizer, tmp_path / "saved")
    assert list(model.told) == ["seen", "scale", "again"]
    assert model.told["seen"] == 3
    assert model.told["again"][0] is model.told["scale"]
    assert model.told["again"][1] == float("inf")
    assert model.told["scale"].equal(scale)
    assert model.told["scale"].stride() == scale.stride()
    model.told = {"made_by": object()}
    with pytest.raises(protrain.PlanError, match=r"model: its made_by\._extra_state is a object, which cannot be saved"):
        protrain.save(model, optimizer, tmp_path / "saved")
    protrain.unwrap(model)
    other: Any = Chain()
    other, optimizer = protrain.wrap(other, adamw(other), memory=TIGHT)
    with pytest.raises(protrain.PlanError, match="what modules give by get_extra_state is not this model's"):
        protrain.load(other, optimizer, tmp_path / "saved")
    protrain.unwrap(other)


@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.RMSprop], ids=["kernel", "without"])
def test_rates_of_numpy_round_as_in_torch_and_are_saved(made: Any, tmp_path: Path) -> None:
    """A schedule that is computed with NumPy sets them; torch's loop computes in fp32 with one of fp32."""
    rates, batches = numpy.float32([3.337e-3, 1.1e-3, 0.0123, 0.9e-3, 1.7e-3, 2.3e-3, 3.1e-3, 4.7e-3]), inputs(8)

    def go_on(model: Any, optimizer: torch.optim.Optimizer, first: int) -> list[Any]:
        figures = []
        for rate, x in zip(rates[first : first + 4], batches[first : first + 4], strict=True):
            figures += steps([x])(model, optimizer, False)
            optimizer.param_groups[0]["lr"] = rate
        return figures

    plain = Chain()
    plain_optimizer = made(plain.parameters(), lr=rates[0], weight_decay=0.17)
    want = go_on(plain, plain_optimizer, 0) + go_on(plain, plain_optimizer, 4)
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, made(model.parameters(), lr=rates[0], weight_decay=0.17), memory=24 * MIB)
    losses = go_on(model, optimizer, 0)
    protrain.save(model, optimizer, tmp_path / "saved")
    optimizer.param_groups[0]["lr"] = rates[0]
    protrain.load(model, optimizer, tmp_path / "saved")
    assert type(optimizer.param_groups[0]["lr"]) is numpy.float32
    assert losses + go_on(model, optimizer, 4) == want
    found = {name: bits(value) for name, value in model.state_dict().items()}
    assert found == {name: bits(value) for name, value in plain.state_dict().items()}
    protrain.unwrap(model)


@pytest.mark.parametrize(
    "option", [{"lr": numpy.float16(1e-3)}, {"weight_decay": numpy.float32(0.1)}, {"lr": torch.ones(()).half()}]
)
def test_options_of_other_numbers_are_refused_where_torch_rounds_otherwise(option: dict[str, Any]) -> None:
    model = Chain()
    with pytest.raises(protrain.PlanError, match=r"optimizer: \w+ is of float\d\d, with which torch's loop rounds otherwise"):
        protrain.wrap(model, torch.optim.AdamW(model.parameters(), **option), memory=TIGHT)
