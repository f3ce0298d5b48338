"""What users call on a wrapped model beside training it: clipping, conversions, copies, other wrappers. Right, or refused."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import warnings
import weakref
from collections import UserDict
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from nets import TIGHT, Block, Chain, both, inputs, steps
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM
from twins import MIB, adamw, assert_equal, bits, fit, run

import protrain
from protrain import api
from protrain.api import session_of
from protrain.base.counting import counted, uncounted
from protrain.model.blocks import find_blocks
from protrain.profiling.blockclock import BlockClock
from protrain.runtime import activations


@pytest.fixture(autouse=True)
def _disk(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DISK", str(disk))


@pytest.fixture
def wrapped() -> Any:
    """(model, optimizer) of a wrapped Chain after two steps."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    try:
        steps(inputs(2))(model, optimizer, False)
        yield model, optimizer
    finally:
        protrain.unwrap(model)


def state_of(model: nn.Module) -> dict[str, bytes]:
    return {name: bits(value) for name, value in model.state_dict().items()}


def plain_after(count: int) -> nn.Module:
    """A plain Chain after so many steps, in no budget."""
    with uncounted():
        model = Chain()
        steps(inputs(count))(model, adamw(model), True)
    return model


def test_a_plan_for_a_batch_that_is_a_mapping() -> None:
    """Such as a tokenizer's BatchEncoding, which is no dict."""
    model, x = Chain(), inputs(1)[0]
    plans = [protrain.plan(model, batch, memory=TIGHT) for batch in (UserDict(x=x), {"x": x}, x)]
    assert len({plan.peak_bytes for plan in plans}) == 1


# ---- clipping ----


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("how", ["norm", "value", "total", "accelerate"])
def test_clipping_by_hand(how: str, foreach: bool | None, wrapped: Any) -> None:
    """Gradients that left memory are an error, never a norm of 0. DeepSpeed tests/unit/runtime/half_precision/test_fp16.py and
    ColossalAI tests/test_zero/test_gemini/test_grad_clip.py clip by the engine, as max_grad_norm does."""
    model, optimizer = wrapped
    model(inputs(3)[2]).backward()

    def clip() -> Any:
        if how == "norm":
            return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        if how == "value":
            return torch.nn.utils.clip_grad_value_(model.parameters(), 0.1, foreach=foreach)
        if how == "total":
            return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], foreach=foreach)
        return pytest.importorskip("accelerate").Accelerator(cpu=True).clip_grad_norm_(model.parameters(), 0.1)

    with pytest.raises(protrain.StepError, match="max_grad_norm"):
        clip()
    optimizer.step()
    optimizer.zero_grad()
    assert state_of(model) == state_of(plain_after(3))


@pytest.mark.parametrize("how", ["norm", "value"])
def test_clipping_by_hand_where_all_is_in_memory(how: str) -> None:
    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for x in inputs(4):
            loss = model(x)
            loss.backward()
            if how == "norm":
                figures.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            else:
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            figures.append(loss.item())
        return figures

    both(Chain, loop, memory=1 << 30, all_in_memory=True)


# ---- order of calls ----


