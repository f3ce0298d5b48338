"""Random small models under random training programs, in plain torch and wrapped: the same bits, inside the budget.

    python tests/random_training.py --seconds 60 --seed 1

Each seed is a case: blocks made of random parts, how blocks are called, an optimizer, and a program of steps, evaluations,
freezing, saving, wrapping again under another budget and so on. What both runs found is compared bit for bit. A case that does
not hold is told in its smallest form that still fails, and its seed reproduces it: --seed N --count 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import math
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import protrain
from protrain import _core
from protrain.model.blocks import find_blocks

MIB = 1 << 20
MODES = ("keep", "swap", "checkpoint", "checkpoint_swap")


# ---- parts of blocks: each takes [rows, length, width] and gives as much ----

PARTS: dict[str, Callable[[int], nn.Module]] = {}


class Applied(nn.Module):
    """A function of its parameters, of buffers, and of x."""

    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], **inner: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.randn(shape) * 0.2 for shape in shapes)
        for name, module in inner.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x, *self.weights)


class Across(nn.Module):
    """A module that takes channels in the second place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return y


class First(nn.Module):
    """The first of what a module gives."""

    def __init__(self, inner: nn.Module, **words: Any) -> None:
        super().__init__()
        self.inner, self.words = inner, words

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x, **self.words)[0]
        return y


class Cubed(torch.autograd.Function):
    """Saves its input and what is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        ctx.factor = factor
        return factor * scale * x**3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return 3 * ctx.factor * scale * x**2 * grads[0], (ctx.factor * x**3 * grads[0]).sum_to_size(scale.shape), None


class Attended(nn.Module):
    """torch's attention over x itself, weights and all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weights = self.inner(x, x, x, need_weights=True)
        found: torch.Tensor = y + weights.mean()
        return found


class Counting(nn.Module):
    """Buffers and attributes that change: in place, replaced, made late."""

    count: torch.Tensor
    mean: torch.Tensor
    last: torch.Tensor | None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("last", None, persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        y = x - self.mean if self.last is None else x - 0.1 * self.last
        self.last = x.detach().mean((0, 1))
        return y * (1 + 1 / self.calls)


class Deep(nn.Module):
    """Steps that are left out at random, by Python's and NumPy's numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(width, width), "b": nn.Linear(width, width, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers["a"](x) if random.random() < 0.5 else x
        z: torch.Tensor = self.layers["b"](y) if np.random.random() < 0.7 else y
        return z


class Hooked(nn.Module):
    """Hooks of modules and of tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.inner.register_forward_pre_hook(lambda _module, given: (given[0] * 1.5,))
        self.inner.register_forward_hook(lambda _module, _given, found: found + 0.25)
        self.inner.register_full_backward_hook(lambda _module, into, _out: (into[0] * 0.5,))  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-1, 1))
        return y


class Checkpointed(nn.Module):
    """Recomputed by torch itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.Dropout(0.1), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


class Penalised(nn.Module):
    """A gradient inside of forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return x
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(y).tanh().sum(), y, create_graph=self.training)
        return x + slope


