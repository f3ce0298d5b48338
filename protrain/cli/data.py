"""Text to tokens to batches, deterministically.

Files are read in pieces of a fraction of a MiB, so that no corpus is in memory as text; tokens are, in two or four bytes
each. A piece ends at a line's end where it can, which keeps the words of the tokenizer whole. The tokenizer, where none is
given, is a byte-level BPE: it knows every byte, so any text comes back exactly. A batch depends on the seed and the number
of the batch alone, so that a training that goes on from a checkpoint sees the batches it would have seen.
"""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE_BYTES = 1 << 18
TRAINING_BYTES = 32 << 20  # what a tokenizer is trained on at most; more changes little and takes longer
GROUP_PIECES = 32  # encoded in one call, which spreads them over the cores
BYTE_COUNT = 256


class DataError(ValueError):
    """The text cannot be used; the message names the file and what to do."""


def standard_library() -> list[Path]:
    """The Python standard library's own sources, without its tests and without installed packages: text on every machine."""
    root = sysconfig.get_paths()["stdlib"]
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]  # not entered: packages may be tens of thousands of files
        files += [path for name in names if name.endswith(".py") and _is_text(path := Path(folder, name))]
    if not files:
        raise DataError(f"no sources of the standard library in {root}; give a text file with --data")
    return sorted(files)


def text_files(paths: Sequence[str], apart: Sequence[str] = ()) -> list[Path]:
    """The files that paths name, folders searched in sorted order; without paths the standard library's sources.

    A file that is named must exist, be UTF-8 and not empty; in a folder, hidden files, what is no text and what lies in the
    folders `apart`, which a training writes, are passed over. Folders that links lead to are read too, each folder once. Raises
    DataError.
    """
    if not paths:
        return standard_library()
    files: list[Path] = []
    for name in paths:
        try:
            files += _files_of(name, [Path(os.path.realpath(each)) for each in apart])
        except OSError as error:
            raise DataError(f"{name!r} cannot be read: {error.strerror or error}; give text that can be read") from None
    return files


def _files_of(name: str, apart: Sequence[Path]) -> list[Path]:
    """Raises DataError, and OSError where it cannot be looked at."""
    path = Path(name)
    if name and path.is_dir():
        os.scandir(path).close()
        root = Path(os.path.realpath(path))
        beside = [each for each in apart if not root.is_relative_to(each)]
        found = [file for file in sorted(_files_below(path, root, beside)) if _is_text(file)]
        if not found:
            raise DataError(f"no text in the folder {name!r}; give a folder with UTF-8 text files")
        return found
    if not name or not path.exists():
        raise DataError(f"no file or folder {name!r}; give existing text with --data")
    if not path.is_file():
        raise DataError(f"{name!r} is a pipe or a device, which cannot be read twice; give a file with text")
    if path.stat().st_size == 0:
        raise DataError(f"the file {name!r} is empty; give a file with text")
    open(path, "rb").close()
    if not _is_text(path):
        raise DataError(f"the file {name!r} is not UTF-8 text; give text")
    return [path]


def _files_below(path: Path, root: Path, apart: Sequence[Path]) -> Iterator[Path]:
    """What lies in a folder and in those below it, but what is hidden or lies in the folders `apart`. A folder that has several
    names is met under its own, where it lies below, else under the first link that leads there; links to `root`, where the folder
    lies, and around it are loops."""
    seen: set[tuple[int, int]] = set()
    tops = [path]
    while tops:
        links: list[Path] = []
        for folder, folders, names in (found for top in tops for found in os.walk(top)):
            about = os.stat(folder)
            if (about.st_dev, about.st_ino) in seen or _lies_in(Path(folder), apart):
                folders.clear()  # which are not entered
                continue
            seen.add((about.st_dev, about.st_ino))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            links += [Path(folder, name) for name in folders if os.path.islink(os.path.join(folder, name))]
            for file in (Path(folder, name) for name in names if not name.startswith(".")):
                if not (file.is_symlink() and _lies_in(file, apart)):
                    yield file
        tops = sorted(link for link in links if not root.is_relative_to(os.path.realpath(link)))


