"""What others wrote, read: random and hostile plans, profiles, machines, safetensors, optimizers' files, checkpoints; and random
models trained.

    python tests/fuzz.py checkpoint --seconds 60 --seed 1

Each input has a seed of its own. It is a mutation of a good input or of one of tests/corpus, where what once went wrong is kept.
What is read must be right or refused with one of protrain's errors in one line; what is refused changes nothing; nothing hangs or
takes memory that the input does not account for. A random model must train as in plain torch, to the bit. A seed that does not
hold is told, and reproduces it: --seed N --count 1.
"""

from __future__ import annotations

import argparse
import copy
import errno
import inspect
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import protrain
from protrain.planner.hardware import load_hardware
from protrain.planner.planning import plan_from_profile
from protrain.planner.plans import Plan
from protrain.planner.profiles import Profile
from protrain.state import torchfiles
from protrain.state.tensorfiles import TensorFile

CORPUS = Path(__file__).with_name("corpus")
MIB = 1 << 20
HANG_SECONDS = 600
TICK_SECONDS = 10
SLOW_SECONDS = 120

HOSTILE: list[Any] = [
    *(0, 1, -1, 2, 7, 4095, 4096, 1 << 31, (1 << 32) + 1, 1 << 53, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30, -(1 << 63)),
    *(0.0, 0.5, -0.5, 1e308, -1e308, 5e-324, float("inf"), float("nan"), True, False, None),
    *("", "x", "keep", "swap", "4GiB", "../../etc/passwd", "\u0000", "é" * 40, "9" * 300),
    *([], {}, [[]], [0], [1, 2, 3], {"x": 1}, [None], [[[[[[[[]]]]]]]]),
]
HOSTILE_NAMES = ("", "x", "__class__", "n_chunks", "params")

#: Errors that a reader may answer with. DiskError is an OSError, PlanError a ValueError.
REFUSALS = (protrain.Error, ValueError, TypeError)


# ---- mutations ----


def places(tree: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """(container, key) of each value in a tree of JSON."""
    found = [] if found is None else found
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(tree, dict):
        items = iter(tree.items())
    elif isinstance(tree, list):
        items = iter(enumerate(tree))
    for key, value in items:
        found.append((tree, key))
        places(value, found)
    return found


def mutate_tree(tree: Any, chance: random.Random) -> Any:
    """A copy with one to three changes."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        all_places = places(tree)
        if not all_places:
            return chance.choice(HOSTILE)
        container, key = chance.choice(all_places)
        way = chance.randrange(7)
        if way == 0 and isinstance(container, dict):
            container[chance.choice((*HOSTILE_NAMES, str(chance.getrandbits(70))))] = container.pop(key)
        elif way == 1:
            del container[key]
        elif way == 2 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif way == 3 and isinstance(container[key], int | float):
            container[key] = container[key] * chance.choice((-1, 2, 1000, 0.5)) + chance.choice((-1, 0, 1))
        elif way == 4:
            other, other_key = chance.choice(all_places)
            if other_key in other if isinstance(other, dict) else other_key < len(other):
                container[key] = copy.deepcopy(other[other_key])
        else:
            container[key] = copy.deepcopy(chance.choice(HOSTILE))
    return tree


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(found) + 1) if found else 0
        way = chance.randrange(6)
        if way == 0:
            del found[at : at + chance.choice((1, 8, 1000))]
        elif way == 1:
            found[at:at] = chance.choice((b"\x00", b"{", b"[" * 20000, b'"', b"-", b"1e999", b"\xff\xfe", b"9" * 5000))
        elif way == 2 and found:
            found[at % len(found)] ^= 1 << chance.randrange(8)
        elif way == 3:
            found[at:at] = found[at : at + chance.choice((1, 16, 200))]
        elif way == 4:
            found[at : at + 8] = struct.pack("<Q", chance.choice((0, 1, 1 << 20, 1 << 40, 1 << 63, (1 << 64) - 1)))
        else:
            del found[at:]
    return bytes(found)


def mutated(good: bytes, chance: random.Random) -> bytes:
    """Of a JSON text: its tree or its bytes."""
    if chance.random() < 0.75:
        try:
            return json.dumps(mutate_tree(json.loads(good), chance)).encode()
        except (ValueError, RecursionError):
            pass
    return mutate_bytes(good, chance)


def seeds_of(kind: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / kind).iterdir()) if path.is_file()]


# ---- targets: each takes a seed's generator and an input, and gives what was accepted, or raises a refusal ----


def make_profile() -> bytes:
    from fixed import with_fixed_times

    model = Small()
    return with_fixed_times(protrain.profile(model, torch.randn(4, 64), memory=4 * MIB)).to_json().encode()


class Small(nn.Module):
    """Four blocks and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x * self.scale).square().mean()


