"""The entry of the command line and its exit codes.

0; 2 with the usage for wrong words; 130 after Ctrl-C; 1 with exactly one line on stderr for anything else. A traceback is
shown only where PROTRAIN_TRACEBACK=1 asks for it. Warnings of other packages do not reach stderr; those of protrain itself
go to those who listen (notes.py).
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Any

import click
from click.core import ParameterSource

from protrain import __version__
from protrain.cli import interrupt, notes
from protrain.cli.words import (
    CommandError,
    PathName,
    WholeNumber,
    bench_options,
    message_of,
    model_options,
    plan_options,
    report_option,
)

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class _Command(click.Command):
    """A command whose wrong words all are told with its usage; click leaves that out where an option lacks its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


class _Group(_Command, click.Group):
    command_class = _Command
    group_class = type


@click.group(cls=_Group, context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="protrain")
def commands() -> None:
    """Train models whose training state does not fit memory, bit for bit as plain PyTorch does.

    Exit codes: 0 all is well, 1 an error told in one line, 2 wrong words, 130 after Ctrl-C.
    """


@commands.command(context_settings=_CONTEXT)
@model_options
@click.option(
    "--out",
    type=PathName(),
    metavar="FOLDER",
    help="Where the trained model and its tokenizer are saved, for from_pretrained. [default: nowhere]",
)
@click.option(
    "--save-every", type=WholeNumber(min=1), metavar="N", help="Save a checkpoint into --out every N steps. [default: never]"
)
@click.option(
    "--resume", type=PathName(), metavar="FOLDER", help="Go on from the checkpoint in this folder. [default: start anew]"
)
@click.option(
    "--trace",
    type=PathName(),
    metavar="FILE",
    help="Write what compute, disk, updates and waits did in the last three steps, as a Chrome trace for ui.perfetto.dev; "
    "also after Ctrl-C. [default: no trace]",
)
@click.option(
    "--save-profile",
    type=PathName(),
    metavar="FILE",
    help="Write what the steps have shown, so that plan --profile plans by it. [default: nowhere]",
)
@report_option("the training")
def train(**words: Any) -> None:
    """Train a language model on text."""
    from protrain.cli.train import Words, run

    run(Words(**words))


@commands.command(context_settings=_CONTEXT, short_help="Show how a training would be laid out, without training.")
@model_options
@plan_options
@click.pass_context
def plan(context: click.Context, /, **_: Any) -> None:
    """Show how a training would be laid out and how long a step would take, without training. Takes train's words, but those of
    what is written.

    The model is measured here, without its states; or planned for from a profile (--profile), or for a described machine
    (--hardware). --json prints the plan's fields, with --sweep a line for each budget.
    """
    from protrain.cli.plan import run

    run(context)


@commands.command(context_settings=_CONTEXT, short_help="Say what this machine offers and what it means.")
@click.option(
    "--disk",
    type=PathName(),
    metavar="FOLDER",
    help="The folder to measure. [default: $PROTRAIN_DISK, else the temporary directory]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout. [default: a table]")
def doctor(disk: str | None, as_json: bool) -> None:
    """Say what this machine offers, measured where it can be, and what that means."""
    from protrain.cli.doctor import run

    run(disk, as_json)


