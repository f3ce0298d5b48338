"""What torch's caching allocator of a GPU loses between tensors, simulated: no GPU is needed.

    python -m benchmarks.lost_memory --out benchmarks/results/lost_memory.json

The allocations of three steps of a GPT-2 in bf16, its blocks recomputed and kept, are recorded on meta and made again in a
model of the allocator: requests of whole 512 bytes, tensors up to 1 MiB from segments of 2 MiB, others from segments of
their own of 20 MiB or more, the best fit among free blocks, what is left of one cut off where it is worth it, neighbours
joined when they are free, and no segment given back, as it is while a pool is filled. Told is the least that the allocator
can do with over what is live at most: in segments as they come, and where all tensors above 1 MiB are cut from one range.
Gradients are dropped when a step ends.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
import transformers
import transformers.masking_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.turns import keep_rows, show

MIB = 1 << 20
LEAST_BYTES = 512  # requests are whole ones
MOST_SMALL_BYTES = 1 * MIB  # up to here a request is a small one
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB  # of requests below half of it
ROUND_BYTES = 2 * MIB  # segments of larger ones are whole ones
STEPS = 3
VOCABULARY = 50257
#: Layers, width, rows, tokens, and whether blocks are recomputed.
MODELS = {
    f"GPT-2 {layers} x {width}, {rows} x {tokens} tokens, {words}": (layers, width, rows, tokens, words == "recomputed")
    for layers, width, rows, tokens in ((24, 1024, 8, 1024), (12, 768, 4, 512), (6, 2560, 4, 512), (16, 1600, 2, 2048))
    for words in ("recomputed", "kept")
}

Event = tuple[int, int]  # a tensor's number, and its bytes; 0: it is gone


class Block:
    """A part of a segment. before, after: its neighbours there."""

    __slots__ = ("after", "before", "free", "order", "size", "small")

    def __init__(self, size: int, small: bool, order: int) -> None:
        self.size, self.small, self.order = size, small, order
        self.before: Block | None = None
        self.after: Block | None = None
        self.free = False


class Allocator:
    """live_bytes, reserved_bytes: now; most_live_bytes: at most. range_bytes: of the one range that large tensors are cut
    from first; 0: there is none."""

    def __init__(self, range_bytes: int = 0) -> None:
        self.live_bytes = self.most_live_bytes = self.reserved_bytes = 0
        self._numbers = itertools.count()
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        if range_bytes:
            self._put(self._segment(range_bytes, False))

    def take(self, size: int) -> Block:
        size = -(-size // LEAST_BYTES) * LEAST_BYTES
        small = size <= MOST_SMALL_BYTES
        free = self._free[small]
        place = bisect.bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._segment(_segment_bytes(size), small)
        rest = block.size - size
        if rest >= LEAST_BYTES if small else rest > MOST_SMALL_BYTES:
            block.size = size
            self._put(self._behind(block, rest))
        block.free = False
        self.live_bytes += block.size
        self.most_live_bytes = max(self.most_live_bytes, self.live_bytes)
        return block

    def give(self, block: Block) -> None:
        self.live_bytes -= block.size
        if block.before is not None and block.before.free:
            block = self._join(block.before, block)
        if block.after is not None and block.after.free:
            block = self._join(block, block.after)
        self._put(block)

    def _segment(self, size: int, small: bool) -> Block:
        self.reserved_bytes += size
        return Block(size, small, next(self._numbers))

    def _behind(self, block: Block, size: int) -> Block:
        rest = Block(size, block.small, next(self._numbers))
        rest.before, rest.after, block.after = block, block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        return rest

    def _join(self, first: Block, second: Block) -> Block:
        for block in (first, second):
            if block.free:
                self._free[block.small].remove((block.size, block.order, block))
                block.free = False
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _put(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size, block.order, block))


def _segment_bytes(size: int) -> int:
    if size <= MOST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if size < LARGE_SEGMENT_BYTES // 2 else -(-size // ROUND_BYTES) * ROUND_BYTES


def played(events: Iterable[Event], range_bytes: int = 0) -> Allocator | None:
    """The allocator behind these events; None where the range did not hold all that is large."""
    allocator = Allocator(range_bytes)
    blocks: dict[int, Block] = {}
    for number, size in events:
        if not size:
            if number in blocks:
                allocator.give(blocks.pop(number))
            continue
        before_bytes = allocator.reserved_bytes
        blocks[number] = allocator.take(size)
        if range_bytes and not blocks[number].small and allocator.reserved_bytes > before_bytes:
            return None
    return allocator


def least_range(events: list[Event], live_bytes: int) -> Allocator:
    """The allocator with the smallest range that holds all that is large, to 4 MiB."""
    low, high = live_bytes // 2, 2 * live_bytes
    while high - low > 4 * MIB:
        middle = (low + high) // 2
        low, high = (low, middle) if played(events, middle) is not None else (middle, high)
    found = played(events, high)
    assert found is not None, "twice of what is live was not enough"
    return found


class _Recorder(TorchDispatchMode):
    """Notes each memory that operations make, and when it is gone."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._known, self._numbers = known, itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, number = storage._cdata, next(self._numbers)
        if key in self._known or not storage.nbytes():
            return
        self._known.add(key)
        self.events.append((number, storage.nbytes()))
        weakref.finalize(storage, self._gone, key, number)

    def _gone(self, key: int, number: int) -> None:
        self._known.discard(key)
        self.events.append((number, 0))


def recorded(layers: int, width: int, rows: int, tokens: int, recomputed: bool, vocabulary: int = VOCABULARY) -> list[Event]:
    """What the steps of a GPT-2 allocate. recomputed: all blocks are, by torch's own checkpoint."""
    config = transformers.GPT2Config(
        n_embd=width, n_layer=layers, n_head=width // 64, vocab_size=vocabulary, n_positions=tokens, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = transformers.GPT2LMHeadModel(config).train().to(torch.bfloat16)
        ids = torch.zeros((rows, tokens), dtype=torch.long)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    recorder = _Recorder({p.untyped_storage()._cdata for p in model.parameters()})
    # What transformers asks of positions, that sequences are not packed, has no answer on meta.
    with patch.object(transformers.masking_utils, "find_packed_sequence_indices", lambda *_, **__: None), recorder:
        for _ in range(STEPS):
            logits = model(input_ids=ids).logits
            loss = torch.nn.functional.cross_entropy(logits.float().view(-1, vocabulary), ids.view(-1))
            del logits
            loss.backward()
            del loss
            model.zero_grad()
    return recorder.events


def lost(layers: int, width: int, rows: int, tokens: int, recomputed: bool, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """What is live at most, and over that what is reserved: in segments, and where large tensors are cut from one range."""
    events = recorded(layers, width, rows, tokens, recomputed, vocabulary)
    segments = played(events)
    assert segments is not None
    live_bytes = segments.most_live_bytes
    return {
        "live_bytes": live_bytes,
        "segments": round(segments.reserved_bytes / live_bytes, 3),
        "one_range": round(least_range(events, live_bytes).reserved_bytes / live_bytes, 3),
    }


def measure(name: str) -> dict[str, Any]:
    return {"model": name, **lost(*MODELS[name])}


if __name__ == "__main__":
    keep_rows("lost_memory", __doc__, MODELS, measure, show)