def check_words(said: str) -> None:
    """Of an error."""
    assert said, "an error without a word"
    assert "\n" not in said, f"more than a line: {said}"
    assert len(said) < 1500, f"a line of {len(said)} characters"


class Target:
    """One reader. `one` is given an input each time."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.accepted = self.refused = 0

    def one(self, chance: random.Random) -> None:
        raise NotImplementedError

    def expect(self, reader: Callable[[], Any], refusals: tuple[type[Exception], ...] = REFUSALS) -> Any:
        """What reader() gives, None where it refuses in one line."""
        try:
            found = reader()
        except refusals as error:
            self.refused += 1
            check_words(str(error))
            return None
        self.accepted += 1
        return found


class Plans(Target):
    """Plan.from_json: what is accepted is a plan that says what it is, comes back from JSON, and can be tried on a model."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        plan = plan_from_profile(Profile.from_json(seeds_of("profile")[0].decode()), 8 * MIB)
        self.good = [plan.to_json().encode(), *seeds_of("plan")]
        self.model = Small()

    def one(self, chance: random.Random) -> None:
        text = mutated(chance.choice(self.good), chance).decode(errors="replace")
        plan = self.expect(lambda: Plan.from_json(text), (protrain.PlanError,))
        if plan is None:
            return
        assert Plan.from_json(plan.to_json()) == plan
        assert all(len(line) <= 160 for line in plan.explain().splitlines())
        if chance.random() < 0.1:
            self.expect(lambda: self.try_on(plan))

    def try_on(self, plan: Plan) -> None:
        model = copy.deepcopy(self.model)
        made, _ = protrain.wrap(model, torch.optim.AdamW(model.parameters()), memory=8 * MIB, plan=plan, disk=self.work)
        protrain.unwrap(made)


class Profiles(Target):
    """Profile.from_json, and the plan for what is accepted: inside of the budget, or refused."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.good = seeds_of("profile")

    def one(self, chance: random.Random) -> None:
        text = mutated(chance.choice(self.good), chance).decode(errors="replace")
        profile = self.expect(lambda: Profile.from_json(text), (protrain.PlanError,))
        if profile is None:
            return
        assert Profile.from_json(profile.to_json()) == profile
        budget = chance.choice((MIB, 4 * MIB, 64 * MIB, 1 << 40))
        plan = self.expect(lambda: plan_from_profile(profile, budget))
        if plan is not None:
            assert plan.peak_bytes <= budget
            plan.explain()


class Machines(Target):
    """Descriptions of hardware."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.good = [path.read_bytes() for path in sorted((Path(protrain.__file__).parent / "machines").glob("*.toml"))]
        self.good += seeds_of("hardware")

    def one(self, chance: random.Random) -> None:
        text = chance.choice(self.good)
        if chance.random() < 0.6:  # a value in a line
            lines = text.decode(errors="replace").splitlines()
            at = chance.randrange(len(lines))
            name, equals, _ = lines[at].partition("=")
            words = ("-1", "0", "1e400", "nan", "inf", "true", '"x"', "[1]", "{}", "9" * 400, "0x7f", "1_0", "2026-01-01", "")
            lines[at] = f"{name}= {chance.choice(words)}" if equals else chance.choice(("", "[", "[device]", "[[disk]]", "x"))
            text = "\n".join(lines).encode()
        else:
            text = mutate_bytes(text, chance)
        path = self.work / "machine.toml"
        path.write_bytes(text)
        hardware = self.expect(lambda: load_hardware(path), (protrain.PlanError,))
        if hardware is not None:
            hardware.machine(4, 8)
            assert hardware.device_bytes > 0


