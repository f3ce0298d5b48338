"""A vision transformer: nothing here knows of text.

    python examples/vision.py --memory 24MiB

Images of four colours of noise, told apart by a ViT with random weights.
"""

import argparse

import torch
from transformers import ViTConfig, ViTForImageClassification

import protrain

words = argparse.ArgumentParser(description="Train a small ViT.")
words.add_argument("--memory", default="24MiB", help="the budget: weights, gradients, moments, activations (%(default)s)")
words.add_argument("--disk", help="folder for what does not fit (default: $PROTRAIN_DISK, else the temporary directory)")
words.add_argument("--steps", type=int, default=12)
given = words.parse_args()

torch.manual_seed(0)
config = ViTConfig(
    hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, image_size=64, patch_size=8, num_labels=4
)
model = ViTForImageClassification(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
colours = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])

model, optimizer = protrain.wrap(model, optimizer, memory=given.memory, disk=given.disk, max_grad_norm=1.0)
for step in range(given.steps):
    labels = torch.randint(4, (8,))
    pixels = colours[labels][:, :, None, None] + 0.5 * torch.randn(8, 3, 64, 64)
    found = model(pixel_values=pixels, labels=labels)
    found.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    right = (found.logits.argmax(-1) == labels).sum().item()
    print(f"step {step + 1}  loss {found.loss.item():.4f}  {right} of 8 right  gradient norm {optimizer.grad_norm:.3f}")

status = protrain.status(model)
print(f"peak {status.peak_memory_bytes / 2**20:.1f} MiB of {given.memory}, read from disk {status.disk_read_bytes >> 20} MiB")
