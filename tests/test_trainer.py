"""ProTrainTrainer beside the plain Trainer: what either logs, saves and leaves in its model is the same, bit for bit."""

from __future__ import annotations

import collections
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from twins import MIB, adamw, bits

import protrain
from protrain.integrations.transformers import ProTrainMixin, ProTrainSeq2SeqTrainer, ProTrainTrainer
from protrain.state import torchfiles

Rows = list[dict[str, torch.Tensor]]
Make = Callable[[], Any]


def rows(count: int, seed: int = 1, length: int = 24, vocabulary: int = 128, ignored: bool = False) -> Rows:
    """Rows of random tokens; ignored: the first labels of each row count for nothing, another number of them in each."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        ids = torch.randint(1, vocabulary, (length,), generator=generator)
        labels = ids.clone()
        if ignored:
            labels[: 3 + number % 5 * 4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


@pytest.fixture
def gpt2(causal_lm: Callable[..., Any]) -> Make:
    """Makes a small GPT-2 with dropout: whatever draws random numbers must draw the plain Trainer's."""
    return lambda: causal_lm("gpt2", 7, hidden=128, layers=4, vocabulary=128, positions=64, resid_pdrop=0.1, embd_pdrop=0.1)


#: Less than the model's weights, gradients and moments: 13 MiB.
MEMORY = 9 * MIB


def arguments(folder: Path, kind: type[Any] = transformers.TrainingArguments, **changes: Any) -> Any:
    base: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "weight_decay": 0.1, "seed": 3, "use_cpu": True,
        "optim": "adamw_torch_fused", "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    return kind(str(folder), **{**base, **changes})


def trainer_of(
    folder: Path, model: Any, ours: bool, *, data: Rows | None = None, given: dict[str, Any] | None = None,
    kinds: tuple[type[Any], type[Any]] = (transformers.Trainer, ProTrainTrainer), memory: int = MEMORY, **changes: Any,
) -> Any:  # fmt: skip
    """One of the two Trainers; `given` goes to its constructor, `changes` to TrainingArguments."""
    more: dict[str, Any] = dict(given or {})
    if ours:
        disk = folder / "disk"
        disk.mkdir(parents=True, exist_ok=True)
        more["protrain"] = {"memory": memory, "disk": str(disk)}
    where = {"model_init": model} if callable(model) and not isinstance(model, torch.nn.Module) else {"model": model}
    args = changes.pop("args", None) or arguments(folder, **changes)
    made = kinds[ours](args=args, train_dataset=rows(24) if data is None else data, eval_dataset=rows(5, seed=2), **where, **more)
    made.remove_callback(transformers.PrinterCallback)
    return made


def history(trainer: Any) -> list[dict[str, Any]]:
    """The log without times."""
    return [
        {key: value for key, value in row.items() if not key.endswith(("_time", "_runtime", "_per_second"))}
        for row in trainer.state.log_history
    ]


def weights(model: Any) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def moments(trainer: Any) -> dict[str, bytes]:
    state = trainer.optimizer.state_dict()["state"]
    return {
        f"{n}.{key}": bits(torch.as_tensor(v).float()) for n, entry in state.items() for key, v in entry.items() if v is not None
    }


def finish(trainer: Any, extra: Any = None) -> dict[str, Any]:
    """All that can be compared of a Trainer that has trained."""
    seen = {"history": history(trainer), "weights": weights(trainer.model), "moments": moments(trainer), "extra": extra}
    if isinstance(trainer, ProTrainMixin):
        status = protrain.status(trainer.model)
        seen["status"] = status
        protrain.unwrap(trainer.model)
    return seen


def assert_twins(scenario: Callable[[bool], dict[str, Any]], memory: int = MEMORY, disk: bool = True) -> dict[str, Any]:
    """scenario(ours) for both Trainers gives the same, ours inside its budget and, with `disk`, from disk. Returns ours."""
    torch.set_num_threads(1)
    want, got = scenario(False), scenario(True)
    assert got["history"] == want["history"]
    assert list(got["weights"]) == list(want["weights"])
    assert not [name for name in want["weights"] if got["weights"][name] != want["weights"][name]]
    assert got["moments"] == want["moments"]
    assert got["extra"] == want["extra"]
    assert 0 < got["status"].peak_memory_bytes <= memory
    if disk:
        assert got["status"].disk_read_bytes > 0
    return got


# ---- steps ----


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(("schedule", "optim"), [("linear", "adamw_torch_fused"), ("constant", "adamw_torch")])
def test_windows_that_do_not_divide_the_epoch(gpt2: Make, fresh_disk: Path, clip: float, schedule: str, optim: str) -> None:
    """7 batches an epoch in windows of 3: each epoch's last step has one backward pass."""

    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(
            fresh_disk / str(ours), gpt2(), ours, data=rows(14, ignored=True), max_steps=-1, num_train_epochs=2,
            gradient_accumulation_steps=3, max_grad_norm=clip, lr_scheduler_type=schedule, optim=optim,
        )  # fmt: skip
        trainer.train()
        return finish(trainer)

    got = assert_twins(scenario)
    assert got["status"].steps == 6
    assert all(row["grad_norm"] > 0 for row in got["history"] if "loss" in row)


