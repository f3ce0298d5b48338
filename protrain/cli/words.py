"""The words that commands share: sizes, the options of train and plan, and how numbers are shown."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from protrain.base.reading import MOST_COUNT, MOST_INT, shown
from protrain.base.replacing import is_of_a_model
from protrain.base.sizes import MOST_PASSES, UNITS, check_folder, scaled

MIB = 1 << 20
_Command = TypeVar("_Command", bound=Callable[..., Any])


class CommandError(Exception):
    """What a user can put right: one line on stderr and exit code 1."""


class Size(click.ParamType[int]):
    """A number of bytes, as 1073741824, 1GiB, 512MiB or 1.5GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        unit = UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            self.fail(f"{value!r} is not a size; give bytes or a size such as 512MiB or 4GiB.", param, ctx)
        size = scaled(match[1], unit)
        if size > MOST_INT:
            self.fail(f"{shown(value)} is more than any machine has; give a size such as 512MiB or 4GiB.", param, ctx)
        if size <= 0:
            self.fail(f"{value!r} is no memory at all; give a size above zero such as 512MiB.", param, ctx)
        return size


class DeviceName(click.ParamType[str]):
    """What computes: cpu, cuda, or cuda:1 for one GPU of several."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", value):
            self.fail(f"{value!r} is no device; give cpu, cuda, or cuda:1 for one GPU of several.", param, ctx)
        return str(value)


class PathName(click.Path):
    """A path. "~" is the home folder, also where no shell has seen that, as behind "--out=". Whether it can be read tells who
    reads it."""

    def __init__(self) -> None:
        super().__init__(readable=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return os.path.expanduser(super().convert(value, param, ctx))


class WholeNumber(click.IntRange):
    """An int inside a range."""

    name = "whole number"  # as in "'x' is not a valid whole number"


class Finite(click.FloatRange):
    """A float inside a range; "nan" and "inf" are refused, which compare as no range expects."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if number != number or number in (float("inf"), float("-inf")):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def check_path(option: str, folder: str) -> None:
    """Whether it is a path of this machine. Raises CommandError."""
    try:
        check_folder(folder, option)
    except ValueError as error:
        raise CommandError(str(error)) from None


def check_file(option: str, name: str) -> None:
    """Whether a file can be written there, tried before anything slow begins; what is there stays. Raises CommandError."""
    if not os.path.basename(name):
        raise CommandError(f"{option} {name!r} names no file; give the name of a file to write")
    folder = os.path.dirname(os.path.realpath(name))
    try:
        if os.path.lexists(name) and not stat.S_ISREG(os.stat(name).st_mode):
            raise CommandError(f"{option} {name!r} is no ordinary file; give the name of a file to write")
        if os.path.lexists(name) and is_of_a_model(os.path.basename(os.path.realpath(name))):
            raise CommandError(f"{option} {name!r} is a file of a model, which would be gone; give another name")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(
            f"{option} {name!r} cannot be written: {error.strerror} ({folder}); give a file in a folder that can be written to"
        ) from None


@contextmanager
def writing(option: str, name: str, advice: str = "give a file in a folder with room for it") -> Iterator[None]:
    """What is written inside is the file, or the folder, of this option. Raises CommandError where it cannot be."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{option} {name!r} cannot be written: {error.strerror or error}; {advice}") from None


@contextmanager
def naming(options: str, advice: str) -> Iterator[None]:
    """Numbers that are refused inside come from these options. Raises CommandError; protrain's errors name them themselves."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        if _is_ours(error):
            raise
        raise CommandError(f"{options}: {error}; {advice}") from error


def message_of(error: BaseException) -> str:
    """What a user is told of an error, in one line; with its kind where it is none that protrain words."""
    message = " ".join(str(error).split()).replace('disk="..."', "--disk")
    if message.startswith("n_devices is"):  # else it is a file that says so
        message = f"--devices is{message.removeprefix('n_devices is')}"
    if isinstance(error, PermissionError) and isinstance(error.filename, str):
        message = f"{error.filename!r}: {error.strerror}; give a path that this user may use"
    if any(kind.__name__ == "BudgetError" for kind in type(error).__mro__):
        message = f"--{message}" if message.startswith("memory: ") else message if "memory" in message else f"--memory: {message}"
    kind = "" if message and (isinstance(error, (CommandError, OSError)) or _is_ours(error)) else f"{type(error).__name__}: "
    return f"{kind}{message or 'no message; PROTRAIN_TRACEBACK=1 shows where'}"


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] == "protrain"


