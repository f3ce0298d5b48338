"""transformers' Trainer inside a memory budget.

    from protrain.integrations.transformers import ProTrainTrainer

    trainer = ProTrainTrainer(model, args, train_dataset=rows, protrain=dict(memory="4GiB"))
    trainer.train()

It is the Trainer in all but where the training state lies: fit, accumulate, clip, evaluate, predict, callbacks, logs, saving
and resuming give what the plain Trainer gives, bit for bit. Checkpoints are the plain Trainer's too, in both directions.

The model is wrapped when its optimizer is made, at the start of `train()`, and stays so: `protrain.status(trainer.model)`
tells what happened, `protrain.unwrap(trainer.model)` makes it an ordinary model again. The other places where this Trainer
differs are those at which the plain one looks at gradients, moves the model, or has a full copy of it in memory.

For other Trainers, such as TRL's: `class ProTrainSFTTrainer(ProTrainMixin, SFTTrainer)`.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import has_length
from transformers.utils import logging

from .. import _core, api
from ..base.counting import uncounted
from ..device.compute import Compute
from ..errors import BudgetError, Error, PlanError
from ..optim.optimizers import Attribute, Optimizer
from ..session import Session
from ..state import torchfiles
from .training_arguments import check_arguments, takes_bf16, wrap_options
from .weights import adapter_state, has_adapters, has_original_form, write_weights

logger = logging.get_logger(__name__)

#: What accelerate knows a model or an optimizer by that it has prepared.
PREPARED = "_is_accelerate_prepared"

#: What a Trainer wrapped a model with.
_options_of: weakref.WeakKeyDictionary[Session, dict[str, Any]] = weakref.WeakKeyDictionary()


class ProTrainMixin:
    """Makes the Trainer that follows it in a class's bases train inside a budget.

    Args:
        protrain: protrain.wrap's arguments, all but accumulate and max_grad_norm, which are the TrainingArguments'
            gradient_accumulation_steps and max_grad_norm. None: wrap's own defaults.

    Raises:
        TypeError: protrain has an unknown key; it is named.
        PlanError: an argument of the Trainer cannot work here; it is named.
        BudgetError: from `train()`, as from `wrap` and the first step of a wrapped model.
    """

    # Of the Trainer that this is mixed into.
    accelerator: Any
    args: Any
    eval_dataset: Any
    lr_scheduler: Any
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, protrain: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._protrain = wrap_options(protrain)
        given = next((a for a in (*args, *kwargs.values()) if isinstance(a, TrainingArguments)), None)
        if given is not None:
            check_arguments(given, self._protrain)
        self._protrain_norm = torch.zeros(())  # of the step under way, known when the optimizer has made it
        self._protrain_told = False  # whether evaluations will fit
        self._protrain_refused: BudgetError | None = None
        self._protrain_weights: str | None = None
        self._protrain_optimizer: Callable[[], Optimizer | None] = lambda: None  # the one that tells this Trainer its norms
        super().__init__(*args, **kwargs)
        if given is None:
            check_arguments(self.args, self._protrain)

    # ---- wrapping ----

    def _protrain_session(self) -> Session | None:
        """The model's session, where this Trainer's optimizer is the one that goes with it."""
        session = api.find_session(self.model)
        inner = _innermost(self.optimizer)
        return session if isinstance(inner, Optimizer) and inner._session is session and session is not None else None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the model is wrapped with it."""
        if self._protrain_session() is None:
            inner = _innermost(self.optimizer)
            if isinstance(inner, Optimizer) and inner._session is not None:
                raise PlanError(
                    "the model was unwrapped and its optimizer state is gone; set trainer.optimizer = None for a fresh optimizer"
                )
            self._protrain_unwrap()  # another Trainer trained it
        super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        self._protrain_wrap()
        return self.optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, which asks for it when there is an optimizer: one by a create_optimizer that overrides ours, too."""
        if training and self.optimizer is not None:
            self._protrain_wrap()
        return super()._wrap_model(model, training, *args, **kwargs)  # type: ignore[misc]

    def _protrain_unwrap(self) -> None:
        """A model that was wrapped with another optimizer is an ordinary one again.

        Raises:
            PlanError: it was wrapped with this very one, whose state would be gone.
        """
        session, inner = api.find_session(self.model), _innermost(self.optimizer)
        if session is None:
            return
        if inner is not None and session.wrapped.groups is inner.param_groups:
            raise PlanError(
                "optimizers: the model is wrapped with this very optimizer, by another Trainer, say, and its state is in the one "
                "that wrap made of it: pass that one on, optimizers=(other.optimizer, None), or a fresh one"
            )
        api.unwrap(self.model)

    def _protrain_wrap(self) -> None:
        accumulate = self.args.gradient_accumulation_steps
        norm = float(self.args.max_grad_norm or 0.0)
        norm = norm if norm > 0 else float("inf")  # the norm is logged all the same
        session, inner = self._protrain_session(), _innermost(self.optimizer)
        if session is not None:
            if (session.wrapped.settings.accumulate, session.wrapped.settings.max_grad_norm) != (accumulate, norm):
                session.change_step(accumulate, norm)
            if self._protrain_optimizer() is not inner:
                self._protrain_warn_of_options(session)
                self._protrain_prepare(session, inner)
            return
        self._protrain_unwrap()  # it may have an optimizer that another has taken the place of
        asked = self._protrain_options()
        options = dict(asked)
        if takes_bf16(self.args):
            logger.warning("bf16 is taken over by protrain: bf16 parameters and gradients, and an fp32 master of each parameter")
        if self._protrain_weights is not None:
            options.pop("param_init_fn", None)
            options["weights"] = self._protrain_weights
        device = self.args.device
        with nullcontext() if device.type == "cpu" else device:
            model, wrapped = api.wrap(self.model, inner, accumulate=accumulate, max_grad_norm=norm, **options)
        session = api.find_session(model)
        assert session is not None
        _options_of[session] = asked
        self._protrain_prepare(session, wrapped)

    def _protrain_options(self) -> dict[str, Any]:
        """What this Trainer asks of wrap, as far as it may differ from one to another for the same model."""
        precision = {"precision": "bf16"} if takes_bf16(self.args) else {}
        return self._protrain | precision

    def _protrain_warn_of_options(self, session: Session) -> None:
        """The model is wrapped already, by a Trainer or by the user: what this one asks for beyond that is not done."""
        before, given = _options_of.get(session, {}), self._protrain_options()
        differ = [name for name, value in given.items() if name not in before or before[name] != value]
        if differ:
            warnings.warn(
                f"protrain: {', '.join(differ)} of this Trainer has no effect: its optimizer is of a model that is wrapped "
                "already, as it is to stay; give what it was wrapped with, or unwrap the model and pass a fresh optimizer",
                stacklevel=2,
            )

    def _protrain_prepare(self, session: Session, wrapped: Optimizer) -> None:
        """Model and optimizer are ready for this Trainer, which is told the norm of each step.

        Prepared by hand: accelerate would copy the optimizer's state, and move a model that has no place of its own.
        """
        trainer = weakref.ref(self)  # the optimizer may outlive it

        def after_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            found = trainer()
            if found is not None and wrapped.grad_norm is not None:
                found._protrain_norm.copy_(wrapped.grad_norm)

        wrapped.register_step_post_hook(after_step)
        self._protrain_optimizer = weakref.ref(wrapped)
        self.optimizer = self.accelerator.prepare_optimizer(wrapped, device_placement=False)
        setattr(self.optimizer, PREPARED, True)
        model = session.wrapped.model
        if not getattr(model, PREPARED, False):
            setattr(model, PREPARED, True)
            session.hooks.keep(Attribute(model, PREPARED))  # another Trainer prepares it anew, once it is unwrapped

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the model that was trained before becomes an ordinary one."""
        model: Any = getattr(self, "model", None)
        if api.find_session(model) is not None:
            api.unwrap(model)
        return super().call_model_init(*args, **kwargs)  # type: ignore[misc]

    def create_accelerator_and_postprocess(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, but without autocast: parameters have their precision by wrap."""
        super().create_accelerator_and_postprocess(*args, **kwargs)  # type: ignore[misc]
        self.accelerator.native_amp = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """As the Trainer's, but for a model that wrap takes to its device, chunk by chunk: one that need not fit there."""
        if api.find_session(model) is None and not _is_taken_by_wrap(model, device):
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    # ---- training ----

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's.

        Raises:
            BudgetError: the states, or a step of one batch, do not fit protrain's memory.
        """
        self._protrain_refused, self._protrain_told = None, False
        self._protrain_weights = None  # a model that was made anew is not that of an earlier checkpoint
        self._protrain_drop_step()  # one that the last training was stopped in
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            with suppress(Error):  # what came first is to be told
                self._protrain_drop_step()
            refused = self._protrain_refused
            if not isinstance(error, RuntimeError) or refused is None or self._protrain_batch > 1:
                raise
        finally:
            self._protrain_stop_counting()
        raise BudgetError(
            f"auto_find_batch_size: not even a batch of 1 fits: {refused}",
            needed_bytes=refused.needed_bytes, budget_bytes=refused.budget_bytes, smallest_bytes=refused.smallest_bytes,
        )  # fmt: skip

    def _protrain_drop_step(self) -> None:
        """A step that was begun and will not be made, as the Trainer drops its gradients, but before values are loaded."""
        session = self._protrain_session()
        if session is not None:
            session.zero_grad()

    def _protrain_stop_counting(self) -> None:
        """What a user makes after training, such as the next model, does not count in this one's budget."""
        _core.swap_account(None)
        session = api.find_session(self.model)
        if session is not None and session.wrapped.compute.counts():
            session.wrapped.compute.count(session.engine, False)

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        self._protrain_batch = batch_size or 0
        if self._protrain_refused is not None:
            logger.warning(f"auto_find_batch_size: the batch did not fit protrain's memory; trying {batch_size}")
            self._protrain_refused = None  # what stops this one may be something else
        self._protrain_drop_step()
        self._protrain_take_over_checkpointing()
        return super()._inner_training_loop(batch_size, *args, **kwargs)  # type: ignore[misc]

    def _protrain_take_over_checkpointing(self) -> None:
        """Each block's mode decides what is recomputed: the model's own checkpointing inside of it would recompute twice."""
        asked = getattr(self.args, "activation_checkpointing", False) or self.args.gradient_checkpointing
        if not asked and not any(getattr(module, "gradient_checkpointing", False) is True for module in self.model.modules()):
            return
        warnings.warn(
            "gradient_checkpointing is taken over by protrain: its plan decides which blocks are recomputed "
            "(protrain=dict(block_modes=...) overrides it)",
            stacklevel=2,
        )
        for name in ("activation_checkpointing_disable", "gradient_checkpointing_disable"):
            if hasattr(self.model, name):
                getattr(self.model, name)()
                return

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the Trainer's; a batch that does not fit counts as out of memory where auto_find_batch_size looks for one."""
        if not self._protrain_told:
            self._protrain_told = True
            self._protrain_foresee_evaluation(inputs)
        try:
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            return loss
        except BudgetError as error:
            if not self.args.auto_find_batch_size:
                raise
            self._protrain_refused = BudgetError(
                str(error), needed_bytes=error.needed_bytes, budget_bytes=error.budget_bytes, smallest_bytes=error.smallest_bytes
            )
        gc.collect()  # what the batch left must not be in the way of a smaller one
        raise RuntimeError(f"a training step is out of memory. {self._protrain_refused}")  # the words that accelerate looks for

    def _protrain_foresee_evaluation(self, inputs: Any) -> None:
        """Warn of evaluations that will not fit, before training rather than after an epoch of it."""
        session, n_rows = self._protrain_session(), _most_rows(self.eval_dataset, self.args.eval_batch_size)
        if session is None or self.args.eval_strategy == "no" or not isinstance(inputs, Mapping) or n_rows == 0:
            return
        rows = next((len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim() > 0), 0)

        def with_rows(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or len(tensor) != rows:
                return tensor
            return torch.empty((n_rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

        try:
            session.evaluation.check((), tree_map_only(torch.Tensor, with_rows, dict(inputs)))
        except BudgetError as error:
            warnings.warn(
                f"protrain: evaluating {n_rows} rows as long as those of training will fail: {error}, or give a smaller "
                "per_device_eval_batch_size",
                stacklevel=2,
            )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. All batches of a step come at once: they are the loader's, and count in no budget. What the end of a
        stream has left of a step, whose length the Trainer does not know, counts in the next one."""
        session = self._protrain_session()
        if session is not None:
            session.lengthen_step()
        with uncounted():
            return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]

    # Gradients have left memory when the Trainer asks for their norm: the optimizer clips, and tells the norm after its step.

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self._protrain_session() is None:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        with uncounted():
            self._protrain_norm = torch.zeros(())
        return self._protrain_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self._protrain_session() is None:
            return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    # ---- evaluating ----

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a model that wrap takes to its device gets its values, or its place there, first."""
        if api.find_session(self.model) is None and _is_taken_by_wrap(self.model, self.args.device):
            self.create_optimizer()
        try:
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            session = api.find_session(self.model)
            if session is not None:
                session.end_evaluation()

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. What is collected from it is the user's: it does not count in the budget.

        Raises:
            BudgetError: the batch does not fit, not even with all states away.
        """
        session = api.find_session(self.model)
        compute = session.wrapped.compute if session is not None else Compute()
        with uncounted():
            random_state = compute.random_state()
        kind: Any = type(inputs)
        given = kind(dict(inputs)) if isinstance(inputs, Mapping) else inputs  # as the Trainer makes it anew
        try:
            found = super().prediction_step(model, given, *args, **kwargs)  # type: ignore[misc]
        except BudgetError as error:
            refused = str(error), error.needed_bytes, error.budget_bytes, error.smallest_bytes
            found = None
        if found is None:  # it could not be foreseen, as where text is generated: room is made until the evaluation ends
            if session is None or not session.leave_room():
                raise BudgetError(
                    f"evaluating: {refused[0]} (per_device_eval_batch_size)",
                    needed_bytes=refused[1], budget_bytes=refused[2], smallest_bytes=refused[3],
                )  # fmt: skip
            compute.set_random_state(random_state)
            return ProTrainMixin.prediction_step(self, model, inputs, *args, **kwargs)  # not what a subclass makes of it
        with uncounted():
            return tree_map_only(torch.Tensor, torch.Tensor.clone, found)

    # ---- saving and loading ----

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        session = api.find_session(self.model)
        if session is None or state_dict is not None or not self.args.should_save:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
        elif has_adapters(self.model):
            super()._save(output_dir, adapter_state(session))  # type: ignore[misc]
        elif not has_original_form(self.model):
            super()._save(output_dir)  # type: ignore[misc]
        else:
            super()._save(output_dir, {})  # type: ignore[misc]
            write_weights(session, Path(output_dir if output_dir is not None else self.args.output_dir))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        session = self._protrain_session()
        if session is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        session.values.loads.check("saving")
        entries, value = session.layout.entries, session.values.get
        state = session.states.optimizer(
            lambda n, array: torchfiles.described(tuple(entries[n].shape), entries[n].strides, lambda: value(n, array))
        )
        torchfiles.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
        torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if any(p.device.type == "meta" for p in self.model.parameters()):
            self._protrain_weights = resume_from_checkpoint  # wrap reads them
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        self._protrain_drop_step()
        super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path, schedule = (os.path.join(checkpoint, name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if self._protrain_session() is None or not os.path.isfile(path) or not os.path.isfile(schedule):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self.optimizer.load_state_dict(torchfiles.load_optimizer(path))  # tensor by tensor goes to its home
        self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))


def _innermost(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _is_taken_by_wrap(model: nn.Module, device: torch.device) -> bool:
    """Whether its values come with wrap: it is on meta, or computes on a device that is not where all of it is."""
    places = {p.device.type for p in model.parameters()}
    return "meta" in places or (device.type != "cpu" and places == {"cpu"})


def _most_rows(datasets: Any, batch_size: int) -> int:
    """Of the largest batch of an evaluation: no more than its dataset has, where that is known; of several, by name, of any."""
    found = list(datasets.values()) if isinstance(datasets, dict) else [datasets]
    return max((min(batch_size, len(one)) if has_length(one) else batch_size for one in found), default=batch_size)


class ProTrainTrainer(ProTrainMixin, Trainer):
    """transformers' Trainer with one more argument, protrain=dict(memory=...)."""


class ProTrainSeq2SeqTrainer(ProTrainMixin, Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer, which evaluates by generating, with protrain=dict(memory=...)."""