def pieces(file: Path) -> Iterator[str]:
    """The text of a file in pieces of about PIECE_BYTES that end at a line's end where there is one. Raises DataError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    try:
        with open(file, "rb") as stream:
            while block := stream.read(PIECE_BYTES):
                rest += decoder.decode(block)
                cut = rest.rfind("\n") + 1 or (len(rest) if len(rest) > 4 * PIECE_BYTES else 0)
                if cut:
                    yield rest[:cut]
                    rest = rest[cut:]
            rest += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(f"the file {str(file)!r} is not UTF-8 text ({error.reason}); give text") from None
    if rest:
        yield rest


def _lies_in(path: Path, apart: Sequence[Path]) -> bool:
    real = Path(os.path.realpath(path)) if apart else path
    return any(real.is_relative_to(each) for each in apart)


def _is_text(file: Path) -> bool:
    """Whether it is a file that can be read, and its beginning is UTF-8 without null bytes, and there is one."""
    try:
        if not file.is_file():
            return False
        with open(file, "rb") as stream:
            begin = stream.read(1 << 16)
            whole = not stream.read(1)  # else the last character may be cut
        codecs.getincrementaldecoder("utf-8")().decode(begin, final=whole)
    except (OSError, UnicodeDecodeError):
        return False
    return bool(begin) and b"\0" not in begin


def _sample(files: Sequence[Path], limit_bytes: int) -> Iterator[str]:
    """The pieces of files, or an evenly spread share of them where they pass the limit."""
    total_bytes = sum(file.stat().st_size for file in files)
    share = min(1.0, limit_bytes / max(1, total_bytes))
    taken, seen = 0.0, 0.0
    for file in files:
        for piece in pieces(file):
            seen += share * len(piece)
            if taken < seen:
                taken += len(piece)
                yield piece


def special_tokens(config: Any) -> dict[int, str]:
    """The special tokens a model's config asks for, by id; those outside the vocabulary are left out.

    Args: config, a transformers config with vocab_size, bos_token_id and eos_token_id (a number, a list or None).
    """
    bos, eos = _first(config.bos_token_id), _first(config.eos_token_id)
    names = {bos: "<|endoftext|>"} if bos == eos else {bos: "<s>", eos: "</s>"}
    return {number: name for number, name in names.items() if 0 <= number < config.vocab_size}


def _first(value: Any) -> int:
    """A token's id of a config, which may be a number, a list or None; -1 for none."""
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value if isinstance(value, int) else -1


