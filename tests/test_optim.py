"""The update kernels against torch's optimizers, bit for bit.

Every variant of the kernels (plain, AVX2, AVX-512, the chosen one) must give the parameters and the state that
`torch.optim.Adam`, `AdamW` and `SGD` give, with `fused=True` and without, for every size of a parameter, also in its last few
elements, which torch's fused kernels round differently, and with every number of torch threads. A NaN equals any NaN.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from protrain import _core

KINDS: dict[str, type[torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
STATES = {"adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "sgd": ("momentum_buffer",)}
STATES["adamw"] = STATES["adam"]

CAPABILITY = torch.backends.cpu.get_cpu_capability()
SIMDS = {"AVX2": ("plain", "avx2", "auto"), "AVX512": ("plain", "avx2", "avx512", "auto")}.get(CAPABILITY, ())

#: Every length of a tail, with and without vectors before it, and sizes that two threads share.
COUNTS = (*range(1, 41), 100, 255, 1000, 1023, 4099)

pytestmark = pytest.mark.skipif(not SIMDS, reason=f"torch's reference kernels need AVX2, it runs with {CAPABILITY}")


@pytest.fixture(params=["fused", "loop"])
def rounding(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of torch's optimizer: its fused kernels, or a loop over parameters, which is its default."""
    return {"fused": True} if request.param == "fused" else {}


@pytest.fixture(params=[1, 2])
def reference_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run torch with this number of threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def update(
    kind: str,
    group: dict[str, Any],
    step: int,
    grad_scale: float,
    param: torch.Tensor,
    state: list[torch.Tensor],
    grad: torch.Tensor,
    simd: str,
) -> None:
    """Update param and state in place with the core's kernel; group is a torch parameter group."""
    hyper: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "maximize": group["maximize"]}
    hyper |= {"fused": bool(group["fused"]), "lr_is_float": getattr(group["lr"], "dtype", None) == torch.float32}
    if kind == "sgd":
        hyper |= {name: group[name] for name in ("momentum", "dampening", "nesterov")}
    else:
        hyper |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"], "amsgrad": group["amsgrad"]}
    buffers = [array.numpy() for array in state]
    _core.update(kind, hyper, step, grad_scale, param.numpy(), buffers, grad.numpy(), simd=simd)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor, zeros_alike: bool = False) -> bool:
    """Whether all elements agree in every bit, or are NaN on both sides, or, where they are alike, zeros."""
    equal = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    if zeros_alike:
        equal |= (ours == 0) & (theirs == 0)
    return bool(equal.all())


class Twin:
    """One torch optimizer over parameters of the given sizes, and for each kernel variant a copy of them."""

    def __init__(self, kind: str, counts: tuple[int, ...], seed: int, options: dict[str, Any]) -> None:
        self.kind = kind
        self.generator = torch.Generator().manual_seed(seed)
        self.params = [torch.nn.Parameter(self.normal(count)) for count in counts]
        self.optimizer = KINDS[kind](self.params, **options)
        self.group = self.optimizer.param_groups[0]
        n_state = int(self.group["momentum"] != 0) if kind == "sgd" else 2 + int(self.group["amsgrad"])
        self.names = STATES[kind][:n_state]
        self.copies = {
            simd: [(p.detach().clone(), [torch.zeros(p.shape) for _ in self.names]) for p in self.params] for simd in SIMDS
        }
        self.steps = 0
        #: With weight 1 torch's loop gives zeros a sign by where an element lies in the part of a thread.
        self.zeros_alike = not self.group["fused"] and self.group.get("betas", (1,))[0] == 0

    def normal(self, count: int) -> torch.Tensor:
        """Normal values of very different sizes."""
        exponents = torch.randint(-6, 3, (count,), generator=self.generator)
        return torch.randn(count, generator=self.generator) * 10.0**exponents

    def start_at(self, step: int) -> None:
        """Let the next step have the number step + 1 (after a first step)."""
        self.steps = step
        for state in self.optimizer.state.values():
            state["step"].fill_(step)

    def step(self, grads: list[torch.Tensor], grad_scale: float = 1.0) -> None:
        """One step of torch and of every variant; they must agree."""
        self.steps += 1
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone().mul_(grad_scale) if grad_scale != 1 else grad.clone()
        self.optimizer.step()
        for simd, copies in self.copies.items():
            for (ours, state), grad, reference in zip(copies, grads, self.params, strict=True):
                before = grad.clone()
                update(self.kind, self.group, self.steps, grad_scale, ours, state, grad, simd)
                where = f"{simd}, {ours.numel()} elements, step {self.steps}"
                assert same_bits(grad, before), f"the gradient changed: {where}"
                for name, array in zip(self.names, state, strict=True):
                    assert same_bits(array, self.optimizer.state[reference][name], self.zeros_alike), f"{name}: {where}"
                assert same_bits(ours, reference.detach(), self.zeros_alike), f"parameter: {where}"

    def random_steps(self, n_steps: int, grad_scale: float = 1.0) -> None:
        for _ in range(n_steps):
            self.step([self.normal(param.numel()) for param in self.params], grad_scale)


CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, options) for kind in ("adam", "adamw") for options in (
        {},
        {"lr": 0.01, "weight_decay": 0.0},
        {"lr": 0.01, "weight_decay": 0.1},
        {"lr": 0.01, "weight_decay": 0.1, "maximize": True},
        {"lr": 0.01, "weight_decay": 0.0, "maximize": True},
        {"lr": 0.01, "amsgrad": True},
        {"lr": 0.01, "amsgrad": True, "weight_decay": 0.3, "maximize": True},
        {"lr": 0.02, "betas": (0.0, 0.0), "weight_decay": 0.01},
        {"lr": 0.02, "betas": (0.5, 0.0)},
        {"lr": 0.02, "betas": (0.2, 0.9), "amsgrad": True, "weight_decay": 0.2},
        {"lr": 0.02, "betas": (0.3, 0.7), "maximize": True},
        {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 0.0},
        {"lr": 3e-4, "betas": (0.95, 0.9999), "eps": 1.0},
        {"lr": 0.0, "weight_decay": 0.1},
    )),
    *(("sgd", options) for options in (
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.1},
        {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "maximize": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01, "maximize": True},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True},
        {"lr": 0.1, "momentum": 0.7, "nesterov": True, "weight_decay": 0.02},
        {"lr": 0.1, "momentum": 0.7, "nesterov": True, "weight_decay": 0.02, "maximize": True},
    )),
]  # fmt: skip


def case_name(value: object) -> str:
    """A readable test name for a case's options."""
    return ",".join(f"{k}={v}" for k, v in value.items()) or "defaults" if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=case_name)
def test_every_size_equals_torch(kind: str, options: dict[str, Any], rounding: dict[str, Any], reference_threads: int) -> None:
    Twin(kind, COUNTS, seed=len(options), options=options | rounding).random_steps(4)


@pytest.mark.parametrize("kind", KINDS)
def test_foreach_is_the_loop(kind: str) -> None:
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "foreach": True} | ({"momentum": 0.9} if kind == "sgd" else {})
    Twin(kind, COUNTS, seed=8, options=options).random_steps(4)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=case_name)
def test_special_values_equal_torch(kind: str, options: dict[str, Any], rounding: dict[str, Any], reference_threads: int) -> None:
    """Zeros of both signs, denormals, the largest numbers, infinities and NaN, in gradients and parameters, everywhere."""
    values = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-38, 1e-30, 1e-19, -1e-19, 1.0, -1.0, 1e19, -1e19, 3e38, -3e38]
        + [float("inf"), -float("inf"), float("nan")]
    )
    twin = Twin(kind, (5, 7, 8, 13, 15, 31, 400, 403), seed=1, options=options | rounding)

    def special(count: int) -> torch.Tensor:
        return values[torch.randint(len(values), (count,), generator=twin.generator)]

    with torch.no_grad():
        for i, param in enumerate(twin.params[::2]):
            param.copy_(special(param.numel()))
            for copies in twin.copies.values():
                copies[2 * i][0].copy_(param)
    for _ in range(5):
        twin.step([special(param.numel()) for param in twin.params])