def check_picture(option: str, name: str) -> None:
    """Whether a picture can be drawn there, before anything slow begins. Raises CommandError."""
    if not name.lower().endswith(".png"):
        raise CommandError(f"{option} {name!r} is no PNG; give a name that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError(f"{option} needs matplotlib, which is not installed: pip install 'protrain[bench]'")
    check_file(option, name)


def model_options(command: _Command) -> _Command:
    """The options by which train and plan describe the same training: they take them word for word."""
    options = [
        click.option(
            "--model",
            "model_name",
            default="gpt2",
            show_default=True,
            type=PathName(),
            metavar="NAME|FOLDER",
            help="A shipped config (gpt2, gpt2-bytes, gpt2-demo, gpt2-medium, gpt2-large, gpt2-xl, llama-small) or a folder with "
            "config.json; "
            "safetensors in the folder are where training starts from, else random weights.",
        ),
        click.option(
            "--data",
            "data",
            multiple=True,
            type=PathName(),
            metavar="PATH",
            help="Text file, or folder of text files, with those that links lead to; may be given several times. "
            "[default: the sources of Python's standard library]",
        ),
        click.option(
            "--memory",
            type=Size(),
            metavar="SIZE",
            help="Hard budget for parameters, gradients, activations and workspace together, in bytes or as 512MiB, 4GiB. "
            "[default: what is free now, less a reserve]",
        ),
        click.option(
            "--device",
            type=DeviceName(),
            default="cpu",
            show_default=True,
            metavar="DEVICE",
            help="What trains, or what plan measures: cpu, cuda, or cuda:1 for one GPU of several. --memory then is the GPU's.",
        ),
        click.option(
            "--host-memory",
            type=Size(),
            metavar="SIZE",
            help="Budget of host memory beside a device: with --device cuda, or with plan's --hardware or --profile. "
            "[default: the hardware's, or what is free now less a reserve]",
        ),
        click.option(
            "--seq",
            type=WholeNumber(min=2, max=MOST_COUNT),
            metavar="TOKENS",
            help="Length of a sequence in tokens. [default: 512, or the model's longest if shorter]",
        ),
        click.option(
            "--batch",
            type=WholeNumber(min=1, max=MOST_COUNT),
            default=1,
            show_default=True,
            metavar="N",
            help="Sequences in one forward and backward pass.",
        ),
        click.option(
            "--steps",
            type=WholeNumber(min=1),
            default=20,
            show_default=True,
            metavar="N",
            help="Optimizer steps in all, counted from 1.",
        ),
        click.option(
            "--lr",
            type=Finite(min=0, min_open=True),
            metavar="X",
            help="Learning rate of AdamW, per step, constant. [default: 0.0003, or that of --resume]",
        ),
        click.option(
            "--seed",
            type=WholeNumber(min=0, max=2**32 - 1),
            default=0,
            show_default=True,
            metavar="N",
            help="Seed of weights, batches and dropout: on the CPU the same seed gives the same bits under any budget.",
        ),
        click.option(
            "--disk",
            type=PathName(),
            metavar="FOLDER",
            help="Folder for what does not fit memory; not a tmpfs. [default: $PROTRAIN_DISK, else the temporary directory]",
        ),
        click.option(
            "--accumulate",
            type=WholeNumber(min=1, max=MOST_PASSES),
            default=1,
            show_default=True,
            metavar="N",
            help="Backward passes in one optimizer step.",
        ),
        click.option(
            "--max-grad-norm",
            type=Finite(min=0, min_open=True),
            metavar="X",
            help="Clip the global 2-norm of the gradients to this. [default: no clipping]",
        ),
        click.option(
            "--precision",
            type=click.Choice(["fp32", "bf16"]),
            default="fp32",
            show_default=True,
            help="Number format of parameters and gradients; bf16 has an fp32 master.",
        ),
        click.option("--json", "as_json", is_flag=True, help="JSON lines alone on stdout. [default: text]"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def report_option(
    what: str, parts: str = "memory and lanes of a step, plan, predictions, loss"
) -> Callable[[_Command], _Command]:
    """--report of a command. Args: what, the report is about; parts, of its page."""
    return click.option(
        "--report",
        type=PathName(),
        metavar="FILE.html",
        help=f"Write a page about {what}: {parts}. Needs the extra report. Written after Ctrl-C too. [default: no report]",
    )


def plan_options(command: _Command) -> _Command:
    """The options that plan has beside those of train: where its figures come from, and a sweep over budgets."""
    options = [
        click.option(
            "--profile",
            type=PathName(),
            metavar="FILE",
            help="Plan from this profile, which --save-profile wrote, for --memory or --sweep; no model is loaded. "
            "[default: the model is measured here, without its states]",
        ),
        click.option(
            "--save-profile",
            type=PathName(),
            metavar="FILE",
            help="Write what was measured, so that --profile gives the same plans elsewhere. [default: nowhere]",
        ),
        click.option(
            "--hardware",
            type=PathName(),
            metavar="NAME|FILE",
            help="Plan for this machine, one that ships or a TOML file that describes one; nothing is measured. Precision is "
            "mixed where its device has memory of its own, unless --precision is given. [default: this machine]",
        ),
        click.option(
            "--devices",
            type=WholeNumber(min=1),
            metavar="N",
            help="Devices of --hardware that are used. [default: all]",
        ),
        click.option(
            "--sweep",
            is_flag=True,
            help="Plan for a dozen budgets, from the smallest that works to the largest of use. [default: for --memory alone]",
        ),
        click.option(
            "--out", type=PathName(), metavar="FILE.png", help="With --sweep: draw it, by matplotlib. [default: no picture]"
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def bench_options(
    *,
    model: str,
    memory: str | None,
    memory_help: str,
    seq: int,
    batch: int,
    rounds_help: str,
    disk_help: str,
    beside_rounds: Sequence[Callable[[Any], Any]] = (),
) -> Callable[[_Command], _Command]:
    """The options that the benchmarks share, with the defaults of one of them; `beside_rounds` are its own, after --rounds."""
    options = [
        click.option(
            "--model",
            "model_name",
            default=model,
            show_default=True,
            type=PathName(),
            metavar="NAME|FOLDER",
            help="A shipped config or a folder with config.json; random weights.",
        ),
        click.option("--memory", type=Size(), default=memory, show_default=memory is not None, metavar="SIZE", help=memory_help),
        click.option(
            "--seq",
            type=WholeNumber(min=2),
            default=seq,
            show_default=True,
            metavar="TOKENS",
            help="Length of a sequence.",
        ),
        click.option(
            "--batch", type=WholeNumber(min=1), default=batch, show_default=True, metavar="N", help="Sequences in a step."
        ),
        click.option("--rounds", type=WholeNumber(min=1), default=5, show_default=True, metavar="N", help=rounds_help),
        *beside_rounds,
        click.option(
            "--seed",
            type=WholeNumber(min=0, max=2**32 - 1),
            default=0,
            show_default=True,
            metavar="N",
            help="Seed of weights, batches and dropout.",
        ),
        click.option(
            "--disk",
            type=PathName(),
            metavar="FOLDER",
            help=f"Folder for {disk_help}. [default: $PROTRAIN_DISK, else the temporary directory]",
        ),
    ]

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def size_text(size: float) -> str:
    """Bytes as a person reads them: three digits or so and a binary unit."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= scale:
            value = size / scale
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:,.0f} {unit}"
    return f"{size:.0f} bytes"


def finite(value: Any) -> Any:
    """The value with None in the place of each number that is none or infinite, which JSON has not: a loss may be one."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON for programs, in one line where there is no indent."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def count(number: int, word: str) -> str:
    """As "3 steps"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds < 100:
        return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