def train_tokenizer(files: Sequence[Path], config: Any, longest: int | None = None) -> PreTrainedTokenizerBase:
    """A byte-level BPE with the config's vocabulary size, its special tokens at the config's ids.

    Args: files, UTF-8 text; config, a transformers config; longest, the model's longest sequence in tokens.
    Raises DataError where the vocabulary cannot hold the 256 bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    size, special = int(config.vocab_size), special_tokens(config)
    if size < BYTE_COUNT:
        raise DataError(
            f"a vocabulary of {size} is too small for a byte-level tokenizer; "
            f"the model's vocab_size must be at least {BYTE_COUNT}"
        )
    if size < BYTE_COUNT + len(special):
        special = {}
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Each byte of text makes one token at most; the trainer takes memory for as many as it is asked for.
    most = BYTE_COUNT + sum(file.stat().st_size for file in files)
    learner.train_from_iterator(
        _sample(files, TRAINING_BYTES),
        trainers.BpeTrainer(vocab_size=min(size - len(special), most), initial_alphabet=alphabet, show_progress=False),
    )
    learned = json.loads(learner.to_str())["model"]
    # The learned tokens take the ids that the special ones leave free, in their order.
    vocabulary = {name: number for number, name in special.items()}
    free = (number for number in range(size) if number not in special)
    for name in sorted(learned["vocab"], key=learned["vocab"].__getitem__):
        vocabulary[name] = next(free)
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": special.get(_first(config.bos_token_id)), "eos_token": special.get(_first(config.eos_token_id))}
    more = {} if longest is None else {"model_max_length": longest}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{key: name for key, name in names.items() if name},
        **more,
    )


def encode(tokenizer: PreTrainedTokenizerBase, files: Sequence[Path], vocab_size: int) -> NDArray[np.unsignedinteger[Any]]:
    """All tokens of the files one after another, the end-of-text token (where there is one) after each file.

    Args: vocab_size, of the model. Returns shape (tokens,), uint16 or uint32.
    Raises DataError where the tokenizer gives an id that the model does not have.
    """
    tokens = array("H" if vocab_size <= 1 << 16 else "I")
    with _whole(tokenizer):
        for group in _groups(files):
            for ids in _encode_group(tokenizer, group):
                if ids and max(ids) >= vocab_size:
                    raise DataError(
                        f"the tokenizer gives the id {max(ids)}, the model's vocabulary ends at {vocab_size - 1}; "
                        "take the tokenizer of this model"
                    )
                tokens.extend(ids)
    return np.frombuffer(tokens, dtype=np.uint16 if tokens.typecode == "H" else np.uint32) if tokens else np.zeros(0, np.uint16)


@contextmanager
def _whole(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Inside, no text is cut or padded, which a tokenizer's file may ask for: it keeps what its last call asked for."""
    backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    truncation, padding = (backend.truncation, backend.padding) if backend is not None else (None, None)
    if truncation is not None:
        backend.no_truncation()
    if padding is not None:
        backend.no_padding()
    try:
        yield
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def _groups(files: Iterable[Path]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces with whether each is the last of its file, GROUP_PIECES at a time."""
    marked = _marked(files)
    while group := list(islice(marked, GROUP_PIECES)):
        yield group


def _marked(files: Iterable[Path]) -> Iterator[tuple[str, bool]]:
    """All pieces, and whether each is the last of its file."""
    for file in files:
        before: str | None = None
        for piece in pieces(file):
            if before is not None:
                yield before, False
            before = piece
        if before is not None:
            yield before, True


def _encode_group(tokenizer: PreTrainedTokenizerBase, group: list[tuple[str, bool]]) -> Iterator[list[int]]:
    texts = [piece for piece, _ in group]
    end = tokenizer.eos_token_id
    if tokenizer.is_fast:
        rows = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    else:
        rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    for ids, (_, last) in zip(rows, group, strict=True):
        yield [*ids, end] if last and end is not None else ids


def check_length(tokens: NDArray[np.unsignedinteger[Any]], seq: int) -> None:
    """Raises DataError where there are fewer tokens than one sequence needs."""
    if len(tokens) < seq:
        raise DataError(
            f"the data has {len(tokens)} tokens, one sequence needs {seq}; give more text with --data or a shorter --seq"
        )


def batch(tokens: NDArray[np.unsignedinteger[Any]], seq: int, count: int, seed: int, number: int) -> NDArray[np.int64]:
    """Batch `number` of a training: `count` windows of `seq` tokens at random places. Shape (count, seq)."""
    starts = np.random.default_rng([seed, number]).integers(0, len(tokens) - seq + 1, size=count)
    return np.stack([tokens[start : start + seq] for start in starts]).astype(np.int64)


def read_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder that has one. Raises DataError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        kind = PreTrainedTokenizerFast if _is_whole(folder) else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many kinds for files that they cannot read
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"the tokenizer in the folder {str(folder)!r} cannot be read: {reason}; take another copy of its files"
        ) from error
    return tokenizer


def _is_whole(folder: str | os.PathLike[str]) -> bool:
    """Whether tokenizer.json says all of it, as of one that was trained here: the class that transformers has for the type
    may take the vocabulary alone, and cut text otherwise."""
    try:
        with open(os.path.join(folder, "tokenizer_config.json"), "rb") as file:
            kind = json.load(file).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return False
    return kind in ("PreTrainedTokenizerFast", "TokenizersBackend") and os.path.isfile(os.path.join(folder, "tokenizer.json"))


def has_tokenizer(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a tokenizer."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return any(os.path.isfile(os.path.join(folder, name)) for name in names)
