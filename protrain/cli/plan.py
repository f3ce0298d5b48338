"""`protrain plan`: what a training of these words would look like, without training.

A plan comes from one of three sources: the model measured here, on the CPU or on a GPU, without its states; a profile that was
measured before, here or elsewhere; or a description of hardware, with which nothing is measured at all. Each gives a plan for
any budget, so that what more memory would buy can be said beside it, and a sweep over budgets drawn.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import click

from protrain.base.reading import open_file
from protrain.cli.display import status_line
from protrain.cli.words import CommandError, check_file, check_picture, naming, size_text, writing
from protrain.errors import BudgetError, PlanError

if TYPE_CHECKING:
    from protrain.cli.train import Setup, Words
    from protrain.planner.hardware import Hardware
    from protrain.planner.plans import Plan
    from protrain.planner.profiles import Profile

GIB = 1 << 30
#: Smaller chunks have a smaller budget, which may ask for chunks of yet another size.
MOST_PROFILES = 4


@dataclass(frozen=True)
class PlanWords:
    """The options that plan has beside those of train, as given. Sizes in bytes."""

    profile: str | None
    save_profile: str | None
    hardware: str | None
    devices: int | None
    sweep: bool
    out: str | None


@dataclass(frozen=True)
class Source:
    """Where plans come from.

    title: what they are of, in a line. numbers_from: the options whose numbers the planner may refuse, and what to do then.
    profile_for: the profile with chunks of the size that a budget in bytes asks for. plan: that of a profile for a budget in
    bytes, which raises BudgetError. budget_bytes: the one that was asked for; ceiling_bytes: the largest there can be, or None.
    again: plans from the beginning for a budget that was refused, and raises what is to be told, since a profile has chunks of
    one size. age: of what was measured before this call, in words; "" where it was measured in it, or nothing was.
    """

    title: str
    numbers_from: tuple[str, str]
    profile_for: Callable[[int], Profile]
    plan: Callable[[Profile, int], Plan]
    budget_bytes: int
    ceiling_bytes: int | None = None
    again: Callable[[int], object] = lambda _: None
    age: Callable[[], str] = lambda: ""


def run(context: click.Context) -> None:
    """Plan and print. Raises click.UsageError for words that do not go together, CommandError, OSError and protrain's errors."""
    from protrain.cli.train import Words

    own = PlanWords(**{field.name: context.params[field.name] for field in fields(PlanWords)})
    words = Words(**{name: value for name, value in context.params.items() if name not in vars(own)})
    given = given_words(context)
    check_together(context, own, given)
    if own.out is not None:
        check_picture("--out", own.out)
    if own.save_profile is not None:
        check_file("--save-profile", own.save_profile)
    source = _source(words, own, words.precision if "precision" in given else None)
    profile = _sweep(words, own, source) if own.sweep else _plan(words, own, source)
    if own.save_profile is not None:
        from protrain.base.replacing import write_file

        with writing("--save-profile", own.save_profile):
            write_file(own.save_profile, profile.to_json().encode())
        if not words.as_json:
            print(f"profile saved to {own.save_profile}")


def _plan(words: Words, own: PlanWords, source: Source) -> Profile:
    """For one budget; returns what it was made from."""
    budget = source.budget_bytes
    with naming(*source.numbers_from), status_line(words.as_json) as say:
        say("reading the profile" if own.profile else "measuring the model and the machine")
        try:
            profile = source.profile_for(budget)
            plan = source.plan(profile, budget)
        except (BudgetError, PlanError):
            source.again(budget)
            raise
        try:
            more = source.plan(profile, budget + more_bytes(budget))  # also past what the machine has: it says what to buy
        except BudgetError:  # of another tier, which would have more to hold
            more = None
    if words.as_json:
        print(plan.to_json())
    else:
        print(f"{source.title}, budget {size_text(budget)}")
        _say_age(source)
        print(plan.explain(more))
    return profile


def _sweep(words: Words, own: PlanWords, source: Source) -> Profile:
    """For a dozen budgets; returns what they are made from. All have chunks of the size that the smallest asks for, so that they
    compare."""
    from protrain.cli import sweep

    ceiling = source.ceiling_bytes or sweep.ENDLESS_BYTES
    with naming(*source.numbers_from), status_line(words.as_json) as say:
        say("reading the profile" if own.profile else "measuring the model and the machine")
        profile = profile_for_sweep(source, ceiling)
        say("planning")
        plans = sweep.sweep(lambda budget: source.plan(profile, budget), ceiling)
    if not words.as_json:
        _say_age(source)
    sweep.show(f"{source.title}, chunks of {size_text(profile.chunk_bytes)}", plans, words.as_json, own.out)
    return profile


