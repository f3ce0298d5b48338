"""transformers' Trainer inside a memory budget: another class, one more argument.

    python examples/trainer.py --memory 24MiB

Everything else is the Trainer: accumulation, clipping, schedules, evaluation, callbacks, checkpoints, resuming.
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import protrain
from protrain.integrations.transformers import ProTrainTrainer

words = argparse.ArgumentParser(description="Train a small GPT-2 with the Trainer.")
words.add_argument("--memory", default="24MiB", help="the budget: weights, gradients, moments, activations (%(default)s)")
words.add_argument("--disk", help="folder for what does not fit (default: $PROTRAIN_DISK, else the temporary directory)")
words.add_argument("--out", help="folder for checkpoints (default: one that is removed at the end)")
given = words.parse_args()

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, n_positions=128, vocab_size=512))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(512, (40, 64))]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        given.out or folder,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,  # wrap's accumulate
        max_grad_norm=1.0,  # wrap's max_grad_norm
        learning_rate=1e-3,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        use_cpu=True,
        report_to=[],
    )
    trainer = ProTrainTrainer(
        model, arguments, train_dataset=rows[:32], eval_dataset=rows[32:], protrain={"memory": given.memory, "disk": given.disk}
    )
    trainer.train()
    print(f"evaluation loss {trainer.evaluate()['eval_loss']:.4f}")

status = protrain.status(model)
print(f"peak {status.peak_memory_bytes / 2**20:.1f} MiB of {given.memory}, read from disk {status.disk_read_bytes >> 20} MiB")