def test_modes_in_any_order() -> None:
    """Training, evaluation, no_grad, inference_mode, other shapes. DeepSpeed tests/unit/inference and ColossalAI
    tests/test_zero/test_gemini/test_inference.py evaluate between steps."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures = []
        for number, rows in enumerate((8, 3, 17, 1, 8)):
            x, y = inputs(2, rows=rows, seed=number)
            figures += steps([x])(model, optimizer, False)
            with torch.inference_mode():
                figures.append(model(y).item())
                figures.append(model.blocks[number].up.weight.sum().item())
                figures.append(model.blocks[7 - number].up.weight[3:5].norm().item())
            model.eval()
            with torch.no_grad():
                figures.append(model(x, skip=(number,)).item())
            figures.append(model(y).item())
            model.train()
        return figures

    both(Chain, loop)


@pytest.mark.parametrize("where", ["forward", "backward", "gradient", "step"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_is_raised_in_the_middle(where: str, error: type[BaseException]) -> None:
    """The step is skipped, as users do, and training goes on."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        figures, armed = [], []

        def boom(*_: Any) -> None:
            if armed:
                raise error(armed.pop())

        def in_backward(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(boom)

        handle = {
            "forward": lambda: model.blocks[4].down.register_forward_hook(boom),
            "backward": lambda: model.blocks[4].down.register_forward_hook(in_backward),
            "gradient": lambda: model.blocks[4].down.weight.register_hook(boom),
            "step": lambda: optimizer.register_step_pre_hook(boom),
        }[where]()
        for number, x in enumerate(inputs(6)):
            armed[:] = ["boom"] if number in (1, 4) else []
            try:
                loss = model(x)
                loss.backward()
                optimizer.step()
                figures.append(loss.item())
            except error:
                figures.append(None)
            optimizer.zero_grad()
        handle.remove()
        assert figures.count(None) == 2
        return figures

    both(Chain, loop)


def test_one_wrapped_model_feeds_another() -> None:
    """DeepSpeed tests/unit/runtime/test_multiple_models.py, ColossalAI tests/test_zero/test_gemini/test_gemini_use_rmt.py."""

    def train(memory: int | None) -> list[Any]:
        models: list[Any] = [Chain(), Chain()]
        optimizers: list[Any] = [adamw(model) for model in models]
        if memory:
            foreseen = protrain.plan(models[0], inputs(1)[0], memory=memory)
            pairs = [
                protrain.wrap(m, o, memory=memory + 12 * MIB, plan=foreseen) for m, o in zip(models, optimizers, strict=True)
            ]
            optimizers = [optimizer for _, optimizer in pairs]
        figures = []
        for x in inputs(4):
            loss = models[1](models[0](x, loss=False))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            figures.append(loss.item())
        figures += [value.double().sum().item() for model in models for value in model.state_dict().values()]
        if memory:
            assert all(protrain.status(model).disk_read_bytes > 0 for model in models)
            for model in models:
                protrain.unwrap(model)
        return figures

    assert train(TIGHT) == train(None)


def test_wrapping_with_a_wrapped_optimizer_is_refused() -> None:
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    protrain.unwrap(model)
    with pytest.raises(protrain.PlanError, match="one that wrap returned; make a torch optimizer over the model's parameters"):
        protrain.wrap(model, optimizer, memory=TIGHT)


class Around(torch.optim.Optimizer):
    """Leaves the step to another optimizer, as a warm-up of rates does."""

    def __init__(self, inner: Any) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("memory", [TIGHT, 200 * MIB], ids=["on disk", "in memory"])
def test_another_optimizer_over_a_wrapped_model_is_refused(memory: int) -> None:
    """Where all is in memory it would train beside the session, with state that counts nowhere: as a plain Trainer's would."""
    registered = len(_global_optimizer_pre_hooks)
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=memory)
    before = state_of(model)
    model(inputs(1)[0]).sum().backward()
    with pytest.raises(protrain.StepError, match=r"this SGD is to update.*the optimizer that wrap returned"):
        torch.optim.SGD(list(model.parameters())[-1:], lr=1.0).step()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0).step()  # of another model
    assert state_of(model) == before
    around: Any = Around(optimizer)
    around.step()
    optimizer.zero_grad()
    assert protrain.status(model).steps == 1
    protrain.unwrap(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model, _ = protrain.wrap(model, adamw(model), memory=memory)
    del model, optimizer, around, _
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == registered


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Rprop])
@pytest.mark.parametrize("memory", [TIGHT, 200 * MIB], ids=["on disk", "in memory"])
def test_the_optimizer_that_was_given_is_not_used_while_the_model_is_wrapped(
    memory: int, kind: type[torch.optim.Optimizer]
) -> None:
    """Its step would be one without the state that wrap took, which is in no checkpoint; its state dict would be empty."""
    model: Any = Chain()
    given: Any = kind(model.parameters(), lr=1e-3)
    model, optimizer = protrain.wrap(model, given, memory=memory)
    steps(inputs(1))(model, optimizer, False)
    before, state = state_of(model), optimizer.state_dict()
    model(inputs(1)[0]).sum().backward()
    match = f"the {kind.__name__} that was given to wrap.*the optimizer that wrap returned"
    for call in (given.step, given.state_dict, lambda: given.load_state_dict(state)):
        with pytest.raises(protrain.StepError, match=match):
            call()
    optimizer.zero_grad()
    optimizer.load_state_dict(state)
    assert state_of(model) == before
    steps(inputs(2)[1:])(model, optimizer, False)
    plain: Any = Chain()
    steps(inputs(2))(plain, kind(plain.parameters(), lr=1e-3), True)
    assert state_of(model) == state_of(plain)
    protrain.unwrap(model)
    assert not given._optimizer_step_pre_hooks
    assert not given.state_dict()["state"]


def test_a_scheduler_of_the_optimizer_that_was_given(recwarn: pytest.WarningsRecorder) -> None:
    """Made before wrap, it asks that one whether it has made a step."""

    def loop(model: Any, optimizer: Any, plain: bool) -> Any:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if not plain:
            model, optimizer = protrain.wrap(model, optimizer, memory=TIGHT)
        figures = []
        for x in inputs(3):
            steps([x])(model, optimizer, plain)
            schedule.step()
            figures.append(schedule.get_last_lr())
        return figures, state_of(model)

    models: list[Any] = [Chain(), Chain()]
    assert loop(models[0], adamw(models[0]), False) == loop(models[1], adamw(models[1]), True)
    assert not [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)]
    protrain.unwrap(models[0])


@pytest.mark.parametrize("change", ["take out", "add", "exchange"])
def test_parameters_of_groups_that_change_after_wrap_are_refused(change: str) -> None:
    """What is trained with which values was laid out at wrap."""
    model: Any = Chain()
    some = list(model.parameters())
    given = torch.optim.AdamW([{"params": some[:4]}, {"params": some[4:], "lr": 0.1}])
    model, optimizer = protrain.wrap(model, given, memory=TIGHT)
    steps(inputs(1))(model, optimizer, False)
    before = state_of(model)
    one, other = (group["params"] for group in optimizer.param_groups)
    was = list(one), list(other)
    loss = model(inputs(1)[0]).sum()
    if change == "take out":
        other.pop()
    elif change == "add":
        given.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    else:
        loss.backward()
        one[0], other[0] = other[0], one[0]
    match = "parameters were added to its groups, or taken out, after wrap: call protrain.unwrap"
    with pytest.raises(protrain.PlanError, match=match):
        _ = optimizer.step() if change == "exchange" else loss.backward()
    optimizer.zero_grad()
    with pytest.raises(protrain.PlanError, match=match):
        model(inputs(1)[0])
    assert state_of(model) == before
    del optimizer.param_groups[2:]
    one[:], other[:] = was
    steps(inputs(1))(model, optimizer, False)
    protrain.unwrap(model)


def test_models_whose_budgets_are_more_than_there_is_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "free_memory_bytes", lambda: 100 * MIB)
    one, other, third = Chain(), Chain(), Chain()
    one, optimizer = protrain.wrap(one, adamw(one), memory=60 * MIB)
    with pytest.warns(UserWarning, match=r"60.0+ MiB for this model and 60.0+ MiB for the model that is wrapped already"):
        other, _ = protrain.wrap(other, adamw(other), memory=60 * MIB)
    with pytest.warns(UserWarning, match=r"for the 2 models that are wrapped already, together above the 1"):
        third, _ = protrain.wrap(third, adamw(third), memory=60 * MIB)
    protrain.unwrap(other)
    protrain.unwrap(third)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third, _ = protrain.wrap(third, adamw(third), memory=40 * MIB)  # what the first one holds of its own is no less for it
    steps(inputs(1))(one, optimizer, False)
    for model in (one, third):
        protrain.unwrap(model)


