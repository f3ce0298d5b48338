"""One side of `protrain bench step` or `bench activations`: a process that trains a step whenever it is asked to.

`python -m protrain.cli.bench_worker plain|protrain WORDS`, WORDS the options as JSON, block_modes among them where they are
given. Reads "ready", "step" and "end" from stdin and answers each with a line of JSON; an error is a line {"error": ...} and exit
code 1.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO


def _resident_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(found[1]) * 1024


def _make(kind: str, words: dict[str, Any]) -> tuple[Any, Any, int | None]:
    """The model, its optimizer and the budget in bytes; the same weights in both kinds."""
    import torch

    from protrain.cli.model import Initializer, build, read_config

    config, _ = read_config(words["model_name"])
    model = build(config)
    initialize = Initializer(model, words["seed"])
    if kind == "plain":
        materialize(model, initialize)
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
        budget = None
    else:
        import protrain

        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        budget = words["memory"] or 8 * sum(parameter.numel() for parameter in model.parameters())
        model, optimizer = protrain.wrap(
            model, optimizer, memory=budget, disk=words["disk"], block_modes=words.get("block_modes"), param_init_fn=initialize
        )
    torch.manual_seed(words["seed"])
    return model, optimizer, budget


def materialize(model: Any, initialize: Any) -> None:
    """Give a model on meta real parameters on the CPU, tied ones staying tied, and initialise it module by module."""
    import torch

    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                if id(parameter) not in made:
                    made[id(parameter)] = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
    for module in model.modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            initialize(module)


def _serve(kind: str, words: dict[str, Any], answers: TextIO) -> None:
    import torch

    base_bytes = _resident_bytes("VmRSS")
    model, optimizer, budget_bytes = _make(kind, words)
    recorder = None
    if kind == "protrain" and words.get("report"):
        from protrain.cli.report import Recorder

        recorder = Recorder(model)
    generator = torch.Generator().manual_seed(words["seed"])
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        if line.strip() == "step":
            ids = torch.randint(model.config.vocab_size, (words["batch"], words["seq"]), generator=generator)
            begin = time.monotonic()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            answer = {"seconds": time.monotonic() - begin, "loss": loss.item()}
            del loss
            if recorder is not None:
                import protrain

                recorder.after(answer["loss"], protrain.status(model))
        elif line.strip() == "end":
            answer = {"peak_resident_bytes": _resident_bytes("VmHWM"), "base_resident_bytes": base_bytes}
            if kind == "protrain":
                import protrain
                from protrain.cli.train import fields_of

                answer |= {"budget_bytes": budget_bytes, "status": fields_of(protrain.status(model))}
                if recorder is not None and (found := recorder.recorded()) is not None:
                    answer["recorded"] = fields_of(found)
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Serve until stdin ends or an error; answers go to what was stdout, prints of other packages nowhere."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        _serve(sys.argv[1], json.loads(sys.argv[2]), answers)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        from protrain.cli.words import message_of

        print(json.dumps({"error": message_of(error)}), file=answers, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
