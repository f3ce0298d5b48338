"""The weights that everybody starts from, in safetensors: `python -m peers.models MODEL FOLDER SEED LAYERS`.

Dropout is off, so that losses can be compared with those of peers that draw random numbers in another order. LAYERS 0: the
model's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def write_model(name: str, folder: str, seed: int, layers: int) -> None:
    """Args: name, as --model; layers, 0 for those of the model. Raises CommandError."""
    import torch
    from transformers import AutoModelForCausalLM

    from protrain.cli.model import read_config

    config, _ = read_config(name)
    for field in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    if layers:
        config.num_hidden_layers = layers
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="1TB")
    parameters = sum(p.numel() for p in model.parameters())
    (Path(folder) / "about.json").write_text(json.dumps({"parameters": parameters, "layers": config.num_hidden_layers}))


if __name__ == "__main__":
    write_model(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