class TensorFiles(Target):
    """Safetensors: what is accepted is what the format's own library reads, and takes no more memory than the file."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        from safetensors.torch import save

        kinds = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
        tensors = {f"t{i}": torch.arange(6 * i).reshape(2, 3, i).to(kind) for i, kind in enumerate(kinds)}
        self.good = [save(tensors, {"format": "pt"}), save({"one": torch.randn(5)}), *seeds_of("safetensors")]
        self.path = work / "model.safetensors"

    def one(self, chance: random.Random) -> None:
        data = chance.choice(self.good)
        if chance.random() < 0.7 and len(data) > 8:
            length = min(struct.unpack("<Q", data[:8])[0], len(data))
            header = mutated(data[8 : 8 + length], chance)
            data = struct.pack("<Q", len(header)) + header + data[8 + length :]
        if chance.random() < 0.4:
            data = mutate_bytes(data, chance)
        self.path.write_bytes(data)
        tracemalloc.start()
        file = self.expect(lambda: TensorFile(str(self.path)), (protrain.PlanError,))
        found = self.expect(lambda: {name: file.read(name) for name in file.entries}, (protrain.DiskError,)) if file else None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 * len(data) + MIB, f"{peak} bytes for a file of {len(data)}"
        if found is not None:
            self.compare(data, found)

    def compare(self, data: bytes, found: dict[str, torch.Tensor]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load

        assert sum(tensor.nbytes for tensor in found.values()) <= len(data)
        try:
            theirs = load(data)
        except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError):
            return  # it is stricter about holes, and knows other types
        assert set(theirs) == set(found)
        for name, tensor in theirs.items():
            ours = found[name]
            assert (tensor.dtype, tensor.shape) == (ours.dtype, ours.shape), name
            assert tensor.reshape(-1).view(torch.uint8).equal(ours.reshape(-1).view(torch.uint8)), name


class OptimizerFiles(Target):
    """optimizer.pt: what is accepted is what torch itself reads, and where torch took checksums it is what was written."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.path = work / "optimizer.pt"
        state = {n: {"step": torch.tensor(2.0), "exp_avg": torch.rand(50), "exp_avg_sq": torch.rand(5, 8).t()} for n in range(3)}
        content = {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1, 2]}]}
        self.good: list[tuple[bytes, bool]] = []  # files, and whether they have checksums
        for sums in (True, False):
            torch.serialization.set_crc32_options(sums)
            torch.save(content, self.path)
            self.good.append((self.path.read_bytes(), sums))
        torch.serialization.set_crc32_options(True)
        torchfiles.save(content, str(self.path))
        self.good.append((self.path.read_bytes(), True))
        self.want = self.read()

    def one(self, chance: random.Random) -> None:
        data, sums = chance.choice(self.good)
        flips = chance.random() < 0.5
        if flips:
            found = bytearray(data)
            found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
            data = bytes(found)
        else:
            data = mutate_bytes(data, chance)
        self.path.unlink(missing_ok=True)
        kind = chance.randrange(20)
        if kind == 0:
            os.mkfifo(self.path)
        elif kind == 1:
            self.path.symlink_to(chance.choice(("/dev/zero", self.path)))
        else:
            self.path.write_bytes(data)
        tracemalloc.start()
        read = self.expect(self.read)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 * len(data) + 4 * MIB, f"{peak} bytes for a file of {len(data)}"
        if flips and sums and read is not None:
            assert read == self.want, "a flipped bit was read"

    def read(self) -> str:
        """All that there is in the file, in words."""
        found = torchfiles.load_optimizer(str(self.path))
        states = {number: {key: self.words(value) for key, value in entry.items()} for number, entry in found["state"].items()}
        return repr((states, found["param_groups"]))

    @staticmethod
    def words(value: Any) -> Any:
        return (value.dtype, value.stride(), value.tolist()) if isinstance(value, torch.Tensor) else value