part_of = PARTS.__setitem__
part_of("linear", lambda w: nn.Linear(w, w))
part_of("mlp", lambda w: nn.Sequential(nn.Linear(w, 3 * w), nn.GELU(), nn.Linear(3 * w, w, bias=False)))
part_of("inplace", lambda w: nn.Sequential(nn.Linear(w, w), nn.SiLU(inplace=True)))
part_of("layernorm", nn.LayerNorm)
part_of("rmsnorm", nn.RMSNorm)
part_of("plainnorm", lambda w: nn.LayerNorm(w, elementwise_affine=False))
part_of("groupnorm", lambda w: Across(nn.GroupNorm(2, w)))
part_of("batchnorm", lambda w: Across(nn.BatchNorm1d(w)))
part_of("averaged", lambda w: Across(nn.BatchNorm1d(w, momentum=None, affine=False)))
part_of("instancenorm", lambda w: Across(nn.InstanceNorm1d(w, affine=True)))
part_of("localnorm", lambda _w: Across(nn.LocalResponseNorm(3)))
part_of("conv", lambda w: Across(nn.Conv1d(w, w, 3, padding=1)))
part_of("depthwise", lambda w: Across(nn.Conv1d(w, w, 5, padding=2, groups=w, padding_mode="circular")))
part_of("transposed", lambda w: Across(nn.ConvTranspose1d(w, w, 3, padding=1)))
part_of("image", lambda _w: Applied(lambda m, x: m.conv(x.unsqueeze(1)).mean(1), conv=nn.Conv2d(1, 5, 3, padding=1)))
part_of("pool", lambda _w: Across(nn.MaxPool1d(3, 1, 1)))
part_of("average", lambda _w: Applied(lambda _m, x: F.interpolate(F.adaptive_avg_pool1d(x, 4), x.shape[-1], mode="linear")))
part_of("dropout", lambda _w: nn.Dropout(0.2))
part_of("alphadropout", lambda _w: nn.AlphaDropout(0.1))
part_of("featuredropout", lambda _w: Across(nn.Dropout1d(0.2)))
part_of("dropoutinplace", lambda w: nn.Sequential(nn.Linear(w, w), nn.Dropout(0.3, inplace=True)))
part_of("prelu", lambda w: Across(nn.PReLU(w)))
part_of("glu", lambda w: nn.Sequential(nn.Linear(w, 2 * w), nn.GLU()))
part_of("bilinear", lambda w: Applied(lambda m, x: m.inner(x, x[..., :3]), inner=nn.Bilinear(w, 3, w)))
part_of("gru", lambda w: First(nn.GRU(w, w, batch_first=True)))
part_of("lstm", lambda w: First(nn.LSTM(w, w // 2, 2, batch_first=True, bidirectional=True, dropout=0.1)))
part_of("rnncell", lambda w: Applied(lambda m, x: torch.stack([m.cell(t) for t in x.unbind(1)], 1), cell=nn.GRUCell(w, w)))
part_of("attention", Attended)
part_of("encoderlayer", lambda w: nn.TransformerEncoderLayer(w, 2, 2 * w, batch_first=True))
part_of("counting", Counting)
part_of("deep", Deep)
part_of("hooked", Hooked)
part_of("checkpointed", Checkpointed)
part_of("penalised", Penalised)
part_of("weightnorm", lambda w: nn.utils.parametrizations.weight_norm(nn.Linear(w, w)))
part_of("spectralnorm", lambda w: nn.utils.parametrizations.spectral_norm(nn.Linear(w, w)))
part_of("orthogonal", lambda w: nn.utils.parametrizations.orthogonal(nn.Linear(w, w)))
part_of("unused", lambda w: Applied(lambda _m, x, _p: x, (w, w)))
part_of("noise", lambda _w: Applied(lambda _m, x: x + 0.1 * torch.randn_like(x) * torch.rand(x.shape[-1])))
part_of("scalar", lambda _w: Applied(lambda _m, x, a, b: x * a + b, (), (1,)))
part_of("empty", lambda w: Applied(lambda _m, x, a: x + a.sum() + torch.cat([a, x[:0, 0]]).sum(), (0, w)))
part_of("complex", lambda w: Applied(
    lambda _m, x, a: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(a), n=x.shape[-1]), (w // 2 + 1, 2)))  # fmt: skip
part_of("polar", lambda w: Applied(lambda _m, x, a: torch.complex(x, x * a).exp().angle() + torch.polar(a, x).real, (w,)))
part_of("einsum", lambda w: Applied(lambda _m, x, a, b: torch.einsum("btw,wr,rv->btv", x, a, b), (w, 3), (3, w)))
part_of("indexput", lambda w: Applied(
    lambda _m, x, a: torch.zeros_like(x).index_put((torch.arange(x.shape[0]) % 2,), x * a, accumulate=True), (w,)))  # fmt: skip
part_of("scatter", lambda w: Applied(
    lambda _m, x, a: torch.zeros_like(x).scatter_add(2, (x.detach().argsort(-1) * 7) % x.shape[-1], x * a), (w,)))  # fmt: skip
part_of("sort", lambda w: Applied(lambda _m, x, a: (x * a).sort(dim=-1, stable=True).values, (w,)))
part_of("topk", lambda w: Applied(lambda _m, x, a: x.scatter(2, *reversed((x * a).topk(3)[:2])), (w,)))
part_of("cumulated", lambda w: Applied(lambda _m, x, a: (x.tanh().cumsum(1) * a).logcumsumexp(1), (w,)))
part_of("expand", lambda _w: Applied(lambda _m, x, a: x + a.expand(x.shape[0], -1, x.shape[2]).flip(0).roll(1, 2), (1, 1, 1)))
part_of("views", lambda w: Applied(lambda m, x, a: in_views(m.inner(x), a), (w, w), inner=nn.Linear(w, w)))
part_of("slices", lambda w: Applied(lambda _m, x, a: torch.cat([F.linear(x, a[: w // 2]), F.linear(x, a[w // 2 :])], -1), (w, w)))
part_of("joined", lambda w: Applied(lambda _m, x, a, b: F.linear(x, torch.cat([a, b])), (w - 3, w), (3, w)))
part_of("both", lambda w: Applied(lambda _m, x, a: x @ a @ a.t(), (w, w)))
part_of("doubled", lambda w: Applied(lambda _m, x, a: (x.double() @ a.double()).float(), (w, w)))
part_of("halved", lambda w: Applied(lambda m, x: under_autocast(m.inner, x), inner=nn.Linear(w, w)))
part_of("custom", lambda w: Applied(lambda _m, x, a: Cubed.apply(x, a, 0.5), (w,)))
part_of("lookup", lambda w: Applied(
    lambda m, x: x + m.table((x.detach().abs() * 9).clamp(max=1e6).long().sum(-1) % 9), table=nn.Embedding(9, w, 0)))  # fmt: skip
part_of("bag", lambda w: Applied(
    lambda m, x: x + m.table((x.detach().abs().clamp(max=1e6) * 9).long()[..., :3].flatten(0, 1) % 7).unflatten(0, x.shape[:2]),
    table=nn.EmbeddingBag(7, w)))  # fmt: skip
part_of("where", lambda w: Applied(lambda _m, x, a: torch.where(x > 0, x * a, a) + x.masked_fill(x < 0, 0.5), (w,)))
part_of("experts", lambda w: Applied(by_experts, (w, 2), (2, w, w)))
part_of("nonzero", lambda w: Applied(lambda _m, x, a: x.index_add(0, torch.zeros(1).long(), (x[:1] * a)), (w,)))
part_of(
    "varied",
    lambda w: Applied(lambda _m, x, a: torch.linalg.vector_norm(x * a, dim=-1, keepdim=True) + torch.cdist(x, x).mean(), (w,)),
)
part_of("unfold", lambda w: Applied(lambda _m, x, a: x + (x.unfold(2, 2, 1) * a).sum(-1).mean(-1, keepdim=True), (2,)))
part_of("shared", lambda w: nn.Sequential(*[nn.Linear(w, w)] * 2))
part_of("ownmean", lambda w: Applied(lambda m, x, a: m.norm(x) if m.training else x * a, (w,), norm=nn.LayerNorm(w)))


def in_views(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Written to through views."""
    first, second = x.chunk(2, -1)[:2]
    y = x.clone()
    y[..., ::2].mul_(0.5)
    y[:, 0].add_(a.diagonal())
    y.narrow(-1, 0, first.shape[-1]).sub_(second.sum(-1, keepdim=True))
    return y


def under_autocast(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return inner(x).float()


def by_experts(_module: nn.Module, x: torch.Tensor, gate: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows go to one of two weights, by what is computed."""
    scores = (x @ gate).softmax(-1)
    chosen = scores.argmax(-1)
    y = torch.zeros_like(x)
    for number in range(2):
        at = chosen == number
        y[at] = (x[at] @ weights[number]) * scores[at][:, number : number + 1]
    return y


# ---- models ----


@dataclass
class Record:
    """What a block may give."""

    states: torch.Tensor
    extra: list[torch.Tensor] | None = None


class Block(nn.Module):
    """Parts one after the other, each with a path around it. style: how it is called and what it gives."""

    def __init__(self, parts: list[str], width: int, style: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(PARTS[name](width) for name in parts)
        self.weight = nn.Parameter(torch.ones(width))
        self.style = style

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.parts:
            x = x + 0.5 * module(x)
        return x * self.weight

    def forward(self, x: Any, mask: torch.Tensor | None = None, *, scale: Any = None, more: Any = ()) -> Any:
        match self.style:
            case "tuple":
                x, aux = x
                y = self.through(x)
                return y, aux + y.square().mean()
            case "dict":
                return {**x, "states": self.through(x["states"]), "n": x["n"] + 1}
            case "record":
                y = self.through(x.states)
                return Record(y, [*(x.extra or ()), y[:, :1].mean(0)][-2:])
            case "keywords":
                y = self.through(x if mask is None else x * mask)
                y = y if scale is None else y * scale
                return y + sum(t.mean() for t in more)
            case _:
                return self.through(x)


class Model(nn.Module):
    """A stem, blocks in some order, a head; gives a loss, or several."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        w = case.width
        self.case = case
        self.stem: nn.Module = nn.Embedding(50, w, padding_idx=3) if case.tokens else nn.Linear(w, w)
        self.blocks = nn.ModuleList(Block(case.parts, w, case.style) for _ in range(case.repeat))
        self.tail = nn.Sequential(*(PARTS[name](w) for name in case.tail))
        self.head = nn.Linear(w, 50 if case.tokens else w)
        self.mix = nn.Parameter(torch.ones(2))
        if case.tied:
            self.head.weight = self.stem.weight  # type: ignore[assignment]
        if case.shared and case.repeat > 2:
            self.blocks[2] = self.blocks[0]
        self.calls = 0

    def order(self) -> list[int]:
        """Of the blocks in this forward."""
        numbers = list(range(len(self.blocks)))
        match self.case.order:
            case "twice":
                return numbers + numbers[:1]
            case "turning":
                return numbers if self.calls % 2 else numbers[::-1]
            case "skipping":
                return numbers[self.calls % 2 :]
            case "random":
                return [number for number in numbers if random.random() < 0.7]
            case _:
                return numbers

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, loss: bool = True) -> Any:
        self.calls += 1
        given = x
        x = self.stem(x)
        style = self.case.style
        aux, extra, count = torch.zeros(()), None, 0
        mask = (torch.arange(x.shape[1]) < x.shape[1] - 1).to(x.dtype)[:, None]
        for number in self.order():
            block = self.blocks[number]
            match style:
                case "tuple":
                    x, aux = block((x, aux))
                case "dict":
                    found = block({"states": x, "n": count, "nothing": None})
                    x, count = found["states"], found["n"]
                case "record":
                    found = block(Record(x, extra))
                    x, extra = found.states, found.extra
                case "keywords":
                    x = block(x, mask if number % 2 else None, scale=self.mix[0], more=[self.mix, x[:1]])
                case _:
                    x = block(x)
        x = self.tail(x)
        y = self.head(x)
        if not loss:
            return y
        if labels is not None:
            found = F.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=3)
        else:
            found = (y - (0 if self.case.tokens else given.detach())).square().mean()
        found = found * self.mix[1] + 0.1 * aux + sum(e.square().mean() for e in extra or ())
        return (found, x.abs().mean()) if self.case.losses > 1 else found


# ---- cases ----


@dataclass
class Case:
    """All that a case is; what is drawn comes from its seed."""

    seed: int
    width: int
    parts: list[str]
    repeat: int
    tail: list[str]
    program: list[str]
    optimizer: str
    style: str = ""
    order: str = ""
    tied: bool = False
    shared: bool = False
    tokens: bool = False
    losses: int = 1
    frozen: str = ""
    accumulate: int = 1
    clip: float | None = None
    modes: bool = False
    rows: tuple[int, ...] = (2,)
    length: int = 8
    tight: float = 1.0
    asked: bool = False


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, 1e-2, weight_decay=0.1, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, 1e-2, betas=(0.8, 0.9), weight_decay=0.01, fused=True),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, 1e-2, amsgrad=True, maximize=True, fused=True),
    "loop": lambda ps: torch.optim.AdamW(ps, 1e-2),
    "adam_amsgrad_loop": lambda ps: torch.optim.Adam(ps, 1e-2, amsgrad=True, weight_decay=0.1),
    "foreach": lambda ps: torch.optim.AdamW(ps, 1e-2, foreach=True, maximize=True),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.05, fused=True),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "damped": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9, dampening=0.3, maximize=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 1e-3, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 1e-2, lr_decay=0.1),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 1e-2),
    "nadam": lambda ps: torch.optim.NAdam(ps, 1e-3, decoupled_weight_decay=True),
    "radam": lambda ps: torch.optim.RAdam(ps, 1e-3),
    "rprop": lambda ps: torch.optim.Rprop(ps, 1e-3),
    "asgd": lambda ps: torch.optim.ASGD(ps, 1e-2),
}

ACTIONS = (
    "step", "step", "step", "eval", "inference", "evalmode", "schedule", "freeze", "unfreeze", "reload", "states", "rewrap",
    "skip", "write", "read", "options", "copy", "abandon", "between", "raise", "several", "train_in_eval", "clear",
    "optimizer_state",
)  # fmt: skip


def draw(seed: int) -> Case:
    """The case of a seed."""
    chance = random.Random(seed)
    names = sorted(PARTS)
    tokens = chance.random() < 0.3
    parts = chance.choices(names, k=chance.randrange(1, 6))
    tail = chance.choices(names, k=chance.randrange(3))
    losses = chance.choice((1, 1, 1, 2))
    return Case(
        seed=seed,
        width=chance.choice((8, 16, 48, 64, 100, 130)),
        parts=parts,
        repeat=chance.randrange(1, 6),
        tail=tail,
        program=["step", *chance.choices(ACTIONS, k=chance.randrange(2, 9)), "step"],
        optimizer=chance.choice([*OPTIMIZERS, *["adamw"] * 4]),
        style=chance.choice(("", "", "tuple", "dict", "record", "keywords")),
        order=chance.choice(("", "", "", "twice", "turning", "skipping", "random")),
        tied=tokens and chance.random() < 0.5,
        shared=chance.random() < 0.15,
        tokens=tokens,
        losses=losses,
        frozen=chance.choice(("", "", "", "stem", "block", "norms")),
        accumulate=chance.choice((1, 1, 2, 3)),
        clip=chance.choice((None, None, 0.1, 10.0)),
        modes=chance.random() < 0.6,
        rows=tuple(chance.choices((2, 3, 5, 8), k=chance.choice((1, 1, 3)))),
        length=chance.choice((4, 8, 17)),
        tight=chance.choice((1.0, 1.0, 1.1, 1.5, 3.0, math.inf)),
        asked=chance.random() < 0.2,
    )


class Run:
    """One run of a case's program: in plain torch, or wrapped."""

    def __init__(self, case: Case, wrapped: bool, disk: Path) -> None:
        self.case, self.wrapped, self.disk = case, wrapped, disk
        self.chance = random.Random(f"{case.seed} program")  # what both runs draw
        self.own = random.Random(f"{case.seed} wrapped")  # what wrap alone is given
        self.figures: list[tuple[str, Any]] = []
        self.batches = 0
        self.all_batches = [self.batch_of(number) for number in range(24)]
        self.model: Any = self.made()
        self.optimizer: Any = self.optimizer_of(self.model)
        self.budget = 0
        self.place = "wrap"
        torch.manual_seed(case.seed)
        random.seed(case.seed)
        np.random.seed(case.seed % (1 << 32))

    def made(self) -> Model:
        torch.manual_seed(self.case.seed)
        model = Model(self.case)
        match self.case.frozen:
            case "stem":
                model.stem.requires_grad_(False)
            case "block":
                model.blocks[0].requires_grad_(False)
            case "norms":
                for p in model.parameters():
                    p.requires_grad_(p.dim() != 1)
        return model

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """In two groups where the seed says so."""
        trained = [p for p in model.parameters() if p.requires_grad]
        if self.case.seed % 3 == 0 and len(trained) > 1:
            groups = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 3e-3, "weight_decay": 0.02}]
            return OPTIMIZERS[self.case.optimizer](groups)
        return OPTIMIZERS[self.case.optimizer](trained)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next one."""
        self.batches += 1
        return self.all_batches[self.batches % len(self.all_batches)]

    def batch_of(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        case = self.case
        generator = torch.Generator().manual_seed(number)
        rows = case.rows[number % len(case.rows)]
        if case.tokens:
            x = torch.randint(50, (rows, case.length), generator=generator)
            return x, x.roll(1, 1)
        return torch.randn(rows, case.length, case.width, generator=generator), None

    def wrap(self) -> None:
        """Under a budget between the smallest that works and enough for everything."""
        case = self.case
        modes = [self.own.choice(MODES) for _ in find_blocks(self.model)] if case.modes else None
        options: dict[str, Any] = {"accumulate": case.accumulate * case.losses, "max_grad_norm": case.clip, "block_modes": modes}
        self.budget = 256 * MIB
        if case.tight < math.inf:
            before = torch.get_rng_state()
            x = torch.zeros(max(case.rows), case.length, case.width)
            batch: Any = (x,) if not case.tokens else (x[..., 0].long(), x[..., 0].long())
            try:
                protrain.plan(self.model, batch, memory=1, disk=self.disk, optimizer=self.optimizer, **options)
            except protrain.BudgetError as error:
                self.budget = int(error.smallest_bytes * case.tight)
            except protrain.PlanError:
                pass  # it cannot be run without data
            assert torch.equal(before, torch.get_rng_state()), "plan drew random numbers"
        self.model, self.optimizer = protrain.wrap(self.model, self.optimizer, memory=self.budget, disk=self.disk, **options)

    def close(self) -> None:
        if self.wrapped and protrain.api.find_session(self.model) is not None:
            protrain.unwrap(self.model)

    def tell(self, name: str, value: Any) -> None:
        self.figures.append((name, as_bytes(value)))

    def run(self) -> list[tuple[str, Any]]:
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)
        try:
            for number, action in enumerate(self.case.program):
                self.place = f"{number} {action}"
                getattr(self, f"do_{action}")()
                self.tell(f"{self.place}: torch's random state", torch.get_rng_state())
                if self.wrapped:
                    peak = protrain.status(self.model).peak_memory_bytes
                    assert peak <= self.budget, f"{self.place}: a peak of {peak} in a budget of {self.budget}"
            self.tell("end: Python's random state", repr(random.getstate()))
            self.tell("end: NumPy's random state", repr(np.random.get_state()))
            for name, value in self.model.state_dict().items():
                self.tell(f"end: {name}", value)
            for number, entries in sorted(self.optimizer.state_dict()["state"].items()):
                for key, value in sorted(entries.items()):
                    self.tell(f"end: state {number}.{key}", value)
            self.close()
            for name, value in self.model.state_dict().items():
                self.tell(f"unwrapped: {name}", value)
        finally:
            self.close()
        return self.figures

    # ---- what a program is made of ----

    def losses(self, x: torch.Tensor, labels: Any) -> list[torch.Tensor]:
        found = self.model(x, labels) if labels is not None else self.model(x)
        return list(found) if isinstance(found, tuple) else [found]

    def passes(self) -> None:
        for _ in range(self.case.accumulate):
            x, labels = self.batch()
            if self.case.asked and not self.case.tokens:
                x = x.detach().requires_grad_()
            losses = self.losses(x, labels)
            for number, loss in enumerate(losses):
                loss.backward(retain_graph=number + 1 < len(losses))
                self.tell(f"{self.place}: loss {number}", loss)
            if x.requires_grad:
                self.tell(f"{self.place}: gradient of the input", x.grad)

    def update(self) -> None:
        if self.case.clip is not None and not self.wrapped:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
        self.optimizer.step()
        if self.case.clip is not None:
            self.tell(f"{self.place}: norm", torch.tensor(float(self.optimizer.grad_norm if self.wrapped else norm)))

    def do_step(self) -> None:
        self.passes()
        self.update()
        self.optimizer.zero_grad()

    def do_train_in_eval(self) -> None:
        self.model.eval()
        self.do_step()
        self.model.train()

    def do_skip(self) -> None:
        self.passes()
        self.optimizer.zero_grad()

    def do_between(self) -> None:
        self.passes()
        self.do_eval()
        self.update()
        self.optimizer.zero_grad()

    def do_clear(self) -> None:
        self.model.zero_grad()

    def do_eval(self) -> None:
        with torch.no_grad():
            self.tell(f"{self.place}: output", self.model(self.batch()[0], loss=False))

    def do_inference(self) -> None:
        with torch.inference_mode():
            self.tell(f"{self.place}: output", self.model(self.batch()[0], loss=False))

    def do_evalmode(self) -> None:
        self.model.eval()
        self.do_eval()
        self.model.train()

    def do_schedule(self) -> None:
        self.scheduler.step()

    def do_options(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5
            group["weight_decay"] = 0.05

    def do_freeze(self) -> None:
        for p in self.chance.sample(list(self.model.parameters()), 2):
            p.requires_grad_(False)

    def do_unfreeze(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.requires_grad_()

    def do_write(self) -> None:
        with torch.no_grad():
            for p in self.chance.sample(list(self.model.parameters()), 2):
                p.mul_(0.9)

    def do_read(self) -> None:
        for name, p in self.model.named_parameters():
            self.tell(f"{self.place}: {name}", p)

    def do_states(self) -> None:
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))

    def do_optimizer_state(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def do_copy(self) -> None:
        other = copy.deepcopy(self.model)
        other.eval()
        with torch.no_grad():
            self.tell(f"{self.place}: output of a copy", other(self.batch()[0], loss=False))

    def do_abandon(self) -> None:
        """A forward without a backward."""
        losses = self.losses(*self.batch())
        self.tell(f"{self.place}: loss", losses[0])
        del losses
        self.optimizer.zero_grad()

    def do_raise(self) -> None:
        """A backward that fails half-way."""
        x, labels = self.batch()
        with armed(self.model.blocks[0]), contextlib.suppress(BoomError):
            self.losses(x, labels)[0].backward()
            self.tell(f"{self.place}: nothing was raised", None)
        self.optimizer.zero_grad()

    def do_several(self) -> None:
        """Three forwards, one backward: sums of three gradients are the first whose order shows."""
        first, second, third = (self.losses(*self.batch()) for _ in range(3))
        loss = first[0] + second[0] + third[0]
        loss.backward()
        self.tell(f"{self.place}: loss", loss)
        del first, second, third, loss
        self.update()
        self.optimizer.zero_grad()

    def do_rewrap(self) -> None:
        """An ordinary model in between, that trains a step."""
        state = self.optimizer.state_dict()
        rates = [copy.copy(group) for group in self.optimizer.param_groups]
        if self.wrapped:
            protrain.unwrap(self.model)
        groups = [{"params": group["params"]} for group in rates]
        self.optimizer = OPTIMIZERS[self.case.optimizer](groups)
        self.optimizer.load_state_dict(state)
        for p in (p for group in groups for p in group["params"]):
            p.requires_grad_()
        was, self.wrapped = self.wrapped, False
        self.do_step()
        self.wrapped = was
        if was:
            self.wrap()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)

    def do_reload(self) -> None:
        """A checkpoint, read into another model under another budget."""
        if self.wrapped:
            folder = self.disk / "checkpoint"
            protrain.save(self.model, self.optimizer, folder)
            wrapped = self.model
            protrain.unwrap(wrapped)
            calls = wrapped.calls
            self.model = self.made()
            self.optimizer = self.optimizer_of(self.model)
            self.wrap()
            protrain.load(self.model, self.optimizer, folder)
        else:
            state, moments, calls = self.model.state_dict(), self.optimizer.state_dict(), self.model.calls
            self.model = self.made()
            self.optimizer = self.optimizer_of(self.model)
            self.model.load_state_dict(state)
            self.optimizer.load_state_dict(moments)
        self.model.calls = calls
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)


class BoomError(Exception):
    """What a user's code raises."""


@contextlib.contextmanager
def armed(block: nn.Module) -> Iterator[None]:
    """Backward through what the block gives raises."""

    def boom(_grad: torch.Tensor) -> None:
        raise BoomError

    def hook(_module: nn.Module, _given: Any, found: Any) -> None:
        for tensor in (
            [found] if isinstance(found, torch.Tensor) else torch.utils._pytree.tree_leaves(getattr(found, "__dict__", found))
        ):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(boom)
                return

    handle = block.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def as_bytes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            value = value.detach().masked_fill(value.detach().isnan(), math.nan)  # NaNs are one
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return value


#: Where a batch needs more than was foreseen, as several forwards before a backward do, or a part cannot be in a mode.
REFUSALS = (protrain.BudgetError, protrain.PlanError)


def check(case: Case, disk: Path) -> str:
    """What differs; "" where nothing does; "refused: ..." where protrain says why it does not train, "invalid: ..." where
    plain torch does not either."""
    try:
        want = Run(case, False, disk).run()
    except Exception as error:
        return f"invalid: {type(error).__name__}: {error}"
    run = Run(case, True, disk)
    try:
        run.wrap()
        found = run.run()
    except REFUSALS as error:
        return f"refused: {run.place}: {type(error).__name__}: {error}"
    except Exception as error:
        return f"failed: {run.place}: {type(error).__name__}: {error}"
    if [name for name, _ in found] != [name for name, _ in want]:
        return "differs: other figures"
    wrong = [name for (name, a), (_, b) in zip(found, want, strict=True) if a != b]
    return f"differs: {len(wrong)} of {len(want)}: {wrong[:6]}" if wrong else ""


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler by one thing."""
    for name in ("parts", "tail", "program"):
        values = getattr(case, name)
        for number in range(len(values) - 1, -1, -1):
            yield dataclasses.replace(case, **{name: values[:number] + values[number + 1 :]})
    plain = Case(case.seed, 16, case.parts, 1, case.tail, case.program, "adamw")
    for entry in dataclasses.fields(case):
        value = getattr(plain, entry.name)
        if value != getattr(case, entry.name):
            yield dataclasses.replace(case, **{entry.name: value})
    if case.repeat > 2:
        yield dataclasses.replace(case, repeat=case.repeat - 1)


def shrunk(case: Case, said: str, disk: Path) -> tuple[Case, str]:
    """The smallest case found that does not hold in the same manner."""
    going = True
    while going:
        going = False
        for other in smaller(case):
            found = check(other, disk)
            if found and found.split(":", 1)[0] == said.split(":", 1)[0]:
                case, said, going = other, found, True
                break
    return case, said


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seconds", type=float, default=float(os.environ.get("PROTRAIN_FUZZ_SECONDS", "5")))
    words.add_argument("--seed", type=int, default=int(os.environ.get("PROTRAIN_FUZZ_SEED", "1")))
    words.add_argument("--count", type=int, default=1 << 62, help="at most so many cases")
    given = words.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _core.move_apart(True)
    until, seed, held, refused = time.monotonic() + given.seconds, given.seed, 0, 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("PROTRAIN_DISK")) as work:
        while time.monotonic() < until and seed - given.seed < given.count:
            said = check(draw(seed), Path(work))
            if said.startswith(("differs", "failed")):
                print(f"seed {seed} {said}", flush=True)
                print("smallest: {} {}".format(*shrunk(draw(seed), said, Path(work))))
                return 1
            held += not said
            refused += said.startswith("refused")
            seed += 1
    print(f"random training: {seed - given.seed} cases, {held} held, {refused} refused, seeds {given.seed} to {seed - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