def test_wrapping_twice_is_refused(wrapped: Any) -> None:
    model, _ = wrapped
    for given in (model, nn.Sequential(model, nn.Linear(2, 2))):
        with pytest.raises(protrain.PlanError, match="wrapped already"):
            protrain.wrap(given, adamw(given), memory=TIGHT)


@pytest.mark.parametrize("memory", [TIGHT, 200 * MIB], ids=["on disk", "in memory"])
def test_wrapping_a_part_of_a_wrapped_model_is_refused(memory: int) -> None:
    """Whatever fits: two models would each move and update the part that they share. Once the first is unwrapped it can be."""
    first: Any = Chain()
    first, optimizer = protrain.wrap(first, adamw(first), memory=memory)
    tied = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    tied[1].weight = first.head.weight
    shared = [
        (first.blocks[2], "it"),
        (nn.Sequential(nn.Linear(256, 256), first.blocks[0]), "1"),
        (tied, "1.weight"),
    ]
    for given, name in shared:
        with pytest.raises(protrain.PlanError, match=f"^model: {name} is a part of another model that is wrapped, a Chain"):
            protrain.wrap(given, adamw(given), memory=memory)
        with pytest.raises(protrain.PlanError, match="a part of another model"):
            protrain.plan(given, torch.zeros(8, 256), memory=memory)
    steps(inputs(2))(first, optimizer, False)
    assert state_of(protrain.unwrap(first)) == state_of(plain_after(2))
    for given, _ in shared:
        protrain.wrap(given, adamw(given), memory=memory)
        protrain.unwrap(given)


# ---- copies and conversions ----


def test_a_deep_copy_is_a_plain_model(wrapped: Any) -> None:
    """As for an average or a teacher: what is done to either does not reach the other."""
    model, optimizer = wrapped
    made = copy.deepcopy(model)
    part = copy.deepcopy(model.blocks[3])
    assert all(type(p) is nn.Parameter for p in (*made.parameters(), *part.parameters()))
    want = plain_after(2)
    assert state_of(made) == state_of(want)
    assert state_of(part) == state_of(want.blocks[3])  # type: ignore[index]
    with torch.no_grad():
        for p in made.parameters():
            p.zero_()
    (x,) = inputs(1, seed=7)
    assert made(x).item() == 0
    steps(inputs(3)[2:])(model, optimizer, False)
    assert state_of(model) == state_of(plain_after(3))


class Copying(Block):
    """Copies its objects itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Copying:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class Normed(nn.Linear):
    """A layer that is made a parametrized one, whose class copies it, too."""

    def __init__(self) -> None:
        super().__init__(256, 256)
        weight_norm(self)


@pytest.mark.parametrize("kind", [Copying, Normed])
def test_a_deep_copy_of_blocks_whose_class_copies_itself_is_a_plain_one(kind: type[nn.Module]) -> None:
    """It trains, is evaluated and loaded apart from the model that it was copied from."""

    class Copied(Chain):
        block = kind

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures: list[Any] = steps(inputs(2))(model, optimizer, plain)
        with uncounted():
            twin = copy.deepcopy(model)
            figures += steps(inputs(2, seed=2))(model, optimizer, plain)
            with torch.no_grad():
                figures.append(twin(inputs(1)[0]).item())
            figures += steps(inputs(2, seed=3))(twin, adamw(twin), True)
            twin.blocks[3].load_state_dict(copy.deepcopy(twin.blocks[2].state_dict()))
            twin.blocks[4].zero_grad(set_to_none=False)
            figures += list(state_of(twin.double()).items())
        assert not [name for module in twin.modules() for name in vars(module) if name in ("forward", "_apply", "zero_grad")]
        return figures + steps(inputs(2, seed=4))(model, optimizer, plain)

    budget = TIGHT if kind is Copying else 6 * MIB
    both(Copied, loop, memory=budget)


def test_pickles_of_parameters_of_the_model_and_of_the_optimizer(wrapped: Any) -> None:
    model, optimizer = wrapped
    want = dict(plain_after(2).named_parameters())
    for name, p in model.named_parameters():
        for tensor in (p, p.detach(), p.data[:1]):
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            again = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
            assert type(again) in (torch.Tensor, nn.Parameter)
            assert bits(again) == bits(want[name][: tensor.shape[0]])
    for given in (model, model.blocks[2]):
        with pytest.raises(protrain.PlanError, match="state_dict"):
            pickle.dumps(given)
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(protrain.PlanError, match="optimizer cannot be copied or pickled"):
            make(optimizer)


@pytest.mark.parametrize("how", ["half", "bfloat16", "double", "meta", "part"])
def test_conversions_are_refused_and_change_nothing(how: str, wrapped: Any) -> None:
    model, optimizer = wrapped
    convert = {
        "part": lambda: model.blocks[5].to(torch.float16),
        "meta": lambda: model.to("meta"),
    }.get(how) or getattr(model, how)
    with pytest.raises(protrain.PlanError, match="unwrap"):
        convert()
    assert model.float() is model
    assert model.to("cpu") is model
    steps(inputs(3)[2:])(model, optimizer, False)
    assert state_of(model) == state_of(plain_after(3))


def test_data_of_another_type_is_refused(wrapped: Any) -> None:
    model, optimizer = wrapped
    for p in model.parameters():
        if type(p) is not nn.Parameter:
            with pytest.raises(protrain.PlanError, match="float16"):
                p.data = p.detach().half()
    steps(inputs(3)[2:])(model, optimizer, False)
    assert state_of(model) == state_of(plain_after(3))


def test_a_model_whose_parameter_was_given_other_data_can_be_unwrapped() -> None:
    """As transformers' resize_token_embeddings does, unseen where the parameter is in memory: what is refused while the model is
    wrapped says that it is to be unwrapped."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=200 * MIB)
    steps(inputs(2))(model, optimizer, False)
    p, want = model.blocks[1].up.weight, state_of(plain_after(2))
    p.data = torch.ones(3, p.shape[1])
    with pytest.raises(protrain.PlanError, match=r"blocks\.1\.up\.weight of shape .* was given data of shape \(3, "):
        model(inputs(1)[0])
    protrain.unwrap(model)
    assert bits(p) == bits(torch.ones(3, p.shape[1]))
    assert {name: value for name, value in state_of(model).items() if name != "blocks.1.up.weight"} == {
        name: value for name, value in want.items() if name != "blocks.1.up.weight"
    }


