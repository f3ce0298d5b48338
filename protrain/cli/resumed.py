"""What a training was given that decides its batches and its arithmetic, kept beside its checkpoints.

A training that goes on with other words than before is not the one that it would have been. That may be wanted, so it is no
error; but what differs is told, one note each. A checkpoint without the record, of an older version or of the library alone, goes
on as it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protrain.base.reading import open_file, parse, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from protrain.cli.train import Words

RECORD = "protrain_train.json"
MOST_BYTES = 1 << 24  # of one that is read
#: Words by the names of their options, as they stand in the record.
_OPTIONS = {
    "seq": "--seq",
    "batch": "--batch",
    "accumulate": "--accumulate",
    "seed": "--seed",
    "max_grad_norm": "--max-grad-norm",
    "precision": "--precision",
    "device": "--device",
}
#: Of a model's config, what says nothing of its arithmetic, or is a word of its own.
_NOT_OF_MODELS = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")


def record_of(words: Words, seq: int, config: Any, tokens: NDArray[np.unsignedinteger[Any]]) -> dict[str, Any]:
    """What is kept of a training, as JSON has it. Args: seq, tokens in a sequence; config, the model's; tokens, of the data."""
    from protrain import _core

    model = {name: value for name, value in config.to_dict().items() if name not in _NOT_OF_MODELS}
    found = {
        "seq": seq,
        "batch": words.batch,
        "accumulate": words.accumulate,
        "seed": words.seed,
        "max_grad_norm": words.max_grad_norm,
        "precision": words.precision,
        "device": words.device.split(":")[0],
        "model": model,
        "data": {
            "paths": [os.path.abspath(name) for name in words.data],
            "n_tokens": len(tokens),
            "crc32c": f"{_core.checksum(tokens.data):08x}",
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def write(folder: Path, record: dict[str, Any]) -> None:
    """Put a record into a checkpoint that is being written. Raises OSError."""
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def read(folder: str) -> dict[str, Any]:
    """The record in a folder, as far as it can be read."""
    try:
        with open_file(os.path.join(folder, RECORD)) as file:
            found = parse(file.read(MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def differences(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What differs, a sentence each. Args: was, a record that anybody may have written."""
    for name, option in _OPTIONS.items():
        if name in was and was[name] != now[name]:
            yield f"{option} was {_given(was[name])} when it was saved, and is {_given(now[name])} now"
    if isinstance(model := was.get("model"), dict):
        for name, value in now["model"].items():
            if name in model and model[name] != value:
                yield f"{name} of --model was {shown(model[name])} when it was saved, and is {shown(value)} now"
    if isinstance(data := was.get("data"), dict) and data.get("crc32c", now["data"]["crc32c"]) != now["data"]["crc32c"]:
        before, after = _text(data), _text(now["data"])
        if before == after:
            yield f"the text of --data, {after}, is another one than when it was saved"
        else:
            yield f"--data was {before} when it was saved, and is {after} now"


def _given(value: Any) -> str:
    return "not given" if value is None else value if value in ("fp32", "bf16", "cpu", "cuda") else shown(value)


def _text(data: dict[str, Any]) -> str:
    """As "'/a/text.txt' (12,345 tokens)"."""
    n_tokens, paths = data.get("n_tokens"), data.get("paths")
    named = _names(paths) if isinstance(paths, list) else "another text"
    return f"{named} ({n_tokens:,} tokens)" if type(n_tokens) is int and 0 <= n_tokens < 1 << 62 else named


def _names(paths: Sequence[Any]) -> str:
    if not paths:
        return "the sources of Python's standard library"
    more = f" and {len(paths) - 2:,} more" if len(paths) > 2 else ""
    return ", ".join(repr(str(path)[:200]) for path in paths[:2]) + more