class Checkpoints(Target):
    """protrain.load of a folder in which something was changed: it is loaded, or refused and nothing has changed, or a tensor is
    not the one that was saved, and nothing goes on until a whole load has ended."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.flipped = self.half = False
        self.pairs = []
        for kind in (torch.optim.AdamW, torch.optim.Adamax):
            model = Small()
            made, optimizer = protrain.wrap(model, kind(model.parameters(), lr=1e-3), memory="16MiB", disk=work)
            made(torch.randn(4, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
            protrain.save(made, optimizer, work / kind.__name__)
            self.pairs.append((made, optimizer, work / kind.__name__))
        self.hostile = seeds_of("checkpoint")

    def close(self) -> None:
        for model, _, _ in self.pairs:
            protrain.unwrap(model)

    def one(self, chance: random.Random) -> None:
        model, optimizer, good = chance.choice(self.pairs)
        folder = self.work / "hostile"
        shutil.copytree(good, folder)
        try:
            self.damage(folder, chance)
            before = self.state(model, optimizer)
            self.half = False
            loaded = self.expect(lambda: self.load(model, optimizer, folder))
            if self.half:
                self.check_half_loaded(model, optimizer)
            elif not loaded:
                assert self.state(model, optimizer) == before, "it was refused, and something has changed"
            elif chance.random() < 0.1:
                self.expect(lambda: model(torch.randn(4, 64)).backward() or True)
                self.expect(lambda: optimizer.step() or True)
                optimizer.zero_grad()
            protrain.load(model, optimizer, good)
        finally:
            shutil.rmtree(folder)

    def load(self, model: Any, optimizer: Any, folder: Path) -> bool:
        try:
            protrain.load(model, optimizer, folder)
        except protrain.DiskError as error:
            self.half = error.errno == errno.EBADMSG and error.filename.endswith(".safetensors")
            raise
        assert not self.flipped, "a flipped bit was loaded"
        return True

    def check_half_loaded(self, model: Any, optimizer: Any) -> None:
        for call in (lambda: model(torch.randn(4, 64)), optimizer.step, lambda: protrain.save(model, optimizer, self.work / "x")):
            try:
                call()
            except protrain.StepError:
                continue
            raise AssertionError("a half loaded model goes on")

    def flip(self, path: Path, chance: random.Random) -> None:
        """A bit of a tensor that is read."""
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        data[chance.randrange(8 + length, len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)

    def damage(self, folder: Path, chance: random.Random) -> None:
        self.flipped = chance.random() < 0.2
        if self.flipped:
            self.flip(folder / chance.choice(("model.safetensors", "optimizer.safetensors")), chance)
            return
        path = folder / chance.choice(sorted(os.listdir(folder)))
        way = chance.randrange(10)
        if way == 0:
            path.unlink()
        elif way == 1:
            path.unlink()
            target = chance.choice(("", "fifo", "/dev/zero", path))
            if target == "":
                path.mkdir()
            elif target == "fifo":
                os.mkfifo(path)
            else:
                path.symlink_to(target)
        elif way == 2:
            name = chance.choice(("model.safetensors", "../AdamW/model.safetensors", "/dev/zero", "", ".", 1, None, "x\u0000"))
            index = {"weight_map": {"blocks.0.0.weight": name, "x": "model.safetensors"}}
            (folder / "model.safetensors.index.json").write_bytes(mutated(json.dumps(index).encode(), chance))
        elif way == 3:
            path.write_bytes(chance.choice(self.hostile))
        elif path.suffix == ".json":
            values = json.loads(path.read_bytes())
            if chance.random() < 0.9:
                values.pop("crc32c", None)
            path.write_bytes(mutated(json.dumps(values).encode(), chance))
        else:
            data = path.read_bytes()
            length = struct.unpack("<Q", data[:8])[0]
            header = mutated(data[8 : 8 + length], chance)
            path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])

    def state(self, model: Any, optimizer: Any) -> tuple[Any, ...]:
        values = [value.numpy().tobytes() for value in model.state_dict().values()]
        groups = [{key: repr(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        states = repr(optimizer.state_dict()["state"])
        return values, groups, states, bytes(torch.get_rng_state().numpy()), protrain.status(model).steps


class Modules(Target):
    """Random models, batches, options and loops, in plain torch and wrapped: the same bits."""

    def one(self, chance: random.Random) -> None:
        seed, width = chance.getrandbits(30), chance.choice((16, 48, 64, 100, 130))
        plan = [chance.randrange(9) for _ in range(chance.randrange(2, 9))]
        repeat, tied, frozen = chance.randrange(1, 5), chance.random() < 0.2, chance.random() < 0.2
        accumulate = chance.choice((1, 1, 2))
        clip = chance.choice((None, None, 0.1, 10.0))
        kind = chance.choice((torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD))
        words: dict[str, Any] = {"lr": chance.choice((1e-3, 0.1)), "weight_decay": chance.choice((0.0, 0.1))}
        if kind is torch.optim.SGD:
            words["momentum"] = chance.choice((0.0, 0.9))
        shape = (chance.randrange(1, 5), chance.randrange(1, 40), width)
        turned = chance.choice((0, 0, 2, 3))  # every second or third matrix lies transposed

        def make() -> nn.Module:
            torch.manual_seed(seed)
            model = Random(plan, width, repeat, tied, frozen)
            matrices = [p for p in model.parameters() if p.dim() == 2]
            for p in matrices[::turned] if turned else ():
                p.data = p.data.t().contiguous().t()
            return model

        def run(wrapped: bool) -> list[Any]:
            model: Any = make()
            optimizer: Any = kind([p for p in model.parameters() if p.requires_grad], fused=True, **words)
            n_blocks = len(protrain.model.blocks.find_blocks(model))
            if wrapped:
                modes = [chance.choice(("keep", "swap", "checkpoint", "checkpoint_swap")) for _ in range(n_blocks)]
                options = {"block_modes": chance.choice((None, modes)), "accumulate": accumulate, "max_grad_norm": clip}
                model, optimizer = wrap_small(model, optimizer, make, chance, self.work, shape, options)
                if model is None:
                    return []
            try:
                return self.train(model, optimizer, shape, accumulate, None if wrapped else clip)
            finally:
                if wrapped:
                    protrain.unwrap(model)

        want = run(False)
        found = run(True)
        if not found:
            self.refused += 1
            return
        self.accepted += 1
        same = [a == b for a, b in zip(found, want, strict=True)]
        assert all(same), f"{same}: {plan=} {width=} {repeat=} {tied=} {frozen=} {turned=}"

    @staticmethod
    def train(model: Any, optimizer: Any, shape: tuple[int, ...], accumulate: int, clip: float | None) -> list[Any]:
        figures: list[Any] = []
        torch.manual_seed(5)
        for step in range(3):
            for number in range(accumulate):
                x = torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + number))
                loss = model(x)
                loss.backward()
                figures.append(repr(loss.item()))  # in this form NaN is NaN
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        figures += [(value.stride(), value.numpy().tobytes()) for value in model.state_dict().values()]
        return figures


def wrap_small(
    model: Any, optimizer: Any, make: Callable[[], Any], chance: random.Random, disk: Path, shape: tuple[int, ...], options: Any
) -> tuple[Any, Any]:
    """Wrapped under a budget between the smallest that works and enough for everything; None where it is refused with reason."""
    budget = 64 * MIB
    if chance.random() < 0.8:
        try:
            protrain.plan(
                make(), torch.zeros(shape), memory=1, disk=disk, optimizer=optimizer_like(optimizer, make()),
                accumulate=options["accumulate"], max_grad_norm=options["max_grad_norm"], block_modes=options["block_modes"],
            )  # fmt: skip
        except protrain.BudgetError as error:
            budget = int(error.smallest_bytes * chance.choice((1.0, 1.1, 1.5, 3.0))) + MIB
        except ValueError:
            pass
    return protrain.wrap(model, optimizer, memory=budget, disk=disk, **options)


def optimizer_like(optimizer: Any, model: Any) -> Any:
    """One of the same class and settings over another model."""
    taken = inspect.signature(type(optimizer)).parameters
    words = {key: value for key, value in optimizer.defaults.items() if key in taken}
    return type(optimizer)([p for p in model.parameters() if p.requires_grad], **words)


class Random(nn.Module):
    """Blocks of random parts; `repeat` like each other."""

    def __init__(self, plan: list[int], width: int, repeat: int, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Parts(plan, width) for _ in range(repeat))
        self.head = nn.Linear(width, width)
        if tied:
            self.head.weight = self.stem.weight
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Parts(nn.Module):
    """One random part after another, with a path around each."""

    def __init__(self, plan: list[int], width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.part(kind, width) for kind in plan)

    @staticmethod
    def part(kind: int, width: int) -> nn.Module:
        match kind:
            case 0:
                return nn.Linear(width, width)
            case 1:
                return nn.LayerNorm(width)
            case 2:
                return nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width, bias=False))
            case 3:
                return nn.Dropout(0.2)
            case 4:
                return nn.Tanh()
            case 5:
                return Attention(width)
            case 6:
                return Scaled(width)
            case 7:
                return nn.RMSNorm(width)
            case _:
                return nn.Softplus()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + 0.5 * part(x)
        return x


class Attention(nn.Module):
    """Of one head, over the rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).chunk(3, dim=-1)
        y: torch.Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return y


