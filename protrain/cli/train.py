"""`protrain train`: text, a model and a budget in; losses and a saved model out.

What a user may have mistyped is checked before anything slow begins. Then: tokens, the model on meta, one call of
protrain.wrap, which makes the weights, and an ordinary training loop. The seed decides the weights, the batches and the
dropout; nothing else does, so that a training under another budget gives the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protrain.base.replacing import clear_leftovers
from protrain.base.sizes import default_disk_folder
from protrain.cli import interrupt, notes, resumed
from protrain.cli.data import batch, check_length, encode, has_tokenizer, read_tokenizer, text_files, train_tokenizer
from protrain.cli.display import Display, Step, Summary, make_display
from protrain.cli.machine import IN_MEMORY, file_system
from protrain.cli.report import Page, Recorder, check_report, machine_facts, write
from protrain.cli.words import CommandError, check_file, check_path, naming, size_text, writing

if TYPE_CHECKING:
    from protrain.profiling.timeline import Timeline
    from protrain.state.tensorfiles import Progress

TRACED_STEPS = 3
LEARNING_RATE = 3e-4
LAST_SECONDS = 30.0  # after Ctrl-C: at most, for the trace and the report to be written


@dataclass(frozen=True)
class Words:
    """The options of train and plan, as given. Sizes in bytes, sequences in tokens."""

    model_name: str
    data: tuple[str, ...]
    memory: int | None
    seq: int | None
    batch: int
    steps: int
    lr: float | None  # None: LEARNING_RATE, or the checkpoint's
    seed: int
    disk: str | None
    accumulate: int
    max_grad_norm: float | None
    precision: str
    as_json: bool
    device: str = "cpu"
    host_memory: int | None = None
    out: str | None = None
    save_every: int | None = None
    resume: str | None = None
    trace: str | None = None
    save_profile: str | None = None
    report: str | None = None


@dataclass(frozen=True)
class Setup:
    """The words, checked: files with text, the model's config, its folder where it has one, tokens in a sequence."""

    files: list[Path]
    config: Any
    folder: Path | None
    start_from_weights: bool
    seq: int


def prepare(words: Words) -> Setup:
    """Check everything that can be checked at once. Raises CommandError, DataError, or what a damaged checkpoint raises."""
    if words.resume is not None:
        clear_leftovers(words.resume)
    if words.resume is not None and not os.path.isdir(words.resume):
        raise CommandError(f"--resume {words.resume!r}: no such folder; give the --out folder of a training with --save-every")
    if words.resume is not None:
        from protrain.checkpoint import has_checkpoint, saved_steps

        try:
            found = has_checkpoint(words.resume)
        except OSError as error:
            raise CommandError(f"--resume {words.resume!r} cannot be read: {error.strerror}") from None
        if not found:
            raise CommandError(
                f"--resume {words.resume!r} holds no checkpoint; give the --out folder of a training with --save-every"
            )
        if (done := saved_steps(words.resume)) >= words.steps:
            raise CommandError(f"--resume {words.resume!r} was saved after step {done}; give more than --steps {words.steps}")
    if words.save_every is not None and words.out is None:
        raise CommandError(f"--save-every {words.save_every} needs --out, the folder to save into")
    goes_on_in = os.path.realpath(words.resume) if words.resume is not None and words.save_every is None else None
    if words.out is not None and os.path.realpath(words.out) == goes_on_in:
        raise CommandError(
            f"--out {words.out!r} is the folder of --resume, where the model alone would take the checkpoint's place; give "
            "--save-every, or another --out"
        )
    files = text_files(words.data, [name for name in (words.out, words.resume) if name is not None])
    if words.out is not None:
        from protrain.cli.export import check_target

        check_target(words.out)
    if words.trace is not None:
        check_file("--trace", words.trace)
    if words.save_profile is not None:
        check_file("--save-profile", words.save_profile)
    check_report(words.report)
    _check_apart(words, files)
    _check_disk(words.disk)
    from protrain.cli.model import check_sequence, has_weights, longest_sequence, read_config

    config, folder = read_config(words.model_name)
    out, started = (os.path.realpath(name) if name is not None else None for name in (words.out, words.resume))
    if folder is not None and out == os.path.realpath(folder) != started:
        raise CommandError(f"--out {words.out!r} is the folder of --model, which would be replaced; give another --out")
    longest = longest_sequence(config)
    seq = words.seq or min(512, longest or 512)
    check_sequence(config, seq)
    return Setup(files, config, folder, has_weights(folder), seq)


