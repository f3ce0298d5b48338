"""peft's adapters over a frozen model that does not fit the budget.

    python examples/lora.py --memory 12MiB

Frozen weights have no gradients and no moments; those that do not stay in memory are read for each pass and never written.
What is saved is the adapter alone.
"""

import argparse
import os
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import protrain
from protrain.integrations.transformers import ProTrainTrainer

words = argparse.ArgumentParser(description="Train adapters of a small Llama.")
words.add_argument("--memory", default="12MiB", help="the budget: weights, gradients, moments, activations (%(default)s)")
words.add_argument("--disk", help="folder for what does not fit (default: $PROTRAIN_DISK, else the temporary directory)")
given = words.parse_args()

torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4, vocab_size=512)
)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05))
model.print_trainable_parameters()
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(512, (32, 64))]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=2, save_strategy="no", use_cpu=True,
        report_to=[],
    )  # fmt: skip
    trainer = ProTrainTrainer(model, arguments, train_dataset=rows, protrain={"memory": given.memory, "disk": given.disk})
    trainer.train()
    trainer.save_model()
    print(*sorted(name for name in os.listdir(folder) if name.startswith("adapter")))

status = protrain.status(model)
print(f"peak {status.peak_memory_bytes / 2**20:.1f} MiB of {given.memory}, read from disk {status.disk_read_bytes >> 20} MiB")