def test_state_dicts_in_part(wrapped: Any) -> None:
    model, _ = wrapped
    state = {name: value for name, value in plain_after(1).state_dict().items() if "blocks.2" in name}
    missing, unexpected = model.load_state_dict(state | {"other": torch.ones(1)}, strict=False)
    assert unexpected == ["other"]
    assert len(missing) == len(model.state_dict()) - len(state)
    with pytest.raises(protrain.PlanError, match="assign"):
        model.load_state_dict(state, strict=False, assign=True)
    want = plain_after(2)
    want.load_state_dict(state, strict=False)
    assert state_of(model) == state_of(want)


@pytest.mark.parametrize("change", ["replace", "add"])
def test_parameters_put_in_after_wrap_are_refused(change: str, wrapped: Any, tmp_path: Path) -> None:
    model, optimizer = wrapped
    block = model.blocks[4]
    before = block.up
    if change == "replace":
        block.up = nn.Linear(256, 512)
    else:
        block.adapter = nn.Linear(256, 4)
    with pytest.raises(protrain.PlanError, match=r"blocks\.4\."):
        model(inputs(1)[0])
    with pytest.raises(protrain.PlanError, match=r"blocks\.4\."):
        protrain.save(model, optimizer, tmp_path / "saved")
    if change == "replace":
        block.up = before
    else:
        del block.adapter
    steps(inputs(3)[2:])(model, optimizer, False)
    assert state_of(model) == state_of(plain_after(3))


@pytest.mark.parametrize("by", ["forward", "parts", "hand"])
def test_parameters_of_the_optimizer_that_were_frozen_at_wrap_are_not_left_untrained(by: str) -> None:
    """Plain torch trains them from when they are thawed, or given a gradient: nothing is kept here for that."""
    model: Any = Chain()
    model.blocks[2].requires_grad_(False)
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    steps(inputs(1))(model, optimizer, False)
    before, p = state_of(model), model.blocks[2].up.bias
    frozen = r"parameter blocks\.2\.\S+ was frozen at wrap.*: call protrain\.unwrap\(model\), change it, and wrap it again"
    if by == "hand":
        p.grad = torch.ones_like(p)
    else:
        model.blocks[2].requires_grad_(True)
    if by == "parts":
        x = inputs(1)[0]
        for block in model.blocks:
            x = block(x)
        x.sum().backward()
    with pytest.raises(protrain.PlanError, match=frozen):
        _ = model(inputs(1)[0]) if by == "forward" else optimizer.step()
    with torch.no_grad():
        model(inputs(1)[0])
    model.zero_grad()
    p.grad = None
    assert state_of(model) == before
    model.requires_grad_(True)
    model = protrain.unwrap(model)
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    steps(inputs(1))(model, optimizer, False)
    assert state_of(model)["blocks.2.up.bias"] != before["blocks.2.up.bias"]
    protrain.unwrap(model)


class Forces(Block):
    """A gradient of its own is a part of what it gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(torch.tanh(self.up(y)).square().sum(), y, create_graph=True)
        return super().forward(nn.functional.dropout(x, 0.1)) + 0.1 * force


class ForcesChain(Chain):
    block = Forces


@pytest.mark.parametrize("mode", ["swap", "checkpoint", "checkpoint_swap"])
def test_blocks_that_take_gradients_in_their_forward(mode: str) -> None:
    both(ForcesChain, steps(inputs(3)), memory=40 * MIB, block_modes=[mode] * 8)


class Noisy(Block):
    """Its forward saves noise that torch draws afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.leaky = nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.leaky(super().forward(x))
        return y


class NoisyChain(Chain):
    block = Noisy


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint", "checkpoint_swap"])
def test_noise_that_is_drawn_after_it_was_saved(mode: str) -> None:
    """It was what lay there before, in backward of blocks that swap or whose recomputation ends with it."""
    if mode == "keep":
        both(NoisyChain, steps(inputs(3)), memory=40 * MIB, block_modes=[mode] * 8)
        return
    with pytest.raises(protrain.PlanError, match=r"block blocks\.0 .*RReLU.*block_modes with keep"):
        both(NoisyChain, steps(inputs(3)), memory=40 * MIB, block_modes=[mode] * 8)


class Twofold(Chain):
    """Its forward calls itself, without gradients, before its blocks run."""

    def forward(self, x: torch.Tensor, *, skip: Any = (), loss: bool = True) -> torch.Tensor:
        if not loss:
            return super().forward(x, skip=skip, loss=False)
        with torch.no_grad():
            target = self(x, skip=range(1, 8), loss=False)
        y = super().forward(x, loss=False)
        return (y - target).square().mean()