def _away(plan: dict[str, Any]) -> str:
    """What does not stay in the memory of what computes, by the plan."""
    on_disk = f"{size_text(plan['disk_bytes'])} on disk by the plan"
    return f"{size_text(plan['host_bytes'])} in host memory, {on_disk}" if plan["host_bytes"] else on_disk


def _check_apart(words: Words, files: list[Path]) -> None:
    """Whether no file or folder is in the way of another one, which would be found when all is over. Raises CommandError."""
    files_written = (("--trace", words.trace), ("--save-profile", words.save_profile), ("--report", words.report))
    named = [(option, given, Path(os.path.realpath(given))) for option, given in files_written if given]
    for number, (option, given, path) in enumerate(named):
        if other := next((f"{name} {text!r}" for name, text, before in named[:number] if before == path), None):
            raise CommandError(f"{other} and {option} are one file; give two names")
        if os.path.exists(given) and any(os.path.samefile(given, file) for file in files):
            raise CommandError(f"{option} {given!r} is the text of --data, which would be gone; give another name")
    if words.out is None:
        return
    out = Path(os.path.realpath(words.out))
    for option, given, path in named:
        if path == out or out in path.parents:
            raise CommandError(f"{option} {given!r} is --out or inside of it, a folder of the model alone; give a file elsewhere")
    disk = Path(os.path.realpath(words.disk)) if words.disk else None
    if disk is not None and out in disk.parents:
        raise CommandError(f"--disk {words.disk!r} is inside of --out, a folder of the model alone; give a folder elsewhere")


def _check_disk(folder: str | None) -> None:
    if folder:
        check_path("--disk", folder)
    if folder is not None and not os.path.isdir(folder) and (not folder or os.path.lexists(folder)):
        raise CommandError(f"--disk {folder!r} is no folder; give a folder on a disk")
    if folder is not None and not _can_be_written(Path(folder).absolute()):
        raise CommandError(f"--disk {folder!r} cannot be written to by this user; give a folder on a disk that can be written to")


def _can_be_written(folder: Path) -> bool:
    """Whether files can be made in it, or it itself in the nearest folder around it that is there."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def _check_device(words: Words) -> None:
    """Whether what is to train is there. Raises CommandError."""
    if words.device != "cpu":
        check_gpu(words)
    elif words.host_memory is not None:
        raise CommandError("--host-memory needs --device cuda: where the CPU trains, host and device are one")


def check_gpu(words: Words) -> None:
    """Whether the GPU of --device is there. Raises CommandError."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise CommandError(f"--device {words.device}: torch {torch.__version__} finds no GPU here; leave it out for the CPU")
    if (torch.device(words.device).index or 0) >= count:
        raise CommandError(f"--device {words.device}: there is cuda:0" + (f" to cuda:{count - 1}" if count > 1 else " alone"))


@contextmanager
def disk_folder(name: str | None) -> Iterator[None]:
    """Inside, the folder of --disk exists; one that was made for this and stays empty is removed. Raises CommandError, also where
    that, or the one that is taken without it, lies in memory."""
    missing: list[Path] = []
    folder = default_disk_folder() if name is None else name
    said = f"{folder!r}, the folder without --disk," if name is None else f"--disk {folder!r}"
    path = Path(folder).absolute()
    while not path.exists():
        missing.append(path)
        path = path.parent
    if (kind := file_system(str(path))[0]) in IN_MEMORY:
        raise CommandError(f"{said} is a {kind}: what is put there stays in memory; give --disk, a folder on a disk")
    try:
        for path in reversed(missing):
            path.mkdir()
    except OSError as error:
        raise CommandError(f"{said} cannot be made: {error.strerror}; give a folder on a disk that can be written to") from None
    try:
        yield
    finally:
        for path in missing:
            try:
                path.rmdir()
            except OSError:
                break  # somebody uses it, or it is gone


def run(words: Words) -> None:
    """Train. Raises CommandError, DataError and protrain's errors."""
    _check_device(words)
    setup = prepare(words)
    title = f"protrain train {words.model_name}  batch {words.batch} x {setup.seq} tokens" + (
        f" x {words.accumulate}" if words.accumulate > 1 else ""
    )
    display = make_display(title, words.steps, words.memory, words.as_json)
    with disk_folder(words.disk), display, notes.heard_by(display.note):
        _train(words, setup, display)


