"""An ordinary training loop inside a memory budget: one call is new.

    python examples/plain_loop.py --memory 24MiB

The model's weights, gradients and Adam moments take 52 MiB; the losses are those of plain torch, bit for bit.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import protrain

words = argparse.ArgumentParser(description="Train a small GPT-2 in a plain loop.")
words.add_argument("--memory", default="24MiB", help="the budget: weights, gradients, moments, activations (%(default)s)")
words.add_argument("--disk", help="folder for what does not fit (default: $PROTRAIN_DISK, else the temporary directory)")
words.add_argument("--steps", type=int, default=6)
given = words.parse_args()

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, n_positions=128, vocab_size=512)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
batches = [torch.randint(512, (4, 64)) for _ in range(2)]

model, optimizer = protrain.wrap(model, optimizer, memory=given.memory, disk=given.disk)
for step in range(given.steps):
    batch = batches[step % len(batches)]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}  loss {loss.item():.4f}")

status = protrain.status(model)
print(status.plan.explain())
print(f"peak {status.peak_memory_bytes / 2**20:.1f} MiB of {given.memory}, read from disk {status.disk_read_bytes >> 20} MiB")