def test_a_forward_inside_of_a_forward_leaves_its_blocks_their_modes() -> None:
    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        figures = steps(inputs(2, rows=256))(model, optimizer, plain)
        assert plain or session_of(model).engine.stats()["stash_record_count"] > 0
        return figures

    both(Twofold, loop, all_in_memory=True, memory=1 << 30, block_modes=["swap"] * 8)


class Rounds(nn.ModuleList):
    """Layers that a model runs twice, each with one number."""

    def __getitem__(self, index: Any) -> Any:
        return list(self) if isinstance(index, slice) else super().__getitem__(index)

    def __iter__(self) -> Any:
        return iter([*self._modules.values(), *self._modules.values()])


class Looks(nn.Embedding):
    """At values of its own, which nobody can foresee."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (1 if self.weight.detach().numpy().any() else 2)


def rounds(foreseen: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=128,
        max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.layers = Rounds(list(model.model.layers))
    if not foreseen:
        model.model.embed_tokens = Looks(128, 128)
    return model


@pytest.mark.parametrize("mode", [None, "keep", "checkpoint"])
def test_keys_that_a_block_reads_in_a_second_round_are_there(mode: str | None, token_batches: Any) -> None:
    memory, modes = (10 * MIB, None) if mode is None else (1 << 30, [mode] * 4)
    loop = fit([batch % 128 for batch in token_batches(3)])
    assert_equal(run(rounds, loop, memory=memory, block_modes=modes), run(rounds, loop), memory)


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")
def test_keys_that_were_dropped_are_not_read_where_nothing_was_foreseen(token_batches: Any) -> None:
    (ids,) = (batch % 128 for batch in token_batches(1))
    model: Any = rounds(foreseen=False)
    with uncounted():
        want = rounds(foreseen=False)(input_ids=ids, labels=ids).loss.item()  # type: ignore[operator]
    model, _ = protrain.wrap(model, adamw(model), memory=1 << 30)
    with pytest.raises(protrain.StepError, match=r"layers\.0 runs twice in one forward, .* from now on they stay"):
        model(input_ids=ids, labels=ids)
    assert model(input_ids=ids, labels=ids).loss.item() == want
    protrain.unwrap(model)


def test_what_is_foreseen_is_seen_by_no_mode_of_users() -> None:
    """A counter of operations counts those of the step alone."""

    def counts(wrap: bool) -> list[int]:
        model: Any = Chain()
        optimizer: Any = adamw(model)
        if wrap:
            model, optimizer = protrain.wrap(model, optimizer, memory=1 << 30, block_modes=["keep"] * 8)
        found = []
        for x in inputs(2):
            with FlopCounterMode(display=False) as counter:
                loss = model(x)
            found.append(counter.get_total_flops())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert counts(True) == counts(False)


# ---- other wrappers ----


def _listed(read: Any) -> Any:
    """Hooks that keep what they are given in a list of their own."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda number: read(kept[number]))


def _pickled(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


SAVING: dict[str, Any] = {
    "as it is": lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "rounded": lambda: torch.autograd.graph.saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float),
    "rounded later": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor, lambda tensor: tensor.bfloat16().float()
    ),
    "a view": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (tensor.detach().flatten(), tensor.shape), lambda saved: saved[0].view(saved[1])
    ),
    "in a list": lambda: _listed(lambda tensor: tensor),
    "copied from a list": lambda: _listed(torch.clone),
    "in a file": lambda: torch.autograd.graph.saved_tensors_hooks(_pickled, lambda data: torch.load(io.BytesIO(data))),
    "on the CPU": torch.autograd.graph.save_on_cpu,
}