def profile_for_sweep(source: Source, ceiling_bytes: int) -> Profile:
    """With chunks of the size that the smallest budget asks for which works with them."""
    from protrain.cli import sweep

    profile, chunk_bytes = source.profile_for(source.budget_bytes), 0
    for _ in range(MOST_PROFILES):
        if profile.chunk_bytes == chunk_bytes:
            break
        chunk_bytes = profile.chunk_bytes
        profile = source.profile_for(sweep.smallest_budget(functools.partial(source.plan, profile), ceiling_bytes))
    return profile


def _say_age(source: Source) -> None:
    if age := source.age():
        print(f"measured {age}; with --save-profile it is measured anew")


def more_bytes(budget_bytes: int) -> int:
    """By how much the budget is raised to see what more memory would buy: a GiB, or an eighth of a budget below 4 GiB."""
    return GIB if budget_bytes >= 4 * GIB else max(budget_bytes // 8, 1)


def given_words(context: click.Context) -> dict[str, str]:
    """The options that stand on the command line: name of the parameter -> as it is written."""
    return {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if parameter.name is not None and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
    }


def check_together(context: click.Context, own: PlanWords, given: Mapping[str, str]) -> None:
    """Whether the words go together. Raises click.UsageError, of one sentence."""

    def refuse(names: tuple[str, ...], why: str) -> None:
        if found := [given[name] for name in names if name in given]:
            raise click.UsageError(f"{why}; leave {' and '.join(found)} out.", context)

    of_a_step = ("accumulate", "max_grad_norm", "precision", "data", "disk", "save_profile")
    if own.profile is not None:
        refuse(
            ("model_name", "seq", "batch", "device", "hardware", "devices", *of_a_step),
            "--profile has model, batch and machine in it",
        )
    if own.hardware is not None:
        refuse(
            ("device", "accumulate", "max_grad_norm", "disk", "data", "save_profile"),
            "with --hardware nothing is measured or run here",
        )
    elif own.devices is not None:
        raise click.UsageError(f"--devices {own.devices} needs --hardware, the machine that has them.", context)
    elif "host_memory" in given and own.profile is None and context.params["device"] == "cpu":
        raise click.UsageError(
            "--host-memory needs --device cuda, --hardware or --profile: where the CPU computes, device and host are one.",
            context,
        )
    if own.sweep:
        refuse(("memory",), "--sweep tries budgets from the smallest that works to the largest of use")
    elif own.out is not None:
        raise click.UsageError(f"--out {own.out!r} is the picture of --sweep; give --sweep too, or leave --out out.", context)
    elif own.profile is not None and "memory" not in given:
        raise click.UsageError("--profile needs --memory, the budget to plan for, or --sweep.", context)


# ---- the three sources ----


def _source(words: Words, own: PlanWords, precision: str | None) -> Source:
    if own.profile is not None:
        return _from_file(words, own.profile)
    from protrain.cli.train import check_gpu, prepare

    if words.device != "cpu":
        check_gpu(words)
    setup = prepare(words)
    if own.hardware is not None:
        import torch  # noqa: F401 - before protrain's core, which links to it

        from protrain.planner.hardware import load_hardware

        return _from_hardware(words, own, setup, load_hardware(own.hardware, n_devices=own.devices), precision)
    return _from_here(words, setup, anew=own.save_profile is not None)


def _from_file(words: Words, name: str) -> Source:
    """No model is loaded, nothing of this machine counts."""
    import torch  # noqa: F401 - before protrain's core, which links to it

    from protrain.planner.planning import plan_from_profile
    from protrain.planner.profiles import Profile

    try:
        with open_file(name) as file:
            text = file.read().decode()
    except UnicodeDecodeError:
        raise CommandError(f"--profile {name!r} is no text; give a file that --save-profile wrote") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"--profile {name!r} cannot be read: {reason}; give a file that --save-profile wrote") from None
    try:
        profile = Profile.from_json(text)
    except PlanError as error:
        reason = str(error).removeprefix("profile: ")
        raise CommandError(f"--profile {name!r}: {reason}; give a file that --save-profile wrote") from error
    if profile.overhead is not None and words.host_memory is None:
        raise CommandError("--profile was measured over a GPU; give --host-memory too, the budget of the host beside it")
    if words.host_memory is not None and profile.machine.upload.bytes_per_second == 0:
        raise CommandError("--host-memory: the machine of this profile has no host beside its device; leave the option out")
    host_bytes = words.host_memory or 0
    return Source(
        f"{profile.model or 'a model'}, {_states(profile)}, from {name}",
        (f"--profile {name!r}", "give a file that --save-profile wrote"),
        lambda budget: profile,
        lambda found, budget: plan_from_profile(found, budget, host_budget_bytes=host_bytes),
        words.memory or 0,
    )