@commands.group(context_settings=_CONTEXT, invoke_without_command=True, short_help="Compare and measure on this machine.")
@bench_options(
    model="gpt2-demo",
    memory="700MiB",
    memory_help="The budget for all of them.",
    seq=256,
    batch=1,
    rounds_help="Steps measured of each, taking turns, after three that are not.",
    disk_help="what does not fit memory",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Two settings of each peer, and not the largest model that the budget holds: minutes. [default: all]",
)
@click.option("--search", is_flag=True, help="Search every peer's best setting again. [default: what was found before stays]")
@click.option(
    "--peers",
    multiple=True,
    metavar="NAME",
    help="Compare this one with plain torch, by the name of its row or of its folder in benchmarks/peers; may be given several "
    "times. [default: all of the run]",
)
@click.option(
    "--out", type=PathName(), metavar="FOLDER", help="Write peers.json, peers.md and peers.png there. [default: nowhere]"
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout. [default: a table]")
@report_option("the comparison", "table, speed against memory, step times, settings, what did not run and why")
@click.pass_context
def bench(context: click.Context, /, **words: Any) -> None:
    """Compare protrain with other ways to train in little memory, each with its best setting; or measure one thing by a command.

    Plain torch, checkpointing, save_on_cpu, saved tensors to disk in plain Python, FSDP2, DeepSpeed and others get the same
    model, batches and budget, and take turns, one step each. What one needs is installed at its first use into build/peers.
    --quick takes a quarter of an hour, the full run about an hour. It needs a checkout, and downloads the peers.
    """
    if context.invoked_subcommand is None:
        from protrain.cli.bench_peers import Words, run

        run(Words(**words))
    elif given := [name for name in words if context.get_parameter_source(name) != ParameterSource.DEFAULT]:
        raise click.UsageError(f"options of {context.invoked_subcommand} come after it: {', '.join(sorted(given))}", context)


@bench.command(context_settings=_CONTEXT, short_help="A training step beside plain PyTorch's.")
@bench_options(
    model="gpt2",
    memory=None,
    memory_help="protrain's budget, in bytes or as 512MiB. [default: half of 16 bytes a parameter]",
    seq=128,
    batch=1,
    rounds_help="Steps measured of each, taking turns, after three that are not.",
    disk_help="what does not fit memory",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout. [default: a table]")
@report_option("both, and protrain's steps")
def step(**words: Any) -> None:
    """Time a training step of plain PyTorch and of protrain, taking turns in one run."""
    from protrain.cli.bench import Words, run

    run(Words(**words))


@bench.command(context_settings=_CONTEXT, short_help="Speed against activation memory, mode by mode.")
@bench_options(
    model="gpt2-bytes",
    memory="4GiB",
    memory_help="protrain's budget, which must hold every state and all activations.",
    seq=512,
    batch=4,
    rounds_help="Steps measured of each configuration, taking turns, after three that are not.",
    disk_help="activations that leave memory",
    beside_rounds=[
        click.option(
            "--mixes",
            type=WholeNumber(min=0),
            default=3,
            show_default=True,
            metavar="N",
            help="Mixes of swap and keep, and of checkpoint and keep, that are measured beside the pure modes.",
        )
    ],
)
@click.option("--out", type=PathName(), metavar="FILE.png", help="Draw the curve, by matplotlib. [default: no picture]")
@click.option(
    "--json", "as_json", is_flag=True, help="JSON lines on stdout: one a configuration, then one of all. [default: a table]"
)
@report_option("the curve, and a step of each mode")
def activations(**words: Any) -> None:
    """Measure speed against the memory of activations, for the modes of blocks and mixes of them.

    Every state stays in memory. Each configuration is a process of its own with the same weights and batches; they take turns,
    one step each. As many run at once as memory holds, always with keep among them, to which times are compared.
    """
    from protrain.cli.bench_activations import Words, run

    run(Words(**words))


def main() -> None:
    """Run the command line on sys.argv and exit; never returns."""
    _open_streams()
    interrupt.install()
    _quiet()
    code = _run()
    try:
        sys.stdout.flush()
    except (OSError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):  # nobody read it for a while
            code = interrupt.pressed() or 130
        elif not isinstance(error, BrokenPipeError):
            code = code or _fail(CommandError(f"stdout cannot be written: {error.strerror or error}; give it a place with room"))
        code = code or 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains when it flushes at its end
    interrupt.ignore_more()
    sys.exit(code)


def _open_streams() -> None:
    """Streams that were closed lead nowhere, and their numbers are no other file's; a letter that an encoding lacks is shown as
    its number."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))
    if getattr(sys.stdout, "write_through", False):  # by PYTHONUNBUFFERED: what a full disk does not take would be forgotten
        sys.stdout = os.fdopen(sys.stdout.fileno(), "w", buffering=1, encoding=sys.stdout.encoding, closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run() -> int:
    try:
        try:
            # Not commands.main: it would write to stderr when interrupted.
            with commands.make_context("protrain", sys.argv[1:]) as context:
                commands.invoke(context)
            return 0
        except click.UsageError as error:
            error.show()
            return 2
        except click.exceptions.Exit as exit_:
            return exit_.exit_code
        except (KeyboardInterrupt, click.Abort):
            return interrupt.pressed() or 130
        except BaseException as error:
            return interrupt.pressed() or _fail(error)
    except KeyboardInterrupt:  # in one of the lines above
        return interrupt.pressed() or 130


def _fail(error: BaseException) -> int:
    """One line on stderr; 1."""
    if os.environ.get("PROTRAIN_TRACEBACK") == "1":
        traceback.print_exception(error)
    if isinstance(error, BrokenPipeError):
        message = "nobody reads stdout any more; what was under way is ended"
    elif isinstance(error, OSError) and error.filename is None and _is_of_stdout(error):
        message = f"stdout cannot be written: {error.strerror or error}; give it a place with room"
    else:
        message = message_of(error)
    print(f"protrain: {message}"[:2000], file=sys.stderr)
    return 1


def _is_of_stdout(error: OSError) -> bool:
    """Whether stdout fails in the same way; what it did not take is kept, and can be tried again."""
    try:
        sys.stdout.flush()
    except OSError as again:
        return again.errno == error.errno
    return False


def _quiet() -> None:
    """Keep stderr for our own lines."""
    defaults = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if os.environ.get("PROTRAIN_TRACEBACK") == "1":
        return
    notes.keep()
    sys.unraisablehook = lambda unraisable: None  # an interrupt inside a callback; interrupt.pressed still knows of it
