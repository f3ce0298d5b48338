"""Text to tokens to batches: exact round trips, the same result every time, clear refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, Qwen2Config

from protrain.cli import data

TEXT = "def f(x):\n    return x  +  1\r\n\n# naïve 日本語 \t tab, don't\n" * 50


def config(vocab_size: int = 300, bos: Any = 0, eos: Any = 0) -> Any:
    return SimpleNamespace(vocab_size=vocab_size, bos_token_id=bos, eos_token_id=eos)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.mark.parametrize(
    ("size", "bos", "eos"), [(300, 0, 0), (300, 299, 299), (300, 1, 2), (300, None, [7]), (256, 0, 0), (300, 900, 900)]
)
def test_the_text_comes_back_exactly(file: Path, size: int, bos: Any, eos: Any) -> None:
    wanted = config(size, bos, eos)
    tokenizer = data.train_tokenizer([file], wanted)
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert max(ids) < size
    unseen = "\x00 Ω <b>   \u2028\n"
    assert tokenizer.decode(tokenizer(unseen)["input_ids"]) == unseen


def test_a_vocabulary_beyond_any_memory_is_learned_as_far_as_the_text_goes(file: Path) -> None:
    """The trainer takes memory for as many tokens as it is asked for, and ends the process where there is not enough."""
    large = data.train_tokenizer([file], config(10**15))
    assert large.get_vocab() == data.train_tokenizer([file], config(100_000)).get_vocab()
    assert large.decode(large(TEXT)["input_ids"]) == TEXT


def test_special_tokens_take_the_ids_of_the_config(file: Path) -> None:
    tokenizer = data.train_tokenizer([file], config(300, 299, 7))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (299, 7)
    assert data.train_tokenizer([file], config(256, 0, 0)).eos_token_id is None  # all 256 are taken by bytes


def test_a_vocabulary_below_the_bytes_is_refused(file: Path) -> None:
    with pytest.raises(data.DataError, match="at least 256"):
        data.train_tokenizer([file], config(255))


def test_training_a_tokenizer_twice_gives_the_same(file: Path) -> None:
    first, second = (data.train_tokenizer([file], config()).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


def test_pieces_join_to_the_file_and_end_at_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PIECE_BYTES", 64)
    path = tmp_path / "long.txt"
    text = TEXT + "é" * 1000 + "\nend"
    path.write_bytes(text.encode())
    found = list(data.pieces(path))
    assert "".join(found) == text
    assert len(found) > 20
    assert all(piece.endswith("\n") for piece in found[:10])


def test_each_file_ends_with_the_end_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PIECE_BYTES", 64)
    monkeypatch.setattr(data, "GROUP_PIECES", 3)
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path in files:
        path.write_bytes(TEXT.encode())
    tokenizer = data.train_tokenizer(files, config())
    tokens = data.encode(tokenizer, files, 300)
    assert tokens.dtype == np.uint16
    assert list(np.flatnonzero(tokens == 0)) == [len(tokens) // 2 - 1, len(tokens) - 1]
    assert tokenizer.decode(tokens[: len(tokens) // 2 - 1].tolist()) == TEXT


def test_a_tokenizer_that_cuts_and_pads_gives_all_of_a_text(file: Path, tmp_path: Path) -> None:
    """Its file has what its last call asked for, which stays in it."""
    tokenizer = data.train_tokenizer([file], config())
    whole = data.encode(tokenizer, [file], 300)
    assert len(whole) > 16
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["a", "b c"], truncation=True, max_length=16, padding="max_length")
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for one in (tokenizer, loaded):
        assert np.array_equal(data.encode(one, [file], 300), whole)
        assert (one.backend_tokenizer.truncation["max_length"], one.backend_tokenizer.padding["length"]) == (16, 16)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_tokenizer_that_cannot_be_read_is_refused_by_its_folder(damage: str, file: Path, tmp_path: Path) -> None:
    data.train_tokenizer([file], config()).save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "tokenizer.json"
    path.unlink() if damage == "gone" else path.write_text(path.read_text()[:50])
    assert data.has_tokenizer(tmp_path / "saved")
    with pytest.raises(data.DataError, match=r"the tokenizer in the folder '.*saved' cannot be read: .*take another copy"):
        data.read_tokenizer(tmp_path / "saved")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(file: Path) -> None:
    tokenizer = data.train_tokenizer([file], config(400))
    with pytest.raises(data.DataError, match="vocabulary ends at 259"):
        data.encode(tokenizer, [file], 260)


def test_batches_depend_on_seed_and_number_alone() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    one = data.batch(tokens, 16, 4, seed=1, number=5)
    assert one.shape == (4, 16)
    assert one.dtype == np.int64
    assert np.array_equal(one, data.batch(tokens, 16, 4, seed=1, number=5))
    assert not np.array_equal(one, data.batch(tokens, 16, 4, seed=1, number=6))
    assert not np.array_equal(one, data.batch(tokens, 16, 4, seed=2, number=5))
    assert (np.diff(one) == 1).all()
    assert data.batch(tokens[:16], 16, 2, seed=0, number=0).tolist() == [list(range(16))] * 2  # the only window there is


def test_too_few_tokens_are_refused() -> None:
    data.check_length(np.zeros(8, np.uint16), 8)
    with pytest.raises(data.DataError, match=r"7 tokens.*needs 8"):
        data.check_length(np.zeros(7, np.uint16), 8)


def test_files_of_a_folder_are_sorted_text_without_the_hidden(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "b.txt": b"b",
        "sub/a.txt": b"a",
        ".git/x": b"x",
        "image": b"\0\1",
        "latin": b"\xe9",
        "empty": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "nowhere").symlink_to("x" * 300)  # a name that the system does not even look for
    assert [str(path.relative_to(tmp_path)) for path in data.text_files([str(tmp_path)])] == ["b.txt", "sub/a.txt"]


def test_folders_that_links_lead_to_are_read_once(tmp_path: Path) -> None:
    for name in ("data/own/a.txt", "far/b.txt", "far/deep/c.txt", "run/d.txt", "e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    links = {
        "data/0": "own",  # which lies there itself
        "data/1": "../far/deep",
        "data/2": "../far",  # the rest of it
        "data/3": "../far",
        "data/own/around": "../..",
        "data/own/here": ".",
        "far/back": "../data/own",
        "far/round": "../far",
        "far/deep/down": "nowhere",
        "data/4": "../run",
        "data/5.txt": "../run/d.txt",
    }
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    found = data.text_files([str(tmp_path / "data")], [str(tmp_path / "run")])
    assert [str(path.relative_to(tmp_path / "data")) for path in found] == ["1/c.txt", "2/b.txt", "own/a.txt"]
    found = data.text_files([str(tmp_path / "data" / "4")])
    assert found == [tmp_path / "data" / "4" / "d.txt"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [("no.txt", None, "no file"), ("empty.txt", b"", "empty"), ("bin", b"a\0b", "not UTF-8"), ("latin", b"\xe9a", "not UTF-8")],
)
def test_a_named_file_that_is_no_text_is_refused_by_name(
    tmp_path: Path, file: Path, name: str, content: bytes | None, words: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(data.DataError, match=words) as caught:
        data.text_files([str(file), str(path)])
    assert str(path) in str(caught.value)


def test_what_cannot_be_read_twice_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of a pipe would be lost where it is looked at, and one that nobody writes to be waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    for name, words in (
        ("pipe", "'pipe' is a pipe or a device"),
        ("/dev/null", "'/dev/null' is a pipe or a device"),
        ("", "no file"),
    ):
        with pytest.raises(data.DataError, match=words):
            data.text_files([name])


def test_bad_utf8_far_into_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "late.txt"
    path.write_bytes(b"good\n" * 20000 + b"\xff\xfe")
    with pytest.raises(data.DataError, match=r"late\.txt"):
        list(data.pieces(path))


def test_without_paths_the_standard_library_is_read() -> None:
    files = data.text_files([])
    assert any(path.name == "json" or path.parent.name == "json" for path in files)
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)


def test_folders_of_packages_are_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages may lie below the standard library, and are many more files than it has."""
    for name in ("a.py", "json/b.py", "site-packages/torch/c.py", "test/d.py", "json/tests/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    listed: list[str] = []
    scandir = os.scandir

    def listing(folder: Any = ".") -> Any:
        listed.append(os.path.relpath(folder, tmp_path))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", listing)
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert data.standard_library() == [tmp_path / "a.py", tmp_path / "json" / "b.py"]
    assert set(listed) <= {".", "json"}


def test_the_tokenizer_sample_is_spread_over_the_files(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.txt" for number in range(100)]
    for number, path in enumerate(files):
        path.write_text(f"{number:04d}\n" * 200)
    taken = list(data._sample(files, 10_000))
    assert 8_000 <= sum(len(piece) for piece in taken) <= 12_000
    assert max(int(piece[:4]) for piece in taken) > 80


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Inside, files that nobody may read cannot be read, by who runs the tests as root either."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("kind", ["file", "folder", "within a folder"])
def test_what_may_not_be_read_is_named(tmp_path: Path, kind: str) -> None:
    path = closed = tmp_path / "closed"
    if kind == "file":
        path.write_text("text")
    else:
        path.mkdir()
        (path / "a.txt").write_text("text")
        path = path / "a.txt" if kind == "within a folder" else path
    closed.chmod(0)
    with (
        ordinary_user(),
        pytest.raises(data.DataError, match=r"closed.* cannot be read: Permission denied; give text"),
    ):
        data.text_files([str(path)])
    closed.chmod(0o700)


def test_a_large_file_is_encoded_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All encodings of a group are in memory at once."""
    monkeypatch.setattr(data, "PIECE_BYTES", 64)
    for name, lines in (("large.txt", 1000), ("small.txt", 3)):
        (tmp_path / name).write_text("".join(f"line {number}\n" for number in range(lines)))
    files = [tmp_path / "large.txt", tmp_path / "small.txt", tmp_path / "large.txt"]
    groups = list(data._groups(files))
    assert len(groups) > 4
    assert all(len(group) <= data.GROUP_PIECES for group in groups)
    pieces = [piece for group in groups for piece in group]
    assert "".join(piece for piece, _ in pieces) == "".join(file.read_text() for file in files)
    assert sum(last for _, last in pieces) == 3


def test_what_a_training_writes_is_not_its_data(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    run = str(tmp_path / "run")
    assert data.text_files([str(tmp_path)], [run]) == [tmp_path / "text.txt"]
    assert data.text_files([run], [run, str(tmp_path)]) == [tmp_path / "run" / "config.json"]


def test_a_tokenizer_of_its_own_file_is_read_as_it_is(tmp_path: Path) -> None:
    """Where transformers has another class for the type of the model in the folder, which cuts text otherwise."""
    (tmp_path / "text.txt").write_text("a few words, 1234 numbers\n" * 200)
    config = Qwen2Config(vocab_size=300)
    made = data.train_tokenizer([tmp_path / "text.txt"], config, 64)
    made.save_pretrained(str(tmp_path / "saved"))
    config.save_pretrained(str(tmp_path / "saved"))
    text = "numbers 12345678, a few words"
    assert data.read_tokenizer(tmp_path / "saved")(text)["input_ids"] == made(text)["input_ids"]