def _tokens(words: Words, setup: Setup, display: Display) -> tuple[Any, Any]:
    """The tokenizer and the tokens of the data, shape (tokens,). Weights go with the tokenizer that they were trained with: a
    checkpoint's comes before the one in the folder of the model, and a new one is trained where neither has one."""
    from protrain.cli.model import longest_sequence

    config = setup.config
    folder = next((folder for folder in (words.resume, setup.folder) if folder is not None and has_tokenizer(folder)), None)
    if folder is not None:
        display.stage(f"reading the tokenizer in {folder}")
        tokenizer = read_tokenizer(folder)
    else:
        display.stage(
            f"training a tokenizer of {config.vocab_size:,} tokens on {len(setup.files):,} file"
            + ("s" if len(setup.files) != 1 else "")
        )
        tokenizer = train_tokenizer(setup.files, config, longest_sequence(config))
    display.stage("turning the text into tokens")
    tokens = encode(tokenizer, setup.files, config.vocab_size)
    check_length(tokens, setup.seq)
    return tokenizer, tokens


def _train(words: Words, setup: Setup, display: Display) -> None:
    import torch

    import protrain
    from protrain.cli.model import Initializer, build

    display.stage("making the model")
    model = build(copy.deepcopy(setup.config))
    on_cpu = words.device == "cpu"
    if on_cpu:  # over a GPU the first batch is refused before its first operation, and the states by wrap
        _refuse_early(words, setup.seq, model)
    _check_room(words, model)
    tokenizer, tokens = _tokens(words, setup, display)
    record = resumed.record_of(words, setup.seq, setup.config, tokens)
    if words.resume is not None:
        for difference in resumed.differences(resumed.read(words.resume), record):
            notes.tell(f"--resume {words.resume!r}: {difference}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=words.lr or LEARNING_RATE, fused=True)
    source: dict[str, Any] = (
        {"weights": str(setup.folder)} if setup.start_from_weights else {"param_init_fn": Initializer(model, words.seed)}
    )
    display.stage(f"placing {size_text(16 * parameters)} of parameters, gradients and moments of {parameters:,} parameters")
    # One session for the whole process: what is left at an error or at the end is closed with the interpreter.
    with contextlib.nullcontext() if on_cpu else torch.device(words.device):
        model, optimizer = protrain.wrap(
            model,
            optimizer,
            memory=words.memory,
            host_memory=words.host_memory,
            disk=words.disk,
            accumulate=words.accumulate,
            max_grad_norm=words.max_grad_norm,
            precision=words.precision,
            **source,
        )
    torch.manual_seed(words.seed)  # of the dropout; the weights have random numbers of their own
    display.stage("planning, and the first step")
    begin = time.monotonic()
    if words.resume is not None:
        try:
            protrain.load(model, optimizer, words.resume)
        except protrain.PlanError as error:
            raise CommandError(
                f"--resume {words.resume!r} is not of --model {words.model_name!r}, or not whole: {error}; give the --model that "
                "it was trained with"
            ) from error
        if words.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = words.lr
    done = protrain.status(model).steps
    saver = _Saver(words.out, words.save_every, setup.config, tokenizer, record, display.saving)
    tracer = _Tracer(words.trace)
    reporter = _Reporter(words, setup.seq, model) if words.report is not None else None
    try:
        losses = _steps(words, setup.seq, tokens, model, optimizer, display, saver, tracer, reporter)
        seconds = time.monotonic() - begin
        status = fields_of(protrain.status(model))
        saved_bytes = 0
        if words.out is not None:
            display.stage("saving")
            saved_bytes = saver.finish(model, optimizer)
    except BaseException:
        if interrupt.pressed():
            interrupt.extend(LAST_SECONDS)
        with contextlib.suppress(CommandError):  # the error that is under way is the one to tell
            tracer.write()
        with contextlib.suppress(CommandError):
            if reporter is not None:
                reporter.write(ended_early=True)
        raise
    failure: CommandError | None = None
    written: list[str | None] = []
    files: list[tuple[str | None, Callable[[], None] | None]] = [
        (words.trace, tracer.write),
        (words.report, reporter.write if reporter is not None else None),
        (words.save_profile, functools.partial(_save_profile, words.save_profile, model)),
    ]
    for name, write_file in files:
        try:
            if write_file is not None:
                write_file()
            written.append(name)
        except CommandError as error:
            failure = failure or error  # the training is over all the same, and the model saved
            written.append(None)
    display.finish(
        Summary(
            words.steps - done, losses[0], losses[-1], seconds, parameters, words.memory, words.out, saved_bytes,
            list(notes.seen), status, *written,
        )
    )  # fmt: skip
    if failure is not None:
        raise failure


def _save_profile(file: str | None, model: Any) -> None:
    """Writes --save-profile. Raises CommandError."""
    import protrain
    from protrain.base.replacing import write_file

    if file is None:
        return
    try:
        found = protrain.status(model).profile()
    except protrain.StepError:
        raise CommandError(
            f"--save-profile {file!r} was not written: no plan came from measured steps, of which there must be two at least"
        ) from None
    except protrain.Error as error:
        raise CommandError(f"--save-profile {file!r} was not written: {error}") from None
    with writing("--save-profile", file):
        write_file(file, found.to_json().encode())


def _check_room(words: Words, model: Any) -> None:
    """Whether --out may have room for what is going to be saved. Raises CommandError."""
    if words.out is None:
        return
    from protrain.checkpoint import saved_steps
    from protrain.cli.export import check_room, tensor_bytes

    n_checkpoints = 0
    if words.save_every is not None:
        done = saved_steps(words.resume) if words.resume is not None else 0
        n_checkpoints = -(-words.steps // words.save_every) - done // words.save_every
    check_room(words.out, tensor_bytes(model, words.precision, n_checkpoints > 0), n_checkpoints)


def step_options(words: Words, seq: int) -> str:
    """The options that say how large a step is."""
    passes = f", --accumulate {words.accumulate}" if words.accumulate > 1 else ""
    return f"--batch {words.batch}, --seq {seq}{passes}"


def any_tokens(words: Words, seq: int) -> Any:
    """A batch to plan for. Shape (words.batch, seq). Raises CommandError where its tokens alone are more than is free here."""
    import torch

    from protrain.cli.model import check_tokens

    check_tokens(words.batch, seq, step_options(words, seq))
    return torch.zeros((words.batch, seq), dtype=torch.long)


def _refuse_early(words: Words, seq: int, model: Any) -> None:
    """Raises BudgetError, which names the smallest budget, while nothing is allocated and no text was read: wrap alone does not
    know the batch."""
    import protrain

    ids = any_tokens(words, seq)
    arguments = {"input_ids": ids, "labels": ids, "use_cache": False}
    # A model that cannot be planned for without running it (PlanError) is profiled in its first step, which is said then.
    with naming(step_options(words, seq), "give less of them"), contextlib.suppress(protrain.PlanError):
        protrain.plan(
            model, arguments, memory=words.memory, accumulate=words.accumulate, max_grad_norm=words.max_grad_norm,
            precision=words.precision,
        )  # fmt: skip


def _steps(
    words: Words,
    seq: int,
    tokens: Any,
    model: Any,
    optimizer: Any,
    display: Display,
    saver: _Saver,
    tracer: _Tracer,
    reporter: _Reporter | None,
) -> list[float]:
    """The loop; returns the loss of the first and of the last step."""
    import torch

    import protrain
    from protrain.cli import interrupt

    first = last = 0.0
    device = protrain.session_of(model).wrapped.compute.device
    before = protrain.status(model)
    start = before.steps + 1
    for number in range(start, words.steps + 1):
        begin = time.monotonic()
        last = 0.0
        for part in range(words.accumulate):
            ids = torch.from_numpy(batch(tokens, seq, words.batch, words.seed, (number - 1) * words.accumulate + part))
            ids = ids.to(device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / words.accumulate
            loss.backward()
            last += loss.item()
            del loss  # the graph would keep this pass's activations into the next one
        optimizer.step()
        optimizer.zero_grad()
        if interrupt.pressed():  # a callback may have swallowed the exception
            raise KeyboardInterrupt
        seconds = time.monotonic() - begin
        first = last if number == start else first
        now = protrain.status(model)
        tracer.after(now)
        if reporter is not None:
            reporter.after(last, now)
        display.step(
            Step(
                number,
                last,
                seconds,
                words.batch * seq * words.accumulate / seconds,
                now.memory_bytes,
                now.peak_memory_bytes,
                now.wait_seconds,
                now.disk_read_bytes - before.disk_read_bytes,
                now.disk_write_bytes - before.disk_write_bytes,
            )
        )
        before = now
        saver.after(number, model, optimizer)
    return [first, last]


class _Tracer:
    """Writes --trace: the timelines of the last steps, as far as there were steps."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._timelines: deque[Timeline] = deque(maxlen=TRACED_STEPS)
        self._lost = False  # whether a step had more events than are kept

    def after(self, status: Any) -> None:
        """After a step."""
        from protrain.errors import StepError

        if self._file is not None:
            try:
                self._timelines.append(status.timeline())
            except StepError:
                self._lost = True

    def write(self) -> None:
        """Raises CommandError."""
        from protrain.base.replacing import write_file
        from protrain.profiling.timeline import chrome_trace

        if self._file is not None and self._timelines:
            with writing("--trace", self._file):
                write_file(self._file, chrome_trace(self._timelines).encode())
        elif self._lost:
            raise CommandError(
                f"--trace {self._file!r} was not written: a step has more events than are kept; give a smaller --accumulate"
            )


class _Reporter:
    """Writes --report: what was measured so far, where there was a step."""

    def __init__(self, words: Words, seq: int, model: Any) -> None:
        import protrain

        self._words, self._seq = words, seq
        self._recorder = Recorder(model)
        self._groups = protrain.session_of(model).wrapped.groups
        self._parameters = sum(parameter.numel() for parameter in model.parameters())

    def after(self, loss: float, status: Any) -> None:
        """After a step."""
        self._recorder.after(loss, status)

    def write(self, ended_early: bool = False) -> None:
        """Raises CommandError."""
        words, found = self._words, self._recorder.recorded()
        if found is None or words.report is None:
            return
        tokens = words.batch * self._seq * words.accumulate
        passes = f" × {words.accumulate} passes" if words.accumulate > 1 else ""
        facts = [
            ("Model", f"{words.model_name}, {self._parameters:,} parameters, {words.precision}"),
            ("Step", f"{words.batch} × {self._seq} tokens{passes}, {tokens / found.steps[-1].seconds:,.0f} tokens/s in the last"),
            ("Budget", f"{size_text(found.budget_bytes)} of memory" + ("" if words.memory else ", what was free less a reserve")),
            ("Away from memory", _away(found.plan)),
            ("Knobs", "none: the plan was chosen by protrain"),
            ("Training", f"AdamW, learning rate {self._groups[0]['lr']:g}, seed {words.seed}"),
            *machine_facts(self._recorder.disk),
        ]
        first, last = found.steps[0].step, found.steps[-1].step
        span = f"step {last}" if first == last else f"steps {first} to {last}"
        notes = [f"Training ended after step {last} of {words.steps}."] if ended_early and last < words.steps else []
        subtitle = f"{words.model_name} in {size_text(found.budget_bytes)}, {words.batch} × {self._seq} tokens{passes}, {span}"
        page = Page("protrain train", subtitle, facts, {words.model_name: found}, notes=notes)
        with writing("--report", words.report):
            write(words.report, page)


class _Saver:
    """Writes --out: the model at the end, or checkpoints on the way where --save-every asks for them."""

    def __init__(
        self, folder: str | None, every: int | None, config: Any, tokenizer: Any, record: dict[str, Any], progress: Progress
    ) -> None:
        self.folder, self.every, self.config, self.tokenizer, self.progress = folder, every, config, tokenizer, progress
        self.record = record  # of resumed.py, beside checkpoints
        self.saved_step = 0

    def _checkpoint(self, model: Any, optimizer: Any) -> None:
        import protrain
        from protrain.cli.export import add_files, saving

        def add(fresh: Path) -> None:
            add_files(fresh, model, self.config, self.tokenizer)
            resumed.write(fresh, self.record)

        assert self.folder is not None
        with saving(self.folder):
            protrain.save(model, optimizer, self.folder, extra=add, progress=self.progress)

    def after(self, number: int, model: Any, optimizer: Any) -> None:
        """After step `number`: a checkpoint where it is due."""
        if self.every is not None and number % self.every == 0:
            self._checkpoint(model, optimizer)
            self.saved_step = number

    def finish(self, model: Any, optimizer: Any) -> int:
        """After the last step; returns the bytes of the weights. Raises CommandError, as `after`."""
        import protrain
        from protrain.cli.export import save, saving
        from protrain.state.tensorfiles import entries

        assert self.folder is not None
        if self.every is None:
            tensors = protrain.session_of(model).states.tensors
            with saving(self.folder):
                return save(self.folder, model, self.config, tensors, self.tokenizer, self.progress)
        if self.saved_step != protrain.status(model).steps:
            self._checkpoint(model, optimizer)
        return sum(entry.size_bytes for entry in entries(model))


def fields_of(value: Any) -> Any:
    """A dataclass of the library, such as Status or Plan, as JSON takes it."""
    if hasattr(type(value), "__dataclass_fields__"):
        return {name: fields_of(getattr(value, name)) for name in type(value).__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): fields_of(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [fields_of(entry) for entry in value]
    return value
