"""What every test shares: no network, a folder on a real disk, small causal LMs, the same torch threads before each test, which
sleep where they wait."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ahead import Ahead

if TYPE_CHECKING:
    import torch

# Before transformers is imported by anybody, and for the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Before torch is: its threads sleep while they wait for one another. As they come, they spin, and on tensors as small as those of
# tests most of the time is spent so, which the threads of the lanes then lack. How sums are split does not change by it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parent.parent
IN_MEMORY = {"tmpfs", "ramfs"}

# The files that take longest, the longest first: where several processes share the files, these are begun first.
LONGEST = (
    "test_reliability", "test_bf16", "test_gpu_benchmark", "test_c", "test_trainer", "test_plan_cli", "test_cli", "test_exact",
    "test_semantics_calls", "test_semantics", "test_examples", "test_report", "test_optimizers", "test_rehearsal", "test_stash",
    "test_build",
)  # fmt: skip

LanguageModel = Callable[..., Any]
TokenBatches = Callable[..., list["torch.Tensor"]]


def filesystem(folder: Path) -> str:
    """The type of the file system that folder lies on, as the kernel names it ("ext4", "overlay", "tmpfs")."""
    folder, best, kind = folder.resolve(), -1, "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, name, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if folder.is_relative_to(point) and len(point) >= best:  # of two mounts at one point the later one is seen
            best, kind = len(point), name
    return kind


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    """A fresh folder on a file system that is not in memory; gone after the session."""
    candidates = [os.environ.get("PROTRAIN_DISK"), tempfile.gettempdir(), "/var/tmp", str(ROOT / "build")]
    folders = [Path(name) for name in candidates if name]
    (ROOT / "build").mkdir(exist_ok=True)
    real = [
        folder for folder in folders if folder.is_dir() and os.access(folder, os.W_OK) and filesystem(folder) not in IN_MEMORY
    ]
    if not real:
        pytest.exit(f"no folder on a disk among {', '.join(map(str, folders))}: set PROTRAIN_DISK to one", returncode=1)
    folder = Path(tempfile.mkdtemp(prefix="protrain-tests-", dir=real[0]))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs of this test keep what they can make again, as `protrain plan` what it measured; empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def fresh_disk(disk: Path) -> Iterator[Path]:
    """A folder of this test alone below `disk`."""
    folder = Path(tempfile.mkdtemp(dir=disk))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def arena(disk: Path) -> Iterator[Any]:
    """An engine that counts all tensors made while it is there, but those that belong to no budget."""
    from protrain import _core

    _core.install_allocator()
    engine = _core.Engine(str(disk), 1 << 40, [(4096, True)], [(0, 0, 16, True, 0)], 1, 2)
    engine.use_account(True)
    yield engine
    engine.use_account(False)
    engine.close()


@pytest.fixture(scope="session")
def ahead() -> Iterator[Ahead]:
    """Runs on all cores what the tests of a function wait for."""
    made = Ahead()
    yield made
    made.pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """A test that changes the number of torch's threads changes it for itself only: sums depend on how they are split."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    yield
    torch = sys.modules.get("torch")
    if torch and before is not None and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_stays_wrapped() -> Iterator[None]:
    """What a test leaves wrapped, one that failed above all, is closed: its budget is the process's, and not of later tests."""
    before = open_sessions()
    yield
    close_sessions(open_sessions() - before)


def open_sessions() -> set[Any]:
    api = sys.modules.get("protrain.api")
    return set(api._open) if api else set()


def close_sessions(sessions: set[Any]) -> None:
    from protrain import api

    for session in sessions:
        try:
            session.close()
        except api.Error:  # of a disk that still fails: its model is lost, its budget is not kept
            session.forget()
            session.closed = True
            session.engine.close()
        api._open.discard(session)


@pytest.fixture(autouse=True)
def short_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal in the tests' own process makes as many passes as it must and no more: no test judges how long they take."""
    rehearsal = sys.modules.get("protrain.profiling.rehearsal")
    for name in ("LEAST_SECONDS", "MORE_SECONDS") if rehearsal else ():
        monkeypatch.setattr(rehearsal, name, 0.0)


def move_apart(apart: bool) -> None:
    """What a small model saves is shorter than a request, and would stay in memory until more comes: apart, it goes at once."""
    core = sys.modules.get("protrain._core")
    if core:
        core.move_apart(apart)


@pytest.fixture(scope="session", autouse=True)
def all_apart() -> None:
    move_apart(True)


@pytest.fixture(autouse=True)
def some_together(request: pytest.FixtureRequest) -> Iterator[None]:
    """As users have it: in tests marked `together`, and in processes of their own."""
    move_apart(request.node.get_closest_marker("together") is None)
    yield
    move_apart(True)


# The names under which model families keep one size: what a config does not know is left alone.
SIZES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "word_embed_proj_dim"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head", "num_key_value_heads"),
    "inner": ("intermediate_size", "ffn_dim"),
    "positions": ("max_position_embeddings", "n_positions"),
    "vocabulary": ("vocab_size",),
}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout", "hidden_dropout", "activation_dropout")


@pytest.fixture(scope="session")
def causal_lm() -> LanguageModel:
    """Makes a small transformers causal LM in training mode, its random weights those of a seed.

    `causal_lm("gpt2", seed=0, hidden=64, layers=4, heads=4, positions=1024, vocabulary=256, **config_fields)`; the family is
    any that transformers has a causal LM for (gpt2, llama, opt, mistral, gpt_neox, qwen2). No dropout, no key-value cache.
    """
    import torch
    import transformers

    def make(family: str, seed: int = 0, **given: Any) -> Any:
        sizes = {"hidden": 64, "layers": 4, "heads": 4, "positions": 1024, "vocabulary": 256}
        sizes.update({name: given.pop(name) for name in list(given) if name in SIZES})
        sizes.setdefault("inner", 4 * sizes["hidden"])
        config = transformers.AutoConfig.for_model(family)
        fields = {field: sizes[name] for name, aliases in SIZES.items() for field in aliases}
        fields |= dict.fromkeys(DROPOUTS, 0.0)
        fields |= {"head_dim": sizes["hidden"] // sizes["heads"], "layer_types": ["full_attention"] * sizes["layers"]}
        fields |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "use_cache": False}
        for field, value in {**fields, **given}.items():
            if hasattr(config, field) or field in given:
                setattr(config, field, value)
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config).train()

    return make


@pytest.fixture(scope="session")
def token_batches() -> TokenBatches:
    """Makes int64 [batch, length] of random tokens: `token_batches(count, batch=2, length=64, vocabulary=256, seed=1)`."""
    import torch

    def make(count: int, batch: int = 2, length: int = 64, vocabulary: int = 256, seed: int = 1) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(vocabulary, (batch, length), generator=generator) for _ in range(count)]

    return make
