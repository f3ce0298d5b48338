"""How a plan is read: what lies where, where the time of a step goes, what limits it, and what more memory would buy.

Plain text, the same for the same plan: lines of at most 160 characters, no colour. The ranges of blocks come last, one a line
with their mode; no other line can be taken for one of them: numbers elsewhere never stand right before a mode. Parts of a whole
are rounded so that they add up: bars are as long as they say, percentages make 100.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING

from ..base.sizes import GIB, format_bytes

if TYPE_CHECKING:
    from .plans import Forecast, Plan

#: One character for a block of each mode.
LETTERS = {"keep": "k", "swap": "s", "checkpoint": "c", "checkpoint_swap": "x"}
STRIP_CHARACTERS = 100
BAR_CHARACTERS = 60
LINE_CHARACTERS = 120  # of items side by side
MOST_CHARACTERS = 160
#: A step that waits for less than this share of its time is limited by what it computes.
HIDDEN_SHARE = 0.05

_READS, _WRITES = ("upload", "gather", "disk_read"), ("offload", "disk_write")
_LANES = {
    "upload": "uploads",
    "offload": "offloads",
    "gather": "gathers",
    "disk_read": "disk reads",
    "disk_write": "disk writes",
    "update": "updates",
}
_WAITS = {
    "chunk": "waiting for parameters",
    "stash_write": "waiting for activations to leave",
    "stash_read": "waiting for activations to come back",
    "gradients": "waiting for gradients to leave",
    "update": "waiting for updates in step()",
}


def explain(plan: Plan, more: Plan | None = None) -> str:
    """The plan in words.

    Args:
        more: the plan for the same under a larger budget, to say what that would buy.
    """
    lines = [_headline(plan), *_step(plan)]
    if more is not None:
        lines.append(gain(plan, more))
    for section in (_memory(plan), _tiers(plan), _time(plan), _lanes(plan), _blocks(plan)):
        lines += ["", *found] if (found := list(section)) else []
    return "\n".join(part for line in lines for part in _fitted(line))


def _fitted(line: str) -> list[str]:
    """The line; in parts where numbers that no plan of ours has make it too long."""
    return [line] if len(line) <= MOST_CHARACTERS else wrap(line, MOST_CHARACTERS, subsequent_indent="  ")


def limit_of(plan: Plan) -> str | None:
    """What limits a step: "compute", "read", "write" or "update"; None where nothing was timed.

    Where a step waits for more than a twentieth of its time, what it waits for the longest; else the longer of what it computes
    and what step() updates. Waits for gradients and updates are laid to the busiest of the lanes that updates pass through.
    """
    forecast = plan.forecast
    if forecast is None or plan.step_seconds <= 0:
        return None
    waits = _waits_by_limit(forecast)
    if sum(waits.values()) > HIDDEN_SHARE * plan.step_seconds:
        return max(waits, key=lambda limit: waits[limit])
    return "update" if forecast.update_seconds > _computed(forecast) else "compute"


def gain(plan: Plan, more: Plan) -> str:
    """One line: what the larger budget of `more` buys, in time and in modes."""
    extra = more.budget_bytes - plan.budget_bytes
    name = f"{'one more GiB' if extra == GIB else f'{format_bytes(extra)} more'} ({format_bytes(more.budget_bytes)})"
    changes = [("persistent", more.n_persist - plan.n_persist)]
    changes += [(mode, more.block_modes.count(mode) - plan.block_modes.count(mode)) for mode in LETTERS]
    said = ", ".join(f"{what} {change:+d}" for what, change in changes if change) or "the same decisions"
    if plan.step_seconds <= 0 or more.step_seconds <= 0:
        return f"{name}: no time was predicted; {said}"
    less = 100 * (1 - more.step_seconds / plan.step_seconds)
    if abs(less) < 0.05:
        return f"{name}: no less time a step; {said}"
    digits = _digits(plan.step_seconds)
    return (
        f"{name}: {more.step_seconds:.{digits}f} s a step instead of {plan.step_seconds:.{digits}f} s, "
        f"{abs(less):.1f} % {'less' if less > 0 else 'more'}; {said}"
    )


def apportion(amounts: Iterable[float], units: int) -> list[int]:
    """Whole units for each amount, in proportion, `units` in all: the largest remainders get what rounding down leaves over. All
    zero where the amounts are."""
    found = [max(amount, 0) for amount in amounts]
    total = sum(found)
    if total <= 0:
        return [0] * len(found)
    exact = [amount * units / total for amount in found]
    whole = [int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for i in order[: units - sum(whole)]:
        whole[i] += 1
    return whole


# ---- what limits ----


def _computed(forecast: Forecast) -> float:
    return forecast.compute_seconds + forecast.recompute_seconds + forecast.fixed_seconds + forecast.drag_seconds


def _causes(forecast: Forecast) -> dict[str, str]:
    """For each reason to wait, what would have to be faster."""
    slowest = _busiest(forecast.busy_seconds, tuple(_LANES))
    cause = "read" if slowest in _READS else "write" if slowest in _WRITES else "update"
    return {"chunk": "read", "stash_read": "read", "stash_write": "write", "gradients": cause, "update": cause}


def _waits_by_limit(forecast: Forecast) -> dict[str, float]:
    """Seconds waited, by what would have to be faster."""
    found = dict.fromkeys(("read", "write", "update"), 0.0)
    for reason, cause in _causes(forecast).items():
        found[cause] += forecast.wait_seconds.get(reason, 0.0)
    return found


def _busiest(busy: Mapping[str, float], lanes: tuple[str, ...]) -> str:
    # The first of equals, and the update lane where none is busy: then it is step() that computes.
    found = max(lanes, key=lambda lane: busy.get(lane, 0.0))
    return found if busy.get(found, 0.0) > 0 or len(lanes) < len(_LANES) else "update"


def _sentence(plan: Plan, forecast: Forecast, limit: str) -> str:
    """Why the step is not shorter."""
    waits = _waits_by_limit(forecast)
    digits = _digits(plan.step_seconds)

    def share(seconds: float) -> str:
        return f"{seconds:.{digits}f} s ({100 * seconds / plan.step_seconds:.1f} %)"

    if limit == "compute":
        again = forecast.recompute_seconds
        rest = f"; recomputing blocks takes {share(again)}, which more memory would spare" if again > 0 else ""
        return f"it is limited by computation: it waits {share(sum(waits.values()))}{rest}"
    if limit == "update" and sum(waits.values()) <= HIDDEN_SHARE * plan.step_seconds:
        return f"it is limited by the update: step() computes for {share(forecast.update_seconds)}"
    lane = _busiest(forecast.busy_seconds, {"read": _READS, "write": _WRITES, "update": ("update",)}[limit])
    busy = 100 * forecast.busy_seconds.get(lane, 0.0) / plan.step_seconds
    causes = _causes(forecast)
    longest = max(
        (reason for reason in _WAITS if causes[reason] == limit), key=lambda reason: forecast.wait_seconds.get(reason, 0.0)
    )
    name = {"read": "reading", "write": "writing", "update": "the update"}[limit]
    return (
        f"it is limited by {name}: it waits {share(waits[limit])}, longest {_WAITS[longest].removeprefix('waiting ')}; "
        f"the lane of {_LANES[lane]} is busy {busy:.1f} % of the time"
    )


# ---- the parts of the text ----


def _headline(plan: Plan) -> str:
    budget = f" of a budget of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else ""
    host = f", {format_bytes(plan.host_bytes)} on the host" if plan.host_bytes else ""
    return f"peak memory {format_bytes(plan.peak_bytes)}{budget}{host}, {format_bytes(plan.disk_bytes)} on disk"


def _step(plan: Plan) -> Iterator[str]:
    limit = limit_of(plan)
    if plan.step_seconds <= 0:
        yield "no time was predicted: this plan was made from memory alone"
        return
    yield f"a step takes {plan.step_seconds:.{_digits(plan.step_seconds)}f} s by forecast"
    if plan.forecast is not None and limit is not None:
        yield _sentence(plan, plan.forecast, limit)


def _memory(plan: Plan) -> Iterator[str]:
    whole = max(plan.budget_bytes, plan.peak_bytes)
    static = plan.persistent_bytes + plan.slot_bytes + plan.ring_bytes
    parts = [
        ("#", "persistent chunks", plan.persistent_bytes),
        ("=", "slots", plan.slot_bytes),
        ("~", "ring of updates", plan.ring_bytes),
        ("+", "activations and all else", plan.peak_bytes - static),
        (".", "free", whole - plan.peak_bytes),
    ]
    if static == 0 and (plan.n_persist or plan.n_buffer):  # the plan does not tell them apart
        parts = [("+", "in use", plan.peak_bytes), parts[-1]]
    yield f"memory, {format_bytes(whole)}{' of budget' if plan.budget_bytes else ''}"
    yield f"  |{_stacked([(glyph, size) for glyph, _, size in parts])}|"
    shares = apportion([size for *_, size in parts], 1000)
    yield from _flow(
        f"{glyph} {name} {format_bytes(size)} ({share / 10:.1f} %)"
        for (glyph, name, size), share in zip(parts, shares, strict=True)
        if size > 0
    )


def _tiers(plan: Plan) -> Iterator[str]:
    away = plan.n_chunks - plan.n_persist
    homes = [f"{plan.n_persist} at home in memory"]
    homes += [f"{plan.n_host} on the host"] if plan.n_host else []
    homes += [f"{away - plan.n_host} on disk"] if away > plan.n_host else []
    through = f"; {plan.n_buffer} slots take turns" if away else ""
    yield (
        f"chunks, {plan.n_chunks} of at most {format_bytes(plan.chunk_bytes)} (larger parameters have their own): "
        f"{', '.join(homes)}{through}"
    )
    tiers = [("memory", plan.peak_bytes), ("host", plan.host_bytes), ("disk", plan.disk_bytes)]
    if not plan.host_bytes and not plan.disk_bytes:
        return
    largest = max(size for _, size in tiers)
    yield f"tiers, one character for {format_bytes(largest / BAR_CHARACTERS)}"
    for name, size in tiers:
        if size > 0:
            yield f"  {name:<6}  |{_bar('#', size / largest, BAR_CHARACTERS)}|  {format_bytes(size)}"


def _time(plan: Plan) -> Iterator[str]:
    forecast, step = plan.forecast, plan.step_seconds
    if forecast is None or step <= 0:
        return
    digits = _digits(step)
    rows = [
        ("computing", forecast.compute_seconds),
        ("computing again in backward", forecast.recompute_seconds),
        ("slowed by lanes beside it", forecast.drag_seconds),
        ("updating in step()", forecast.update_seconds),
        ("what every step takes", forecast.fixed_seconds),
        *((name, forecast.wait_seconds.get(reason, 0.0)) for reason, name in _WAITS.items()),
    ]
    rows = [(name, seconds) for name, seconds in rows if seconds > 0]
    shares = apportion([seconds for _, seconds in rows], 1000)
    lengths = apportion([seconds for _, seconds in rows], BAR_CHARACTERS)
    number = len(f"{step:.{digits}f}")
    yield f"time of a step, {step:.{digits}f} s"
    for (name, seconds), share, length in zip(rows, shares, lengths, strict=True):
        yield f"  {name:<36}  {seconds:{number}.{digits}f} s  {share / 10:5.1f} %  {'#' * length}".rstrip()


def _lanes(plan: Plan) -> Iterator[str]:
    forecast, step = plan.forecast, plan.step_seconds
    if forecast is None or step <= 0:
        return
    digits = _digits(step)
    number = len(f"{step:.{digits}f}")
    moving = [lane for lane in _LANES if forecast.moved_bytes.get(lane, 0) > 0 or forecast.busy_seconds.get(lane, 0.0) > 0]
    if moving:
        yield "lanes, busy beside that"
    for lane in moving:
        busy = forecast.busy_seconds.get(lane, 0.0)
        size = format_bytes(forecast.moved_bytes.get(lane, 0))
        yield (
            f"  {_LANES[lane]:<23} {size:>12}  {busy:{number}.{digits}f} s  {100 * busy / step:5.1f} %  "
            f"{_bar('#', busy / step, BAR_CHARACTERS)}"
        ).rstrip()


def _blocks(plan: Plan) -> Iterator[str]:
    modes = plan.block_modes
    if not modes:
        yield "blocks: none were found, so no activations are moved or recomputed"
        return
    legend = ", ".join(f"{letter} {mode} ({modes.count(mode)})" for mode, letter in LETTERS.items() if mode in modes)
    yield f"blocks, one character each: {legend}"
    strip = "".join(LETTERS[mode] for mode in modes)
    place = len(str(len(strip) - 1))
    for first in range(0, len(strip), STRIP_CHARACTERS):
        start = f"from {first:>{place}}  " if len(strip) > STRIP_CHARACTERS else ""
        yield f"  {start}{strip[first : first + STRIP_CHARACTERS]}"
    first = 0
    for mode, run in groupby(modes):
        last = first + len(list(run)) - 1
        yield f"block {first} {mode}" if first == last else f"blocks {first}-{last} {mode}"
        first = last + 1


# ---- drawing with characters ----


def _stacked(parts: list[tuple[str, int]]) -> str:
    """Parts of a whole; each that is there has at least one character."""
    lengths = apportion([size for _, size in parts], BAR_CHARACTERS)
    for i, (_, size) in enumerate(parts):
        if size > 0 and lengths[i] == 0:
            lengths[lengths.index(max(lengths))] -= 1
            lengths[i] = 1
    return "".join(glyph * length for (glyph, _), length in zip(parts, lengths, strict=True))


def _bar(glyph: str, share: float, width: int) -> str:
    """A bar for a share of the width; what is not nothing has at least one character."""
    length = min(max(round(share * width), 1 if share > 0 else 0), width)
    return (glyph * length).ljust(width)


def _flow(items: Iterable[str]) -> Iterator[str]:
    """Items side by side, as many as a line takes."""
    line = ""
    for item in items:
        if line and len(line) + 3 + len(item) > LINE_CHARACTERS:
            yield f"  {line}"
            line = ""
        line += f"{'   ' if line else ''}{item}"
    if line:
        yield f"  {line}"


def _digits(seconds: float) -> int:
    """Decimals by which a step of so many seconds, and its parts, are told."""
    return 5 if seconds < 0.1 else 4 if seconds < 1 else 3 if seconds < 10 else 2 if seconds < 100 else 1