def _from_here(words: Words, setup: Setup, anew: bool) -> Source:
    """Measures the model, or takes what was measured within the hour. Its values are never made: it stays on meta, and the tokens
    are arbitrary."""
    from protrain.api import plan, profile
    from protrain.base.sizes import default_disk_folder, default_memory_bytes
    from protrain.cli.measured import Measured, described
    from protrain.cli.model import build
    from protrain.cli.train import any_tokens, disk_folder, step_options
    from protrain.device.compute import choose
    from protrain.planner.planning import plan_from_profile

    model = build(copy.deepcopy(setup.config))
    compute = choose(list(model.named_parameters()), words.device)
    host_bytes = (words.host_memory or default_memory_bytes()) if compute.separate else 0
    ids = any_tokens(words, setup.seq)
    name = f"{words.model_name}, batch {words.batch} x {setup.seq} tokens"

    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    options: dict[str, Any] = {
        "device": words.device, "disk": words.disk, "accumulate": words.accumulate, "max_grad_norm": words.max_grad_norm,
        "precision": words.precision,
    }  # fmt: skip

    @functools.cache
    def measured() -> Measured:
        disk = words.disk or default_disk_folder()
        return Measured(described(setup.config, words.batch, setup.seq, words.precision, words.device, disk), anew)

    def profile_for(budget_bytes: int) -> Profile:
        with disk_folder(words.disk):
            found = measured().profile(lambda known: profile(model, batch, memory=budget_bytes, measured=known, **options))
            return replace(found, model=name)

    def again(budget_bytes: int) -> None:
        with disk_folder(words.disk):
            plan(model, batch, memory=budget_bytes, host_memory=host_bytes or None, **options)

    count = sum(parameter.numel() for parameter in model.parameters())
    return Source(
        f"{words.model_name}: {count:,} parameters, {size_text(16 * count)} of states, batch {words.batch} x {setup.seq} tokens"
        + (f", on {words.device} and {size_text(host_bytes)} of host memory" if compute.separate else ""),
        (step_options(words, setup.seq), "give less of them"),
        profile_for,
        lambda found, budget: plan_from_profile(found, budget, host_budget_bytes=host_bytes),
        compute.default_memory_bytes() if words.memory is None else words.memory,
        again=again,
        age=lambda: measured().age(),
    )


def _from_hardware(words: Words, own: PlanWords, setup: Setup, hardware: Hardware, precision: str | None) -> Source:
    """Counts the model's operations. A device with memory of its own trains in mixed precision unless the words say otherwise."""
    from protrain.cli.train import step_options
    from protrain.planner.offline import plan_for, plan_offline, profile_offline

    def planned(profile: Profile, budget: int) -> Plan:
        """Also for a device with more memory than there is: what would be bought."""
        missing = max(budget - hardware.device_bytes, 0)
        device = replace(hardware.device, memory_bytes=hardware.device.memory_bytes + missing)
        return plan_for(profile, replace(hardware, device=device), memory=budget, host_memory=words.host_memory)

    if words.host_memory is not None and hardware.host is None:
        raise CommandError(
            f"--host-memory: {hardware.name} has no host beside its device, which computes out of --memory; leave the option out"
        )
    for option, given, there in (
        ("--memory", words.memory, hardware.device_bytes),
        ("--host-memory", words.host_memory, hardware.host_bytes),
    ):
        if given is not None and given > there:
            raise CommandError(f"{option} {size_text(given)} is more than {hardware.name} has; give at most {there} bytes")
    precision = precision or ("mixed" if hardware.host else "fp32")
    devices = f"{own.devices} device{'s' if own.devices > 1 else ''} of " if own.devices else ""
    return Source(
        f"{words.model_name}, {precision}, batch {words.batch} x {setup.seq} tokens for each device, {devices}{hardware.name}",
        (f"--hardware {own.hardware!r}, {step_options(words, setup.seq)}", "give less of them, or another machine"),
        lambda budget: profile_offline(
            copy.deepcopy(setup.config), hardware, memory=budget, batch=words.batch, seq=setup.seq, precision=precision
        ),
        planned,
        hardware.device_bytes if words.memory is None else words.memory,
        hardware.device_bytes,
        lambda budget: plan_offline(
            copy.deepcopy(setup.config), hardware, memory=budget, host_memory=words.host_memory, batch=words.batch, seq=setup.seq,
            precision=precision,
        ),
    )  # fmt: skip


def _states(profile: Profile) -> str:
    size = sum(size for size, *_ in profile.parameters)
    trained = sum(size for size, _, is_trained in profile.parameters if is_trained)
    optimizer_state = sum(profile.footprint.state_bytes) if profile.footprint else profile.n_states * trained
    return f"{size_text(size + trained + optimizer_state)} of states"
