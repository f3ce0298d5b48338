"""What the experiments train, and how: models of a few numbers, and a training that goes on when it is asked to."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Shape:
    """A model of random weights and its batches. family: gpt2, llama, bert, t5, vit or encoder (torch's own, of
    vectors). seq: tokens of a sequence; images of vit have 196 patches."""

    family: str
    hidden: int
    layers: int
    batch: int
    seq: int
    vocabulary: int = 1024
    dropout: float = 0.0

    @property
    def name(self) -> str:
        """As "gpt2 512x8, 4x256"."""
        what = f"{self.batch} images" if self.family == "vit" else f"{self.batch}x{self.seq}"
        return f"{self.family} {self.hidden}x{self.layers}, {what}"

    def config(self) -> Any:
        """Of transformers; not for an encoder."""
        import transformers

        h, heads, ends = self.hidden, max(self.hidden // 64, 1), {"bos_token_id": 0, "eos_token_id": 0}
        if self.family == "gpt2":
            return transformers.GPT2Config(
                n_embd=h, n_layer=self.layers, n_head=heads, vocab_size=self.vocabulary, n_positions=max(self.seq, 1024),
                resid_pdrop=self.dropout, embd_pdrop=self.dropout, attn_pdrop=self.dropout, **ends,
            )  # fmt: skip
        if self.family == "llama":
            return transformers.LlamaConfig(
                hidden_size=h, num_hidden_layers=self.layers, num_attention_heads=heads, num_key_value_heads=max(heads // 2, 1),
                intermediate_size=3 * h, vocab_size=self.vocabulary, **ends,
            )  # fmt: skip
        if self.family == "bert":
            return transformers.BertConfig(
                hidden_size=h, num_hidden_layers=self.layers, num_attention_heads=heads, intermediate_size=4 * h,
                vocab_size=self.vocabulary, hidden_dropout_prob=self.dropout, attention_probs_dropout_prob=self.dropout,
                max_position_embeddings=max(self.seq, 512),
            )  # fmt: skip
        if self.family == "t5":
            return transformers.T5Config(
                d_model=h, d_kv=64, d_ff=4 * h, num_layers=self.layers // 2, num_decoder_layers=self.layers // 2,
                num_heads=heads, vocab_size=self.vocabulary, dropout_rate=self.dropout, use_cache=False,
                decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
            )  # fmt: skip
        if self.family == "vit":
            return transformers.ViTConfig(
                hidden_size=h, num_hidden_layers=self.layers, num_attention_heads=heads, intermediate_size=4 * h,
                image_size=224, patch_size=16, num_labels=10,
            )  # fmt: skip
        raise ValueError(f"no family {self.family!r}")

    def model(self) -> Any:
        """In training mode, its weights those of seed 0."""
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        if self.family == "encoder":
            layer = torch.nn.TransformerEncoderLayer(self.hidden, max(self.hidden // 64, 1), 4 * self.hidden, batch_first=True)
            inner = torch.nn.TransformerEncoder(layer, self.layers, enable_nested_tensor=False)
            return torch.nn.Sequential(inner, torch.nn.Linear(self.hidden, 8)).train()
        kind = {
            "gpt2": transformers.GPT2LMHeadModel,
            "llama": transformers.LlamaForCausalLM,
            "bert": transformers.BertForMaskedLM,
            "t5": transformers.T5ForConditionalGeneration,
            "vit": transformers.ViTForImageClassification,
        }[self.family]
        return kind(self.config()).train()

    def inputs(self, number: int) -> dict[str, Any]:
        """What the model takes in step `number`."""
        import torch

        random = torch.Generator().manual_seed(number)
        if self.family == "vit":
            labels = torch.randint(0, 10, (self.batch,), generator=random)
            return {"pixel_values": torch.randn(self.batch, 3, 224, 224, generator=random), "labels": labels}
        if self.family == "encoder":
            return {"input": torch.randn(self.batch, self.seq, self.hidden, generator=random)}
        ids = torch.randint(0, self.vocabulary, (self.batch, self.seq), generator=random)
        return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Way:
    """How protrain trains it. plan: as JSON. late: learning rates are set between backward and step, so that no update can begin
    before. meta: the model is never in memory whole; for gpt2 and llama."""

    memory: int
    block_modes: tuple[str, ...] | None = None
    plan: str | None = None
    late: bool = False
    meta: bool = False
    device: str = "cpu"
    disk: str | None = None


def train(shape: Shape, way: Way) -> Generator[Any, Any, None]:
    """Asked with a number of steps, makes them; answers with what they took, their losses, the status after them, and which slots
    the plan in use has."""
    import torch

    import protrain
    from protrain.api import session_of
    from protrain.cli.model import Initializer, build
    from protrain.cli.train import fields_of

    model = build(shape.config()) if way.meta else shape.model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    given = None if way.plan is None else protrain.Plan.from_json(way.plan)
    modes = None if way.block_modes is None else list(way.block_modes)
    with torch.device(way.device):
        model, optimizer = protrain.wrap(
            model, optimizer, memory=way.memory, disk=way.disk, plan=given, block_modes=modes,
            param_init_fn=Initializer(model, 0) if way.meta else None,
        )  # fmt: skip
    number, answer = 0, None
    while True:
        seconds, step_seconds, losses = [], [], []
        for _ in range((yield answer)):
            inputs = {name: value.to(way.device) for name, value in shape.inputs(number).items()}
            torch.manual_seed(number)
            rate, number = LEARNING_RATE * (1 + number % 2), number + 1
            begin = time.monotonic()
            if not way.late:
                _set_rate(optimizer, rate)
            output = model(**inputs)
            loss = output.loss if hasattr(output, "loss") else output.square().mean()
            loss.backward()
            if way.late:
                _set_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.monotonic() - begin)
            del output, loss
            status = protrain.status(model)
            step_seconds.append(status.step_seconds)
        arrangement = session_of(model).homes.arrangement
        answer = {
            "seconds": seconds,
            "step_seconds": step_seconds,
            "losses": losses,
            "status": fields_of(status),
            "slot_of_chunk": list(arrangement.slot_of_chunk),
            "accesses": list(arrangement.accesses),
        }


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
