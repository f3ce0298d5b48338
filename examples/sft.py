"""TRL's SFTTrainer inside a memory budget, with a peft adapter.

    python examples/sft.py --memory 40MiB

ProTrainMixin makes any Trainer one that takes protrain=dict(...); model, tokenizer and data are made here, of nothing.
TRL's own defaults are bf16 and gradient checkpointing: protrain trains in fp32, and decides itself what is recomputed.
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import protrain
from protrain.integrations.transformers import ProTrainMixin

words = argparse.ArgumentParser(description="Fine-tune a small Llama with TRL.")
words.add_argument("--memory", default="40MiB", help="the budget: weights, gradients, moments, activations (%(default)s)")
words.add_argument("--disk", help="folder for what does not fit (default: $PROTRAIN_DISK, else the temporary directory)")
given = words.parse_args()


class ProTrainSFTTrainer(ProTrainMixin, SFTTrainer):
    """SFTTrainer with one more argument, protrain=dict(memory=...)."""


numbers = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
texts = [f"{numbers[a]} plus {numbers[b]} is {numbers[(a + b) % 10]} . " * 8 for a in range(10) for b in range(10)]
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=512, special_tokens=["<pad>", "<end>"], show_progress=False))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<end>")

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=4, vocab_size=512)
)
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder, max_steps=6, per_device_train_batch_size=1, gradient_accumulation_steps=4, learning_rate=1e-2, logging_steps=2,
        save_steps=3, max_length=64, bf16=False, gradient_checkpointing=False, use_cpu=True, report_to=[],
    )  # fmt: skip
    trainer = ProTrainSFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
        protrain={"memory": given.memory, "disk": given.disk},
    )
    trainer.train()

status = protrain.status(trainer.model)
print(f"peak {status.peak_memory_bytes / 2**20:.1f} MiB of {given.memory}, read from disk {status.disk_read_bytes >> 20} MiB")
