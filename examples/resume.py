"""Save, stop, and go on under another budget: the losses are those of a run that never stopped.

    python examples/resume.py --memory 24MiB --then 32MiB

protrain.save writes the weights as safetensors that from_pretrained reads, and the optimizer's state beside them, tensor by
tensor. The random state is saved too, so dropout goes on where it was.
"""

import argparse
import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import protrain

words = argparse.ArgumentParser(description="Save a training and resume it.")
words.add_argument("--memory", default="24MiB", help="the budget of the first half (%(default)s)")
words.add_argument("--then", default="32MiB", help="the budget of the second half (%(default)s)")
words.add_argument("--disk", help="folder for what does not fit (default: $PROTRAIN_DISK, else the temporary directory)")
given = words.parse_args()

torch.manual_seed(0)
batches = [torch.randint(512, (4, 64)) for _ in range(6)]


def wrapped(seed, memory):
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, n_positions=128, vocab_size=512)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return protrain.wrap(model, optimizer, memory=memory, disk=given.disk)


def train(model, optimizer, batches):
    losses = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


with tempfile.TemporaryDirectory() as folder:
    checkpoint = os.path.join(folder, "checkpoint")
    model, optimizer = wrapped(1, given.memory)
    train(model, optimizer, batches[:3])
    protrain.save(model, optimizer, checkpoint)
    never_stopped = train(model, optimizer, batches[3:])
    protrain.unwrap(model)

    model, optimizer = wrapped(2, given.then)  # other weights, until the checkpoint is loaded
    protrain.load(model, optimizer, checkpoint)
    resumed = train(model, optimizer, batches[3:])

print("never stopped ", *(f"{loss:.6f}" for loss in never_stopped))
print("resumed       ", *(f"{loss:.6f}" for loss in resumed))
print("equal, bit for bit" if resumed == never_stopped else "NOT equal")
