"""Lightning's Trainer: wrap where the optimizer is made.

    python examples/lightning_trainer.py --memory 24MiB

wrap is told of how many backward passes a step has, and clips: gradients have left memory when Lightning's gradient_clip_val
would look at them. Checkpoints, resuming, schedules and validation are Lightning's own.
"""

import argparse
import warnings

import pytorch_lightning as lightning
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import protrain

words = argparse.ArgumentParser(description="Train a small GPT-2 with Lightning.")
words.add_argument("--memory", default="24MiB", help="the budget: weights, gradients, moments, activations (%(default)s)")
words.add_argument("--disk", help="folder for what does not fit (default: $PROTRAIN_DISK, else the temporary directory)")
given = words.parse_args()

WINDOW = 2


class Language(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, n_positions=128, vocab_size=512))

    def training_step(self, batch, number):
        loss = self.model(input_ids=batch, labels=batch).loss
        print(f"loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        _, optimizer = protrain.wrap(
            self.model, optimizer, memory=given.memory, disk=given.disk, accumulate=WINDOW, max_grad_norm=1.0
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


lightning.seed_everything(0, verbose=False)
warnings.filterwarnings("ignore", module="pytorch_lightning")  # how many workers a loader should have
module = Language()
loader = DataLoader(torch.randint(512, (24, 64)), batch_size=2, shuffle=True)
trainer = lightning.Trainer(
    max_epochs=2, accumulate_grad_batches=WINDOW, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_model_summary=False, enable_progress_bar=False,
)  # fmt: skip
trainer.fit(module, loader)

status = protrain.status(module.model)
print(f"peak {status.peak_memory_bytes / 2**20:.1f} MiB of {given.memory}, read from disk {status.disk_read_bytes >> 20} MiB")
