"""accelerate without the Trainer: wrap first, then prepare.

    python examples/accelerate_loop.py --memory 24MiB

accelerate skips steps between windows of accumulation; wrap is told of how many backward passes a window has. Clipping is
wrap's too: gradients have left memory when accelerator.clip_grad_norm_ would look at them.
"""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import protrain

words = argparse.ArgumentParser(description="Train a small GPT-2 with accelerate.")
words.add_argument("--memory", default="24MiB", help="the budget: weights, gradients, moments, activations (%(default)s)")
words.add_argument("--disk", help="folder for what does not fit (default: $PROTRAIN_DISK, else the temporary directory)")
given = words.parse_args()

WINDOW = 2
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, n_positions=128, vocab_size=512)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
loader = DataLoader(torch.randint(512, (24, 64)), batch_size=2, shuffle=True)

model, optimizer = protrain.wrap(model, optimizer, memory=given.memory, disk=given.disk, accumulate=WINDOW, max_grad_norm=1.0)
schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=6)
# The model stays where wrap put it: accelerate must not move it.
model, optimizer, loader, schedule = accelerator.prepare(
    model, optimizer, loader, schedule, device_placement=[False, False, True, True]
)

for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        norm = float(optimizer.optimizer.grad_norm)
        print(f"loss {loss.item():.4f}  gradient norm {norm:.3f}  learning rate {schedule.get_last_lr()[0]:.1e}")

status = protrain.status(model)
print(f"peak {status.peak_memory_bytes / 2**20:.1f} MiB of {given.memory}, read from disk {status.disk_read_bytes >> 20} MiB")