@pytest.mark.parametrize(
    "changes",
    [
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 2},
        {"include_num_input_tokens_seen": "all", "logging_first_step": True, "eval_strategy": "epoch", "num_train_epochs": 1,
         "max_steps": -1},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss",
         "lr_scheduler_kwargs": {"patience": 0}},
    ],
    ids=["label smoothing", "neftune", "sgd", "cosine", "tokens", "plateau"],
)  # fmt: skip
def test_arguments_mean_what_they_mean(gpt2: Make, fresh_disk: Path, changes: dict[str, Any]) -> None:
    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(fresh_disk / str(ours), gpt2(), ours, **changes)
        trainer.train()
        return finish(trainer)

    assert_twins(scenario)


def test_batches_of_many_lengths(gpt2: Make, fresh_disk: Path) -> None:
    data = [row for length in (8, 40, 16, 24, 33, 12) for row in rows(2, seed=length, length=length)]

    def collate(batch: Rows) -> dict[str, torch.Tensor]:
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad([row["input_ids"] for row in batch], batch_first=True),
            "labels": pad([row["labels"] for row in batch], batch_first=True, padding_value=-100),
        }

    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(
            fresh_disk / str(ours), gpt2(), ours, data=data, given={"data_collator": collate}, max_steps=-1, num_train_epochs=2,
            gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer.train()
        return finish(trainer)

    assert_twins(scenario)


def test_a_loss_of_the_users_own(gpt2: Make, fresh_disk: Path) -> None:
    """compute_loss is overridden, two forward passes of the model in it."""

    class Mine:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            first, second = model(**inputs), model(**inputs)
            loss = first.loss + second.loss + 0.1 * (first.logits - second.logits).pow(2).mean()
            return (loss, first) if return_outputs else loss

    class Plain(Mine, transformers.Trainer):
        pass

    class Ours(Mine, ProTrainTrainer):
        pass

    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(fresh_disk / str(ours), gpt2(), ours, kinds=(Plain, Ours), memory=24 * MIB)
        trainer.train()
        return finish(trainer, trainer.evaluate()["eval_loss"])

    assert_twins(scenario, 24 * MIB, disk=False)  # two graphs at once are more than is planned for


def test_compute_loss_func(gpt2: Make, fresh_disk: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    def scenario(ours: bool) -> dict[str, Any]:
        given = {"compute_loss_func": loss}
        trainer = trainer_of(fresh_disk / str(ours), gpt2(), ours, given=given, gradient_accumulation_steps=2)
        trainer.train()
        return finish(trainer)

    assert_twins(scenario)


def test_an_optimizer_and_a_schedule_of_the_users_own(gpt2: Make, fresh_disk: Path) -> None:
    def scenario(ours: bool) -> dict[str, Any]:
        model = gpt2()
        optimizer = adamw(model, lr=5e-4, betas=(0.8, 0.95))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        trainer = trainer_of(fresh_disk / str(ours), model, ours, given={"optimizers": (optimizer, schedule)})
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as that the schedule went before the optimizer
            trainer.train()
        return finish(trainer)

    assert_twins(scenario)


def test_a_stream_that_ends_in_the_middle_of_a_step(gpt2: Make, fresh_disk: Path) -> None:
    """5 batches in windows of 2: what is left of each pass over them belongs to the next step, which has 3."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(rows(10))

    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(fresh_disk / str(ours), gpt2(), ours, max_steps=5, gradient_accumulation_steps=2)
        trainer.train_dataset = Stream()
        trainer.train()
        return finish(trainer)

    assert_twins(scenario)


@pytest.mark.parametrize("anew", [False, True], ids=["once", "each time"])
def test_an_optimizer_that_a_subclass_makes(gpt2: Make, fresh_disk: Path, anew: bool) -> None:
    """As transformers has it, without a call of the method that it overrides; and training again."""

    class Mine:
        model: Any
        optimizer: Any

        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None or anew:
                self.optimizer = adamw(self.model, lr=5e-4)
            return self.optimizer

    class Plain(Mine, transformers.Trainer):
        pass

    class Ours(Mine, ProTrainTrainer):
        pass

    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(fresh_disk / str(ours), gpt2(), ours, kinds=(Plain, Ours), max_steps=2)
        trainer.train()
        trainer.train()
        return finish(trainer)

    assert_twins(scenario)


# ---- other models ----


def test_a_module_that_is_no_transformers_model(fresh_disk: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(8))
            self.norm = torch.nn.BatchNorm1d(256)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            for layer in self.layers:
                x = x + torch.relu(layer(x))
            x = self.norm(x)
            return {"logits": x} if labels is None else {"loss": torch.nn.functional.mse_loss(x, labels), "logits": x}

    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(256, generator=generator), "labels": torch.randn(256, generator=generator)} for _ in range(20)]

    def scenario(ours: bool) -> dict[str, Any]:
        torch.manual_seed(5)
        folder = fresh_disk / str(ours)
        changes = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2}
        trainer = trainer_of(folder, Net(), ours, data=data, memory=6 * MIB, **changes)
        trainer.eval_dataset = data[:5]
        trainer.train()
        again = trainer_of(folder, Net(), ours, data=data, memory=5 * MIB, **changes)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert weights(again.model) == weights(trainer.model)
        if ours:
            protrain.unwrap(again.model)
        logits = bits(torch.from_numpy(trainer.predict(data[:5]).predictions))
        return finish(trainer, logits)

    assert_twins(scenario, 6 * MIB)


def test_evaluating_larger_batches_than_those_of_training(gpt2: Make, fresh_disk: Path) -> None:
    """States that stay in memory between steps make room for an evaluation, and come back; logits that are collected are no
    matter of the budget."""
    data = rows(96, seed=4, length=64)

    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(
            fresh_disk / str(ours), gpt2(), ours, memory=13 * MIB, max_steps=4, eval_strategy="steps", eval_steps=2,
            per_device_train_batch_size=1, per_device_eval_batch_size=12,
        )  # fmt: skip
        trainer.eval_dataset = data
        trainer.train()
        if ours:
            plan = protrain.status(trainer.model).plan
            assert plan.n_persist > 0
        found = trainer.predict(data + data + data + data)
        assert found.predictions.nbytes > 10 * MIB
        if ours:
            assert protrain.status(trainer.model).plan == plan
        return finish(trainer, bits(torch.from_numpy(found.predictions)))

    assert_twins(scenario, 13 * MIB)


@pytest.mark.parametrize("n_rows", [12, 48])
def test_an_evaluation_that_cannot_fit_is_foretold_before_training(n_rows: int, gpt2: Make, fresh_disk: Path) -> None:
    """Rather than after an epoch of it; and it is so."""
    data = rows(96, seed=4, length=64)
    trainer = trainer_of(
        fresh_disk / "out", gpt2(), True, data=data, memory=13 * MIB, max_steps=2, eval_strategy="steps", eval_steps=2,
        per_device_train_batch_size=1, per_device_eval_batch_size=n_rows,
    )  # fmt: skip
    trainer.eval_dataset = data
    foretold: list[str] = []

    class Told(transformers.TrainerCallback):
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            foretold.extend(str(w.message) for w in caught if "evaluating" in str(w.message))

    trainer.add_callback(Told)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if n_rows == 12:
            trainer.train()
        else:
            with pytest.raises(protrain.BudgetError, match=r"evaluating: memory: a forward of this batch needs") as refused:
                trainer.train()
    if n_rows == 12:
        assert not foretold
        return
    assert foretold[0] == foretold[1]  # at the first step, and no more
    assert foretold[0].startswith("protrain: evaluating 48 rows as long as those of training will fail: memory: a forward")
    smallest_bytes = int(foretold[0].split("(")[1].split(" bytes)")[0])
    assert refused.value.smallest_bytes <= smallest_bytes <= refused.value.smallest_bytes + 16 * 1024


@pytest.mark.parametrize("several", [False, True], ids=["one set", "named sets"])
def test_an_evaluation_of_few_rows_is_foreseen_as_such(several: bool, gpt2: Make, fresh_disk: Path) -> None:
    """Batches may be larger than all there is: 48 rows do not fit, and there are 12."""
    trainer = trainer_of(
        fresh_disk / "out", gpt2(), True, data=rows(96, seed=4, length=64), memory=13 * MIB, max_steps=2, eval_strategy="steps",
        eval_steps=2, per_device_train_batch_size=1, per_device_eval_batch_size=48,
    )  # fmt: skip
    few = rows(12, seed=4, length=64)
    trainer.eval_dataset = {"one": few, "other": few[:3]} if several else few
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert not [warning for warning in caught if "evaluating" in str(warning.message)]
    assert any(key.endswith("_loss") and key.startswith("eval") for row in trainer.state.log_history for key in row)


def test_generating_while_evaluating(fresh_disk: Path) -> None:
    """Seq2SeqTrainer with predict_with_generate, an encoder-decoder with tied embeddings."""
    config = transformers.T5Config(
        vocab_size=128, d_model=128, d_kv=32, d_ff=256, num_layers=3, num_heads=4, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=1, dropout_rate=0.1,
    )  # fmt: skip
    kinds = transformers.Seq2SeqTrainer, ProTrainSeq2SeqTrainer

    def scenario(ours: bool) -> dict[str, Any]:
        torch.manual_seed(3)
        folder = fresh_disk / str(ours)
        args = arguments(
            folder, transformers.Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=12, max_steps=2
        )
        trainer = trainer_of(folder, transformers.T5ForConditionalGeneration(config), ours, kinds=kinds, args=args)
        trainer.train()
        found = trainer.predict(rows(4, seed=9))
        trainer.save_model(str(folder / "saved"))
        loaded = transformers.T5ForConditionalGeneration.from_pretrained(folder / "saved")
        assert weights(loaded) == weights(trainer.model)
        return finish(trainer, (found.predictions.tolist(), found.metrics["test_loss"]))

    assert_twins(scenario)


def test_a_model_whose_files_have_another_form(causal_lm: Callable[..., Any], fresh_disk: Path) -> None:
    """Mixtral's experts are one parameter in memory and many in files."""

    def scenario(ours: bool) -> dict[str, Any]:
        folder = fresh_disk / str(ours)
        model = causal_lm("mixtral", 1, hidden=64, layers=2, vocabulary=128, num_local_experts=4, num_experts_per_tok=2)
        trainer = trainer_of(folder, model, ours, max_steps=2, memory=16 * MIB)
        trainer.train()
        trainer.save_model(str(folder / "saved"))
        from safetensors.torch import load_file

        return finish(trainer, {name: bits(tensor) for name, tensor in load_file(folder / "saved" / "model.safetensors").items()})

    got = assert_twins(scenario, 16 * MIB, disk=False)
    assert any("experts.3.w2" in name for name in got["extra"])


# ---- checkpoints ----


def test_checkpoints_go_both_ways(gpt2: Make, fresh_disk: Path) -> None:
    """A checkpoint of either Trainer resumes in the other; optimizer.pt holds the same."""
    torch.set_num_threads(1)
    changes: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    plain = trainer_of(fresh_disk / "plain", gpt2(), False, **changes)
    plain.train()
    ours = trainer_of(fresh_disk / "ours", gpt2(), True, **changes)
    ours.train()
    seen = finish(ours)
    files = [{path.name for path in (fresh_disk / kind / "checkpoint-2").iterdir()} for kind in ("plain", "ours")]
    assert files[0] == files[1]
    states = [torch.load(fresh_disk / kind / "checkpoint-2" / "optimizer.pt", weights_only=True) for kind in ("plain", "ours")]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for number, entry in states[0]["state"].items():
        assert list(entry) == list(states[1]["state"][number])
        assert all(torch.equal(value, states[1]["state"][number][key]) for key, value in entry.items())
    for kind, source, memory in ((False, "ours", 0), (True, "plain", 7 * MIB), (True, "ours", 40 * MIB)):
        again = trainer_of(fresh_disk / f"again {source} {kind}", gpt2(), kind, memory=memory, **changes)
        again.train(resume_from_checkpoint=str(fresh_disk / source / "checkpoint-2"))
        assert weights(again.model) == weights(plain.model) == seen["weights"]
        assert moments(again) == moments(plain)
        assert [row for row in history(again) if row["step"] > 2 and "loss" in row] == [
            row for row in history(plain) if row["step"] > 2 and "loss" in row
        ]
        if kind:
            assert protrain.status(again.model).peak_memory_bytes <= memory
            protrain.unwrap(again.model)


def test_the_best_model_at_the_end(gpt2: Make, fresh_disk: Path) -> None:
    """The learning rate is such that the first evaluation is the best; one checkpoint stays beside the last."""

    def scenario(ours: bool) -> dict[str, Any]:
        folder = fresh_disk / str(ours)
        trainer = trainer_of(
            folder, gpt2(), ours, max_steps=4, learning_rate=0.3, lr_scheduler_type="constant", eval_strategy="steps",
            eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True, save_total_limit=1,
            metric_for_best_model="loss",
        )  # fmt: skip
        trainer.train()
        best = os.path.basename(trainer.state.best_model_checkpoint)
        kept = sorted(path.name for path in folder.iterdir() if path.name.startswith("checkpoint"))
        assert best != "checkpoint-4"
        return finish(trainer, (best, kept, trainer.evaluate()["eval_loss"]))

    assert_twins(scenario)


def test_a_checkpoint_that_fails_leaves_the_optimizers_file(
    gpt2: Make, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(fresh_disk, gpt2(), True, max_steps=1)
    trainer.train()
    (fresh_disk / "optimizer.pt").write_bytes(b"before")

    def fail(_number: int, _array: int = 0) -> torch.Tensor:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(protrain.session_of(trainer.model).values, "get", fail)
    with pytest.raises(protrain.DiskError, match=r"optimizer\.pt failed.*No space left") as caught:
        trainer._save_optimizer_and_scheduler(str(fresh_disk))
    assert caught.value.errno == 28
    assert (fresh_disk / "optimizer.pt").read_bytes() == b"before"
    assert not list(fresh_disk.glob("*.partial"))
    monkeypatch.undo()
    protrain.unwrap(trainer.model)


# ---- orders of calls ----


def test_evaluating_before_training_and_training_twice(gpt2: Make, fresh_disk: Path) -> None:
    """The second train() goes on with the same optimizer, once with other arguments."""

    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(fresh_disk / str(ours), gpt2(), ours, max_steps=2)
        losses = [trainer.evaluate()["eval_loss"]]
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        trainer.args.gradient_accumulation_steps, trainer.args.max_grad_norm = 2, 0.25
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
        return finish(trainer, losses)

    assert_twins(scenario)


@pytest.mark.parametrize("resumed", [False, True])
def test_training_again_after_an_exception(resumed: bool, gpt2: Make, fresh_disk: Path) -> None:
    """A callback raises between two backward passes of a step, which is then not made."""

    class Stop(transformers.TrainerCallback):
        armed = True

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.armed and state.global_step == 1:
                self.armed = False
                raise KeyboardInterrupt

    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(
            fresh_disk / str(ours), gpt2(), ours, given={"callbacks": [Stop()]}, gradient_accumulation_steps=2,
            save_strategy="steps", save_steps=1,
        )  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.train(resume_from_checkpoint=resumed)
        return finish(trainer, loss)

    assert_twins(scenario)


def test_model_init_makes_a_fresh_model_for_each_training(gpt2: Make, fresh_disk: Path) -> None:
    """A loop over learning rates, as hyperparameter searches make them; models of earlier turns stay whole."""

    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(fresh_disk / str(ours), gpt2, ours, max_steps=2)
        seen = []
        for rate in (1e-3, 1e-4):
            trainer.args.learning_rate = rate
            trainer.train()
            seen.append((trainer.model, weights(trainer.model), trainer.evaluate()["eval_loss"]))
        assert weights(seen[0][0]) == seen[0][1]
        return finish(trainer, [what[1:] for what in seen])

    assert_twins(scenario)


def test_a_second_trainer_for_the_same_model(gpt2: Make, fresh_disk: Path) -> None:
    def scenario(ours: bool) -> dict[str, Any]:
        first = trainer_of(fresh_disk / str(ours), gpt2(), ours, max_steps=2)
        first.train()
        second = trainer_of(fresh_disk / f"{ours} again", first.model, ours, max_steps=2, gradient_accumulation_steps=2)
        before = second.evaluate()["eval_loss"]
        second.train()
        return finish(second, before)

    assert_twins(scenario)


def test_an_unwrapped_model_needs_another_optimizer(gpt2: Make, fresh_disk: Path) -> None:
    trainer = trainer_of(fresh_disk, gpt2(), True, max_steps=1)
    trainer.train()
    protrain.unwrap(trainer.model)
    with pytest.raises(protrain.PlanError, match=r"unwrapped.*trainer\.optimizer = None"):
        trainer.train()
    trainer.optimizer = None
    trainer.train()
    assert protrain.status(trainer.model).steps == 1
    protrain.unwrap(trainer.model)


def test_the_norm_that_callbacks_see_in_the_log(gpt2: Make, fresh_disk: Path) -> None:
    """Logged as a number, of its own step, where steps are logged later than they are made."""

    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(fresh_disk / str(ours), gpt2(), ours, max_steps=5, logging_steps=3)
        trainer.train()
        norms = [row["grad_norm"] for row in history(trainer) if "grad_norm" in row]
        assert norms
        assert all(type(norm) is float for norm in norms)
        return finish(trainer, norms)

    assert_twins(scenario)


# ---- batch sizes ----


def test_auto_find_batch_size_tries_smaller_batches(causal_lm: Callable[..., Any], fresh_disk: Path) -> None:
    """What trains after smaller and smaller batches is what trains with the size that fits from the start."""
    torch.set_num_threads(1)

    def make() -> Any:
        return causal_lm("gpt2", 7, hidden=64, layers=2, vocabulary=128, positions=256)

    data = rows(24, length=256)
    changes: dict[str, Any] = {"data": data, "memory": 8 * MIB, "max_steps": 2}
    ours = trainer_of(fresh_disk / "auto", make(), True, per_device_train_batch_size=8, auto_find_batch_size=True, **changes)
    ours.train()
    found = ours.state.train_batch_size
    assert 1 <= found < 8
    assert protrain.status(ours.model).peak_memory_bytes <= 8 * MIB
    seen = finish(ours)
    with pytest.raises(protrain.BudgetError, match="the smallest budget that works"):
        trainer_of(fresh_disk / "next", make(), True, per_device_train_batch_size=found + 1, **changes).train()
    fits = trainer_of(fresh_disk / "fits", make(), True, per_device_train_batch_size=found, **changes)
    fits.train()
    assert {row["step"] for row in seen["history"]} == {1, 2}
    assert weights(fits.model).keys() == seen["weights"].keys()
    protrain.unwrap(fits.model)


def test_auto_find_batch_size_with_no_size_that_fits(causal_lm: Callable[..., Any], fresh_disk: Path) -> None:
    model = causal_lm("gpt2", 7, hidden=64, layers=2, vocabulary=128, positions=1024)
    trainer = trainer_of(fresh_disk, model, True, data=rows(4, length=1024), memory=3 * MIB, auto_find_batch_size=True)
    with pytest.raises(
        protrain.BudgetError, match=r"auto_find_batch_size: not even a batch of 1 fits.*smallest budget"
    ) as caught:
        trainer.train()
    assert caught.value.smallest_bytes > 3 * MIB
    protrain.unwrap(model)


def test_an_error_behind_a_refused_batch_is_told(gpt2: Make, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on with a smaller one, and something else fails."""
    errors = [protrain.BudgetError("no", needed_bytes=2, budget_bytes=1, smallest_bytes=2), RuntimeError("the writer failed")]

    def training_step(*_: Any, **__: Any) -> Any:
        raise errors.pop(0)

    monkeypatch.setattr(transformers.Trainer, "training_step", training_step)
    trainer = trainer_of(fresh_disk, gpt2(), True, per_device_train_batch_size=2, auto_find_batch_size=True)
    with pytest.raises(RuntimeError, match="the writer failed"):
        trainer.train()
    protrain.unwrap(trainer.model)


def test_saving_keeps_what_others_put_beside_the_weights(gpt2: Make, fresh_disk: Path) -> None:
    def scenario(ours: bool) -> dict[str, Any]:
        folder = fresh_disk / str(ours)
        trainer = trainer_of(folder, gpt2(), ours, max_steps=1)
        trainer.train()
        theirs, stale = ("model_ema.safetensors", "model.fp16.safetensors"), "model-00001-of-00002.safetensors"
        for name in (*theirs, stale):
            (folder / name).write_bytes(b"another's")
        trainer.save_model(str(folder))
        assert [(folder / name).read_bytes() for name in theirs] == [b"another's"] * 2
        assert not (folder / stale).exists()
        return finish(trainer)

    assert_twins(scenario)


def test_a_budget_that_the_states_do_not_fit_is_no_matter_of_batches(gpt2: Make, fresh_disk: Path) -> None:
    trainer = trainer_of(fresh_disk, gpt2(), True, memory=200_000, auto_find_batch_size=True)
    with pytest.raises(protrain.BudgetError) as caught:
        trainer.train()
    assert "auto_find_batch_size" not in str(caught.value)


# ---- models on meta ----


def test_a_model_on_meta_is_read_from_its_files(gpt2: Make, fresh_disk: Path) -> None:
    source = gpt2()
    source.save_pretrained(fresh_disk / "source")

    def scenario(ours: bool) -> dict[str, Any]:
        given: dict[str, Any] = {}
        model = gpt2()
        if ours:
            with torch.device("meta"):
                model = type(source)(source.config)
            disk = fresh_disk / "disk"
            disk.mkdir()
            given["protrain"] = {"memory": MEMORY, "disk": str(disk), "weights": str(fresh_disk / "source")}
        kind = ProTrainTrainer if ours else transformers.Trainer
        args = arguments(fresh_disk / str(ours), save_strategy="steps", save_steps=2)
        trainer = kind(model=model, args=args, train_dataset=rows(24), eval_dataset=rows(5, seed=2), **given)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        if ours:
            with torch.device("meta"):
                again = type(source)(source.config)
            resumed = kind(model=again, args=args, train_dataset=rows(24), eval_dataset=rows(5, seed=2), **given)
            resumed.train(resume_from_checkpoint=str(fresh_disk / "True" / "checkpoint-2"))
            assert weights(resumed.model) == weights(trainer.model)
            protrain.unwrap(resumed.model)
        return finish(trainer, before)

    assert_twins(scenario)


def test_a_model_on_meta_that_is_made_anew_is_not_that_of_an_earlier_checkpoint(gpt2: Make, fresh_disk: Path) -> None:
    source = gpt2()

    def meta() -> Any:
        with torch.device("meta"):
            return type(source)(source.config)

    @torch.no_grad()
    def fill(module: torch.nn.Module) -> None:
        for p in module.parameters(recurse=False):
            p.fill_(0.01)

    args = arguments(fresh_disk / "out", save_strategy="steps", save_steps=1, max_steps=2)
    given = {"memory": MEMORY, "disk": str(fresh_disk), "param_init_fn": fill}
    trainer = ProTrainTrainer(model_init=meta, args=args, train_dataset=rows(24), protrain=given)
    found = []
    for checkpoint in (None, str(fresh_disk / "out" / "checkpoint-1"), None):
        trainer.train(resume_from_checkpoint=checkpoint)
        found.append(weights(trainer.model))
    assert found[0] == found[1] == found[2]
    protrain.unwrap(trainer.model)


# ---- adapters ----


def test_adapters_are_trained_saved_and_resumed(gpt2: Make, fresh_disk: Path) -> None:
    peft = pytest.importorskip("peft")

    def make() -> Any:
        model = gpt2()
        torch.manual_seed(2)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.1))

    def scenario(ours: bool) -> dict[str, Any]:
        folder = fresh_disk / str(ours)
        changes: dict[str, Any] = {
            "max_steps": 4, "learning_rate": 0.1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
            "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss",
        }  # fmt: skip
        trainer = trainer_of(folder, make(), ours, data=rows(24, length=64), memory=8 * MIB, **changes)
        trainer.train()
        again = trainer_of(folder / "again", make(), ours, data=rows(24, length=64), memory=9 * MIB, **changes)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        last = {path.name: path.read_bytes() for path in (folder / "checkpoint-4").glob("adapter_model*")}
        assert last == {path.name: path.read_bytes() for path in (folder / "again" / "checkpoint-4").glob("adapter_model*")}
        assert last
        if ours:
            protrain.unwrap(again.model)
        return finish(trainer, last)

    assert_twins(scenario, 8 * MIB, disk=False)


# ---- what is refused, what is said ----


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"memroy": MEMORY}, TypeError, r"unknown key 'memroy'; did you mean 'memory'\? allowed are memory, "),
        ({"colour": 1}, TypeError, r"unknown key 'colour'; allowed are"),
        ({"accumulate": 2}, TypeError, r"'accumulate' comes from TrainingArguments; set gradient_accumulation_steps there"),
        ({"max_grad_norm": 1.0}, TypeError, r"set max_grad_norm there"),
        ({"memory": "lots"}, ValueError, "memory"),
        ("4GiB", TypeError, "protrain is '4GiB'; give a dict"),
    ],
)
def test_words_of_the_dict(gpt2: Make, fresh_disk: Path, given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ProTrainTrainer(model=gpt2(), args=arguments(fresh_disk), train_dataset=rows(4), protrain=given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fp16": True}, "fp16=True is not supported"),
        ({"torch_compile": True}, "torch_compile=True is not supported"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True is not supported"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(
    gpt2: Make, fresh_disk: Path, changes: dict[str, Any], words: str
) -> None:
    args = arguments(fresh_disk)
    for name, value in changes.items():  # set afterwards: some of them are refused by TrainingArguments itself on some machines
        setattr(args, name, value)
    with pytest.raises(protrain.PlanError, match=words):
        ProTrainTrainer(model=gpt2(), args=args, train_dataset=rows(4), protrain={"memory": MEMORY})


def test_an_optimizer_that_cannot_work_is_refused_by_name(gpt2: Make, fresh_disk: Path) -> None:
    model = gpt2()
    trainer = trainer_of(fresh_disk, model, True, given={"optimizers": (torch.optim.LBFGS(model.parameters()), None)})
    with pytest.raises(protrain.PlanError, match="optimizer is LBFGS"):
        trainer.train()


@pytest.mark.parametrize("optim", ["rmsprop", "adafactor"])
def test_optimizers_without_a_kernel(gpt2: Make, fresh_disk: Path, optim: str) -> None:
    def scenario(ours: bool) -> dict[str, Any]:
        trainer = trainer_of(fresh_disk / str(ours), gpt2(), ours, optim=optim)
        trainer.train()
        return finish(trainer)

    assert_twins(scenario)


def test_bf16_is_wraps_own(gpt2: Make, fresh_disk: Path) -> None:
    """The Trainer's is autocast over fp32 parameters: close, not equal."""
    losses = {}
    for ours in (False, True):
        trainer = trainer_of(fresh_disk / str(ours), gpt2(), ours, bf16=True)
        trainer.train()
        losses[ours] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        dtypes = {p.dtype for p in trainer.model.parameters()}
        assert dtypes == {torch.bfloat16 if ours else torch.float32}
    assert losses[True] == pytest.approx(losses[False], rel=1e-2)


@pytest.mark.parametrize("how", ["argument", "model"])
def test_gradient_checkpointing_is_taken_over(gpt2: Make, fresh_disk: Path, how: str) -> None:
    def scenario(ours: bool) -> dict[str, Any]:
        model = gpt2()
        changes = {}
        if how == "model":
            model.activation_checkpointing_enable()
        else:
            changes["gradient_checkpointing"] = True
        trainer = trainer_of(fresh_disk / str(ours), model, ours, **changes)
        if not ours:
            trainer.train()
            return finish(trainer)
        with pytest.warns(UserWarning, match="gradient_checkpointing is taken over by protrain"):
            trainer.train()
        assert not model.is_activation_checkpointing
        return finish(trainer)

    assert_twins(scenario)


class Reducing:
    """A subclass's prediction_step, as to save memory."""

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(*args, **kwargs)  # type: ignore[misc]
        return loss, logits.argmax(-1), labels


class PlainReducing(Reducing, transformers.Trainer):
    pass


class OurReducing(Reducing, ProTrainTrainer):
    pass


def test_what_a_subclass_makes_of_a_prediction_is_made_once(
    gpt2: Make, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the batch was refused at first, and there was room for it the second time."""
    refused = []

    def once(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, ProTrainTrainer) and not refused:
            refused.append(type(inputs))
            raise protrain.BudgetError("memory: refused", needed_bytes=2, budget_bytes=1, smallest_bytes=2)
        return real(self, model, inputs, *args, **kwargs)

    real = transformers.Trainer.prediction_step
    monkeypatch.setattr(transformers.Trainer, "prediction_step", once)
    found = []
    for ours in (False, True):
        trainer = trainer_of(fresh_disk / str(ours), gpt2(), ours, kinds=(PlainReducing, OurReducing))
        trainer.train()
        found.append(
            trainer.predict([{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows(4, seed=9)]).predictions
        )
    assert refused
    assert found[0].shape == found[1].shape
    assert (found[0] == found[1]).all()


def test_an_evaluation_gets_what_the_collator_made(gpt2: Make, fresh_disk: Path) -> None:
    """An object by whose attributes compute_loss may ask."""

    class Asking(ProTrainTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(inputs.input_ids.shape)
            return super().compute_loss(model, inputs, *args, **kwargs)

    def collate(found: Rows) -> Any:
        return transformers.BatchEncoding({key: torch.stack([row[key] for row in found]) for key in found[0]})

    seen: list[Any] = []
    trainer = trainer_of(
        fresh_disk / "asking", gpt2(), True, kinds=(transformers.Trainer, Asking), given={"data_collator": collate}
    )
    trainer.train()
    n_trained = len(seen)
    trainer.evaluate(rows(2, seed=9))
    assert len(seen) > n_trained > 0


def test_an_optimizer_that_another_trainer_was_given_is_not_begun_anew(gpt2: Make, fresh_disk: Path) -> None:
    model = gpt2()
    given = adamw(model)
    first = trainer_of(fresh_disk / "first", model, True, given={"optimizers": (given, None)})
    first.train()
    second = trainer_of(fresh_disk / "second", model, True, given={"optimizers": (given, None)})
    with pytest.raises(protrain.PlanError, match="wrapped with this very optimizer"):
        second.train()
    for given in (first.optimizer, first.optimizer.optimizer):  # as its Trainer has it, and as wrap made it
        third = trainer_of(fresh_disk / "third", model, True, memory=2 * MEMORY, given={"optimizers": (given, None)})
        with pytest.warns(UserWarning, match="memory, disk of this Trainer has no effect"):
            third.train()
        assert all(row["grad_norm"] > 0 for row in history(third) if "loss" in row)
    assert protrain.status(model).steps == 9
    first.train()  # with what it wrapped the model with: no warning
    assert all(row["grad_norm"] > 0 for row in history(first) if "loss" in row)
    protrain.unwrap(model)


def test_arguments_may_be_those_of_a_plain_trainer_too(gpt2: Make, fresh_disk: Path) -> None:
    """One object for both: accelerate's own state is shared in a process. And a model that was unwrapped is not taken for one
    that accelerate has prepared: it gets its autocast."""
    args = arguments(fresh_disk, bf16=True, max_steps=2)
    seen = []
    for turn in range(3):
        model = gpt2()
        if turn == 1:
            ours = trainer_of(fresh_disk, model, True, args=args)
            ours.train()
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            protrain.unwrap(model)
            model = model.float()
            model.load_state_dict(gpt2().state_dict())
        plain = trainer_of(fresh_disk, model, False, args=args)
        plain.train()
        seen.append(history(plain))
    assert seen[0] == seen[1] == seen[2]


def test_resuming_reads_each_array_once(gpt2: Make, fresh_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(fresh_disk, gpt2(), True, save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    read, asked = torchfiles._File.read, collections.Counter[int]()

    def count(self: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            asked[id(value)] += 1
        return read(self, value)

    monkeypatch.setattr(torchfiles._File, "read", count)
    again = trainer_of(fresh_disk, gpt2(), True, max_steps=3)
    again.train(resume_from_checkpoint=True)
    assert len(asked) >= 2 * len(list(again.model.parameters()))
    assert set(asked.values()) == {1}


class StopsInside(transformers.TrainerCallback):
    """In the middle of a step, of the first training alone."""

    stopped = False

    def on_substep_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.stopped and state.global_step == 2:
            self.stopped = control.should_training_stop = True


def test_a_training_that_was_stopped_inside_of_a_step_is_resumed(gpt2: Make, fresh_disk: Path) -> None:
    trainer = trainer_of(
        fresh_disk / "stopped", gpt2(), True, data=rows(24), given={"callbacks": [StopsInside()]}, gradient_accumulation_steps=2,
        save_strategy="steps", save_steps=1, max_steps=4,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