@pytest.mark.filterwarnings("ignore:protrain cannot foresee")
@pytest.mark.parametrize("mode", ["keep", "checkpoint"])
@pytest.mark.parametrize("how", SAVING)
def test_hooks_of_users_inside_blocks(how: str, mode: str) -> None:
    """They get parameters too, on disk or not, and what they make of them is what backward computes with."""

    class Saving(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with SAVING[how]():
                y = self.down(torch.tanh(self.up(x.contiguous())))
            return super().forward(x + y)

    class SavingChain(Chain):
        block = Saving

    both(SavingChain, steps(inputs(3)), block_modes=[mode] * 8, memory=40 * MIB)


class Checkpointing(Block):
    """Recomputes a part of itself."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return y


class Reentrant(Checkpointing):
    def __init__(self) -> None:
        super().__init__()
        self.reentrant = True


class CheckpointingChain(Chain):
    block = Checkpointing


class ReentrantChain(Chain):
    block = Reentrant

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        y: torch.Tensor = super().forward(x.requires_grad_(), **given)
        return y


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint"])
def test_checkpoints_inside_blocks(mode: str) -> None:
    both(CheckpointingChain, steps(inputs(4)), block_modes=[mode] * 8)


@pytest.mark.parametrize("accumulate", [1, 20])
@pytest.mark.parametrize("mode", ["keep", "checkpoint"])
def test_reentrant_checkpoints_are_refused(mode: str, accumulate: int) -> None:
    model: Any = ReentrantChain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, block_modes=[mode] * 8, accumulate=accumulate)
    (x,) = inputs(1)
    loss = model(x)
    with pytest.raises(protrain.StepError, match=r"made by CheckpointFunction\.backward of .*: pass use_reentrant=False"):
        loss.backward()
    optimizer.zero_grad()
    for block in model.blocks:
        block.reentrant = False
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    got = state_of(model)
    protrain.unwrap(model)
    assert got == state_of(plain_after(1))


def test_a_forward_in_a_hook_on_a_gradient_is_refused_where_it_records(wrapped: Any) -> None:
    model, optimizer = wrapped
    protrain.unwrap(model)
    _, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, block_modes=["keep", *["checkpoint"] * 7])
    x, other = inputs(2)

    def records(grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return grad * model(other)

    y = model(x, loss=False)
    y.register_hook(records)
    with pytest.raises(protrain.PlanError, match=r"blocks\.1 of mode checkpoint runs inside a backward pass, as in a hook"):
        y.sum().backward()
    optimizer.zero_grad()
    y = model(x, loss=False)
    y.register_hook(lambda grad: grad * model(other))
    y.sum().backward()
    optimizer.zero_grad()


class Reverse(torch.autograd.Function):
    """Runs a layer again in its backward, as reversible layers do. `accumulates`: its gradients, instead of returning them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module, accumulates: bool, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.layer, ctx.accumulates = layer, accumulates
        y: torch.Tensor = layer(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        if ctx.accumulates:
            torch.autograd.backward(y, grad)
            return x.grad, *[None] * (2 + len(ctx.saved_tensors) - 1)
        found = torch.autograd.grad(y, (x, *ctx.layer.parameters()), grad)
        return found[0], None, None, *found[1:]


class Reversible(Chain):
    accumulates = True

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        for block in self.blocks:
            x = x + Reverse.apply(x, block, self.accumulates, *block.parameters())
        return self.head(x).square().mean()


class Returning(Reversible):
    accumulates = False


def test_reversible_layers_return_their_gradients_or_are_refused() -> None:
    both(Returning, steps(inputs(3)), block_modes=["keep"] * 8)
    model: Any = Reversible()
    model, _ = protrain.wrap(model, adamw(model), memory=TIGHT, block_modes=["keep"] * 8)
    loss = model(inputs(1)[0].requires_grad_())
    with pytest.raises(protrain.StepError, match=r"made by Reverse\.backward of .*: .* by torch\.autograd\.grad"):
        loss.backward()
    protrain.unwrap(model)


def test_autocast() -> None:
    """bf16 products over fp32 parameters. DeepSpeed tests/unit/runtime/test_autocast.py."""

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    both(Chain, steps(inputs(5), loss_of), room=16 * MIB)


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint"])
def test_functional_calls(mode: str) -> None:
    """torch.func: parameters given by the caller are those that are used; transforms over those on disk are refused."""
    model: Any = Chain()
    given = {name: p.detach().clone() * 0.5 for name, p in model.named_parameters()}
    (x,) = inputs(1, seed=5)

    def called(p: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(model, p, (x,))

    want = called(given).item(), {name: bits(value) for name, value in torch.func.grad(called)(given).items()}
    modes = [mode] * len(find_blocks(model))
    foreseen = protrain.plan(model, x, memory=TIGHT, block_modes=modes)
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT + 32 * MIB, plan=foreseen)
    got = called(given).item(), {name: bits(value) for name, value in torch.func.grad(called)(given).items()}
    assert got == want
    with torch.no_grad(), pytest.raises(protrain.PlanError, match="functional_call"):
        torch.vmap(lambda row: model(row[None], loss=False))(x)
    steps(inputs(2))(model, optimizer, False)
    assert state_of(model) == state_of(plain_after(2))
    protrain.unwrap(model)


def test_a_transform_where_memory_is_short_is_refused_by_its_own_name() -> None:
    """Before its forward, memory that a failed backward holds is looked for, by one of nothing: torch has none in a transform."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT, block_modes=["keep"] * 8)
    steps(inputs(1))(model, optimizer, False)
    with counted(session_of(model).engine, session_of(model).wrapped.compute):
        held = torch.empty((TIGHT - protrain.status(model).memory_bytes) // 4 - 65536)
    with uncounted():
        bias, (x,) = torch.zeros(256), inputs(1)
    with pytest.raises(protrain.PlanError, match=r"torch\.func\.functional_call"):
        torch.func.grad(lambda bias: torch.func.functional_call(model, {"head.bias": bias}, (x,)))(bias)
    del held
    protrain.unwrap(model)


@pytest.mark.parametrize("mode", ["keep", "swap", "checkpoint", "checkpoint_swap"])
def test_forward_mode_differentiation(mode: str) -> None:
    """Its tangents of parameters are zeros that lie in no memory."""

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.flip(0)), loss=False)).tangent
            assert tangent is not None
            tangents.append(bits(tangent))
        loss: torch.Tensor = model(x)
        return loss

    tangents: list[bytes] = []
    both(Chain, steps(inputs(2), loss_of), block_modes=[mode] * 8)
    assert tangents[:2] == tangents[2:]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap, torch.func.jacrev], ids=lambda found: found.__name__)
def test_transforms_of_parameters_on_disk_are_refused(transform: Any, wrapped: Any) -> None:
    """They wrap what they are given where no parameter is brought: other bytes may lie there."""
    model, _ = wrapped
    on_disk = [p for p in model.parameters() if type(p) is not nn.Parameter]
    assert on_disk
    for p in on_disk:
        with pytest.raises(protrain.PlanError, match=r"p\.detach\(\)\.clone\(\)"):
            transform(lambda value: (value * value).sum())(p)
        with uncounted():
            own = p.detach().clone()
            torch.func.grad(lambda value: (value * value).sum())(own)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused(layout: torch.layout, wrapped: Any) -> None:
    model, optimizer = wrapped
    rows = list(inputs(1)[0].split([3, 5]))
    with pytest.raises(protrain.PlanError, match=r"nested tensor .*torch\.nested\.to_padded_tensor") as raised:
        model(torch.nested.nested_tensor(rows, layout=layout))
    assert "\n" not in str(raised.value)
    steps(inputs(3)[2:])(model, optimizer, False)
    assert state_of(model) == state_of(plain_after(3))


def test_operations_on_two_wrapped_models() -> None:
    """Averages, merged and copied models: each parameter is brought by its own model's session."""
    with uncounted():
        plain = [plain_after(1), plain_after(2)]
    models = []
    for count in (1, 2):
        model: Any = Chain()
        model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
        steps(inputs(count))(model, optimizer, False)
        models.append(model)
    with torch.no_grad(), uncounted():
        for x, y, a, b in zip(*(found.parameters() for found in (*models, *plain)), strict=True):
            assert bits(x - y) == bits(a - b)
            assert bits(torch.cat([y.flatten(), x.flatten()])) == bits(torch.cat([b.flatten(), a.flatten()]))
            x.lerp_(y, 0.25)
            a.lerp_(b, 0.25)
    assert state_of(models[0]) == state_of(plain[0])
    assert state_of(models[1]) == state_of(plain[1])
    pairs = zip(*(found.parameters() for found in models), strict=True)
    x, y = next(pair for pair in pairs if all(type(p) is not nn.Parameter for p in pair))
    with pytest.raises(protrain.PlanError, match="two wrapped models"):
        x * y
    for model in models:
        protrain.unwrap(model)


def test_what_is_allocated_after_a_refused_batch_is_the_users(wrapped: Any) -> None:
    model, optimizer = wrapped
    with pytest.raises(protrain.BudgetError):
        model(torch.randn(1 << 14, 256))
    after = [torch.zeros(TIGHT // 4) for _ in range(4)]  # four budgets
    model(inputs(3)[2]).backward()
    optimizer.zero_grad()
    after += [torch.zeros(TIGHT // 4) for _ in range(4)]
    del after
    steps(inputs(3)[2:])(model, optimizer, False)
    assert state_of(model) == state_of(plain_after(3))


def test_what_is_allocated_after_a_forward_that_nobody_wants_is_the_users(wrapped: Any) -> None:
    model, optimizer = wrapped
    loss = model(inputs(3)[2])
    optimizer.zero_grad()  # a backward comes yet
    loss.backward()
    optimizer.zero_grad()
    del loss
    model(inputs(3)[2])
    optimizer.zero_grad()
    after = [torch.zeros(TIGHT // 4) for _ in range(4)]  # four budgets
    del after
    steps(inputs(3)[2:])(model, optimizer, False)
    assert state_of(model) == state_of(plain_after(3))


def test_a_write_that_is_refused_changes_nothing(wrapped: Any) -> None:
    """While gradients wait parameters on disk cannot be written; what the operation left in a slot is not read."""
    model, optimizer = wrapped
    x = inputs(3)[2]
    refused = 0
    for name, p in model.named_parameters():
        model(x).backward()
        before = bits(p.detach())
        with torch.no_grad():
            try:
                p.mul_(2)
                p.mul_(0.5)
            except protrain.StepError:
                refused += 1
        assert bits(p.detach()) == before, name
        optimizer.zero_grad()
    assert refused > 10
    steps([x])(model, optimizer, False)
    assert state_of(model) == state_of(plain_after(3))


def test_a_state_dict_is_loaded_whole_or_not_at_all(wrapped: Any) -> None:
    model, optimizer = wrapped
    before = state_of(model)
    with uncounted():
        other = {name: value + 1 for name, value in model.state_dict().items()}
    model(inputs(3)[2]).backward()
    with pytest.raises(protrain.StepError, match=r"load_state_dict in the middle of a step: call optimizer.step\(\)"):
        model.load_state_dict(other)
    assert state_of(model) == before
    optimizer.zero_grad()
    model.load_state_dict(other)
    assert state_of(model) == {name: bits(value) for name, value in other.items()}


@pytest.mark.parametrize("where", ["hooks", "chunk"])
def test_an_interrupt_in_a_later_forward_of_a_step(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it kept from being undone is undone, and what the passes before it gave stays: the forward can be made again."""

    def interrupt(*arguments: Any) -> None:
        if len(interrupts) <= step:
            interrupts.append(step)
            raise KeyboardInterrupt
        call(*arguments)

    model: Any = Chain()
    options: dict[str, Any] = {"memory": TIGHT, "accumulate": 2, "block_modes": ["checkpoint"] * 8}
    model, optimizer = protrain.wrap(model, adamw(model), **options)
    session = session_of(model)
    with uncounted():
        plain = Chain()
        plain_optimizer = adamw(plain)
    interrupts: list[int] = []
    call: Any = activations.pop if where == "hooks" else session.engine.unuse
    for step in range(3):
        one, other = inputs(2, seed=step)
        model(one).backward()
        with monkeypatch.context() as patch:
            if where == "hooks":
                patch.setattr(activations, "pop", interrupt)
            else:
                patch.setattr(session.runner, "_engine", SimpleNamespace(commits=session.engine.commits, unuse=interrupt))
            with pytest.raises(KeyboardInterrupt):
                model(other)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        model(other).backward()
        optimizer.step()
        optimizer.zero_grad()
        with uncounted():
            for x in (one, other):
                plain(x).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        assert state_of(model) == state_of(plain)
    assert interrupts == [0, 1, 2]
    assert protrain.status(model).peak_memory_bytes <= TIGHT
    protrain.unwrap(model)


def test_an_interrupt_as_backward_begins(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After zero_grad() what is allocated is the user's."""

    def interrupt(_clock: Any) -> None:
        raise KeyboardInterrupt

    model, optimizer = wrapped
    with monkeypatch.context() as patch:
        patch.setattr(BlockClock, "_backward_over", property(interrupt))
        with pytest.raises(KeyboardInterrupt):
            model(inputs(1)[0]).backward()
    optimizer.zero_grad()
    after = torch.zeros(TIGHT // 2)  # two budgets
    steps(inputs(3)[2:])(model, optimizer, False)
    assert state_of(model) == state_of(plain_after(3))
    del after


def test_an_interrupt_just_after_a_step_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts, all of it; gradients that chunks in memory were updated with are never added to, nor used again, silently.
    (interrupts.py has all places.)"""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=1 << 30)
    (x,) = inputs(1)
    model(x).backward()
    session = session_of(model)
    engine = session.engine

    class Interrupted:
        """The engine, and the signal that came while it made the step."""

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def make_step(self, *args: Any) -> None:
            engine.make_step(*args)
            raise KeyboardInterrupt

    monkeypatch.setattr(session.updates, "_engine", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    assert protrain.status(model).steps == 1
    assert state_of(model) == state_of(plain_after(1))
    for _ in range(2):
        with pytest.raises(protrain.StepError, match="zero_grad"):
            optimizer.step()
        model(x).backward()
    optimizer.zero_grad()
    steps(inputs(3)[1:])(model, optimizer, False)
    assert state_of(model) == state_of(plain_after(3))
    protrain.unwrap(model)


@pytest.mark.parametrize("last", ["step", "grad", "failed backward"])
def test_a_wrapped_model_that_is_dropped_is_gone(last: str) -> None:
    """Also where nothing came after the last backward that let go of what it read from disk."""
    model: Any = Chain()
    model, optimizer = protrain.wrap(model, adamw(model), memory=TIGHT)
    steps(inputs(2))(model, optimizer, False)
    x = inputs(1)[0].requires_grad_()
    if last == "grad":
        torch.autograd.grad(model(x), x)
    elif last == "failed backward":
        x.register_hook(lambda grad: grad.view(-1, 7))
        with pytest.raises(RuntimeError, match="shape"):
            torch.autograd.grad(model(x), x)
    session = weakref.ref(session_of(model))
    threads = len(os.listdir("/proc/self/task"))
    del model, optimizer
    gc.collect()
    assert session() is None
    assert len(os.listdir("/proc/self/task")) < threads


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.randn(256, generator=torch.Generator().manual_seed(number))


def test_a_loader_with_workers(fresh_disk: Path) -> None:
    """They are forked while the model is wrapped and a step is under way, and live beside the steps of two epochs."""

    def loop(model: Any, optimizer: Any, _plain: bool) -> list[Any]:
        loader = torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=2, persistent_workers=True)
        loss = model(inputs(1)[0])
        others = set(multiprocessing.active_children())
        first = iter(loader)
        workers = set(multiprocessing.active_children()) - others
        assert len(workers) == 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        figures = [loss.item()]
        for epoch in (first, loader):
            for x in epoch:
                figures += steps([x])(model, optimizer, False)
                assert workers <= set(multiprocessing.active_children())
        return figures

    both(Chain, loop, disk=fresh_disk, block_modes=["swap"] * 8)


# ---- adapters ----


def adapted(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config)


class Configured(Chain):
    """A Chain as peft takes it."""

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        y: torch.Tensor = super().forward(x, **{name: value for name, value in given.items() if name in ("skip", "loss")})
        return y


def test_adapters_on_a_frozen_base(tmp_path: Any) -> None:
    """peft's LoRA: switched off, saved, merged and taken apart again while wrapped. DeepSpeed
    tests/unit/runtime/zero/test_zero.py and tests/unit/linear, adapters over frozen weights."""
    from safetensors.torch import load_file

    def loop(model: Any, optimizer: Any, plain: bool) -> list[Any]:
        (y,) = inputs(1, seed=9)
        figures = steps(inputs(3))(model, optimizer, False)
        with model.disable_adapter(), torch.no_grad():
            figures.append(model(y).item())
        folder = tmp_path / str(plain)
        model.save_pretrained(folder)
        figures += [(name, bits(value)) for name, value in sorted(load_file(folder / "adapter_model.safetensors").items())]
        figures += steps(inputs(2, seed=4))(model, optimizer, False)
        model.merge_adapter()
        with torch.no_grad():
            figures.append(model(y).item())
        model.unmerge_adapter()
        return [*figures, *steps(inputs(2, seed=5))(model, optimizer, False)]

    def trained(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)

    def make() -> Any:
        model = Configured()
        model.blocks.extend([Block() for _ in range(8)])
        return adapted(model)

    both(make, loop, trained, room=8 * MIB)


def test_a_forward_of_its_own_stands_again() -> None:
    """What a user put in place of a module's forward runs while it is wrapped, after unwrap, and in copies."""
    model: Any = Chain()
    for module in (model, model.blocks[2]):
        module.forward = MethodType(lambda self, x: type(self).forward(self, x) * 3, module)
    x = inputs(1)[0]
    want, names = model(x).item(), [list(module.__dict__) for module in model.modules()]
    model, _ = protrain.wrap(model, adamw(model), memory=TIGHT)
    with torch.no_grad():
        assert model(x).item() == want
        twin = copy.deepcopy(model)
        assert twin(x).item() == want
    protrain.unwrap(model)
    assert model(x).item() == want
    for changed in (model, twin):
        assert [sorted(module.__dict__) for module in changed.modules()] == [sorted(found) for found in names]


# ---- training without a call of the model ----


def test_a_step_by_parts_of_the_model_is_exact_and_says_that_nothing_is_planned(wrapped: Any) -> None:
    model, optimizer = wrapped

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
        for block in model.blocks:
            x = block(x)
        model.head(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    x, other = inputs(4)[2:]
    with pytest.warns(UserWarning, match=r"without a call of the model itself.*Call model\(\.\.\.\)"):
        step(model, optimizer, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        step(model, optimizer, other)
    with uncounted():
        plain = Chain()
        expected = adamw(plain)
        steps(inputs(2))(plain, expected, True)
        step(plain, expected, x)
        step(plain, expected, other)
    assert state_of(model) == state_of(plain)