class Scaled(nn.Module):
    """A parameter by itself, a buffer, a view, an operation in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        y = x * self.scale
        y = y.transpose(-1, -2).contiguous().mul_(0.5)
        return y.transpose(-1, -2)


TARGETS: dict[str, type[Target]] = {
    "plan": Plans,
    "profile": Profiles,
    "hardware": Machines,
    "safetensors": TensorFiles,
    "optimizer": OptimizerFiles,
    "checkpoint": Checkpoints,
    "modules": Modules,
}


class Watch:
    """Ends an input that takes too long. It counts ticks, of which there is one however long the process is stopped (SIGSTOP)."""

    def __init__(self) -> None:
        self._ticks = 0
        signal.signal(signal.SIGALRM, self._tick)
        signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)

    def begin(self) -> None:
        self._ticks = 0

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _tick(self, _number: int, _frame: Any) -> None:
        self._ticks += 1
        if self._ticks * TICK_SECONDS > HANG_SECONDS:
            raise AssertionError(f"no answer in {HANG_SECONDS} s")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("target", choices=TARGETS)
    words.add_argument("--seconds", type=float, default=float(os.environ.get("PROTRAIN_FUZZ_SECONDS", "5")))
    words.add_argument("--seed", type=int, default=int(os.environ.get("PROTRAIN_FUZZ_SEED", "1")))
    words.add_argument("--count", type=int, default=1 << 62, help="at most so many inputs")
    given = words.parse_args()
    torch.set_num_threads(1)
    watch = Watch()
    with tempfile.TemporaryDirectory(dir=os.environ.get("PROTRAIN_DISK")) as work:
        target = TARGETS[given.target](Path(work))
        until, seed = time.monotonic() + given.seconds, given.seed
        # A run in which nothing was accepted says little: a slow machine is given longer.
        while time.monotonic() < until + (0 if target.accepted else SLOW_SECONDS) and seed - given.seed < given.count:
            watch.begin()
            try:
                target.one(random.Random(seed))
            except BaseException as error:
                error.add_note(f"python tests/fuzz.py {given.target} --seed {seed} --count 1 reproduces it")
                raise
            seed += 1
        watch.end()
        if isinstance(target, Checkpoints):
            target.close()
    print(
        f"fuzz {given.target}: {seed - given.seed} inputs, {target.accepted} accepted, {target.refused} refused, "
        f"seeds {given.seed} to {seed - 1}, {time.process_time():.0f} s of processor time"
    )


if __name__ == "__main__":
    sys.exit(main())
