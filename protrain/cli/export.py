"""The folder that --out names: config, weights and tokenizer, for from_pretrained."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain.base import replacing
from protrain.base.replacing import clear_leftovers, replaced
from protrain.cli import machine
from protrain.cli.words import CommandError, check_path, size_text
from protrain.errors import DiskError
from protrain.model.precision import dtype_of, saved_config
from protrain.state.tensorfiles import Progress, Told, entries, write_tensors


def check_target(folder: str) -> None:
    """Whether a folder can be made there, which is tried, and would replace nothing but a model. Raises CommandError."""
    check_path("--out", folder)
    try:
        os.fsencode(os.path.realpath(folder)).decode()
    except UnicodeDecodeError:
        raise CommandError(f"--out {folder!r} is no UTF-8, in which alone tokenizers can be saved; give another name") from None
    above = Path(os.path.realpath(folder)).parent
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise CommandError(f"--out {folder!r}: {str(above)!r} is not a folder; give a folder in another place")
    try:
        with tempfile.TemporaryDirectory(dir=above):
            pass
    except OSError as error:
        raise CommandError(
            f"--out {folder!r} cannot be made: {error.strerror} ({above}); give a folder in a place that can be written to"
        ) from None
    try:
        replacing.check_target(folder)
    except DiskError as error:
        raise CommandError(f"--out: {error}") from None


def tensor_bytes(model: nn.Module, precision: str, is_checkpoint: bool) -> int:
    """What the tensors of a folder take: the model's, and in a checkpoint AdamW's moments and the masters of bf16 parameters."""
    dtype, parameters = dtype_of(precision), dict(model.named_parameters(remove_duplicate=False))
    found = sum(
        math.prod(entry.shape) * (dtype if entry.name in parameters else entry.dtype).itemsize for entry in entries(model)
    )
    arrays = 2 if dtype == torch.float32 else 3
    states = sum(4 * arrays * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return found + (states if is_checkpoint else 0)


def check_room(folder: str, size_bytes: int, n_checkpoints: int) -> None:
    """Whether --out may have room for what a training writes there. What is written lies beside what is there until it is whole.

    Args: size_bytes, of the model or of a checkpoint; n_checkpoints, how many of them take each other's place, 0 for the model.
    Raises CommandError where it surely has none.
    """
    clear_leftovers(folder)  # as what writes there does
    target = Path(os.path.realpath(folder))
    above = target.parent
    while not above.exists():
        above = above.parent
    found = machine.room(str(above))
    if found is None:
        return
    free_bytes, kept_share = found
    there_bytes = 0  # which the first one gives back for the second
    with contextlib.suppress(OSError), os.scandir(target) as entries_there:
        there_bytes = sum(512 * entry.stat().st_blocks for entry in entries_there)
    needed = kept_share * size_bytes
    what = f"{'a checkpoint' if n_checkpoints else 'the model'} takes {size_text(size_bytes)}"
    if free_bytes >= needed:
        if n_checkpoints < 2 or free_bytes + there_bytes >= 2 * needed:
            return
        what += ", and stays until the next one is whole"
    raise CommandError(
        f"--out {folder!r}: {what}; {size_text(free_bytes)} are free on that disk: make room, or give a folder on another one"
    )


@contextmanager
def saving(folder: str) -> Iterator[None]:
    """What is saved inside goes to --out. Raises CommandError where it cannot."""
    try:
        yield
    except OSError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        raise CommandError(
            f"--out {folder!r} could not be saved: {cause.strerror or cause}; what was there before is still there: make room, "
            f"or give a folder on another disk"
        ) from error


def save(
    folder: str,
    model: nn.Module,
    config: Any,
    tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    tokenizer: object,
    progress: Progress,
) -> int:
    """Save a transformers model and its tokenizer as a folder for from_pretrained.

    Args: config, the model's as it was read; tensors, gives the model's tensors one by one, in the order of its state dict,
    tied ones once; tokenizer, a transformers tokenizer; progress, told after each tensor. Returns the bytes of the weights.
    """
    with replaced(folder) as fresh:
        add_files(fresh, model, config, tokenizer)
        weights = entries(model)
        told = Told(progress, sum(entry.size_bytes for entry in weights))
        written_bytes = write_tensors(fresh, weights, told.through(tensors()))
    return written_bytes


def add_files(fresh: Path, model: nn.Module, config: Any, tokenizer: object) -> None:
    """What stands beside the weights: the config as it was read, with the model's class, and the tokenizer."""
    config = copy.deepcopy(saved_config(model, config))
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(fresh))
    tokenizer.save_pretrained(str(fresh))  # type: ignore[attr-defined]