@pytest.mark.parametrize("kind", KINDS)
def test_random_settings_equal_torch(kind: str, rounding: dict[str, Any], reference_threads: int) -> None:
    """Settings with full mantissas: what is computed in double and then rounded is computed as torch does it."""
    draw = random.Random(7)
    for seed in range(40):
        options: dict[str, Any] = {"lr": 10 ** draw.uniform(-5, 0), "maximize": draw.random() < 0.5}
        options["weight_decay"] = draw.choice([0.0, 10 ** draw.uniform(-4, 0)])
        if kind == "sgd":
            options |= {"momentum": draw.choice([0.0, draw.random()])}
            options["nesterov"] = options["momentum"] != 0 and draw.random() < 0.5
            options["dampening"] = 0.0 if options["nesterov"] else draw.random()
        else:
            options |= {"betas": (draw.random(), draw.random()), "eps": 10 ** draw.uniform(-12, -2)}
            options["amsgrad"] = draw.random() < 0.5
        Twin(kind, (3, 23, 64, 517), seed, options | rounding).random_steps(3)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_share_a_large_parameter(kind: str, rounding: dict[str, Any], reference_threads: int) -> None:
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1} | ({"momentum": 0.9} if kind == "sgd" else {})
    Twin(kind, (65536, 100_003, 300_007), seed=3, options=options | rounding).random_steps(2)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_scale_comes_first(kind: str, rounding: dict[str, Any]) -> None:
    """As `grad.mul_(scale)` before the step: rounded, then weight decay, momentum and the rest."""
    momentum = {"momentum": 0.9, "dampening": 0.2} if kind == "sgd" else {}
    for maximize in (False, True):
        options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "maximize": maximize, **momentum}
        twin = Twin(kind, COUNTS, seed=4, options=options | rounding)
        for scale in (0.1, 1.0, 1e-30, 0.7310585):
            twin.random_steps(1, grad_scale=float(torch.tensor(scale)))


@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize("step", [2, 9, 1000, 123_456, 2**24 - 2, 2**24 + 2])
def test_late_steps_equal_torch(kind: str, step: int, rounding: dict[str, Any]) -> None:
    """Bias corrections far from the start, and where torch's float32 counter no longer counts."""
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99999), "weight_decay": 0.1}
    twin = Twin(kind, (5, 23, 400), seed=step, options=options | rounding)
    twin.random_steps(1)
    twin.start_at(step)
    twin.random_steps(3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensor_lr_equals_torch(kind: str, dtype: torch.dtype, rounding: dict[str, Any]) -> None:
    """Its value to the fused kernels, while the loop computes in its type."""
    options: dict[str, Any] = {"lr": torch.tensor(0.0123, dtype=dtype), "weight_decay": 0.1}
    Twin(kind, COUNTS, seed=5, options=options | rounding).random_steps(3)


@pytest.mark.parametrize("kind", KINDS)
def test_lr_changes_between_steps(kind: str, rounding: dict[str, Any]) -> None:
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1} | ({"momentum": 0.9} if kind == "sgd" else {})
    twin = Twin(kind, COUNTS, seed=6, options=options | rounding)
    for lr in (0.1, 0.05, 1 / 3, 0.0):
        twin.group["lr"] = lr
        twin.random_steps(1)


def test_step_zero_is_refused() -> None:
    param, grad = torch.ones(4), torch.ones(4)
    with pytest.raises(ValueError, match="steps count from 1"):
        update("sgd", torch.optim.SGD([param], lr=0.1).param_groups[0], 0, 1.0, param, [], grad, "auto")
    assert same_bits(param, torch.ones(4))
