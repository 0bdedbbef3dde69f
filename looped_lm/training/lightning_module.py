"""LoopedLM: the Lightning module around a looped transformer. Loss, logging, optimizer; no maths of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from looped_lm.common.errors import UserError
from looped_lm.common.text import say
from looped_lm.loop.component import Spec, as_factory, as_instance, callable_spec, component_spec
from looped_lm.loop.recurrences import FixedRecurrences, RecurrenceSampler, checked_count, drawn
from looped_lm.model import accounting
from looped_lm.model.compilation import compile_in_place
from looped_lm.model.transformer import LoopedTransformer
from looped_lm.runs.checkpoint import compare_tensors, refuse_weights_alone
from looped_lm.runs.checkpoint_io import MICRO_BATCHES, realign
from looped_lm.runs.lightning_internals import is_attached
from looped_lm.seams import SEAMS, specs
from looped_lm.training.devices import keeps_embedding_in_bf16
from looped_lm.training.metrics import TokenLoss
from looped_lm.training.optim import MuonH
from looped_lm.training.resume import VALIDATED_AT, DueValidation, changed_recipe, use_own_recipe
from looped_lm.training.schedules import Horizon, HyperP, LinearSchedule, Plan, RunSize
from looped_lm.training.trainer_settings import Derived, derive

Batch = tuple[Tensor, Tensor]


class LoopedLM(L.LightningModule):
    """A looped transformer and the recipe that trains it.

    Batches are int64 `(inputs, targets)`, each (B,T). The Trainer's steps, accumulation and validation interval follow
    from `horizon`, `batch_tokens` and `val_every_steps`.

    Args:
        vocab_size: number of tokens; from the data on the command line.
        seq_len: tokens of context T; from the data on the command line.
        horizon: how long to train.
        batch_tokens: tokens of one optimizer step over all devices; gradient accumulation follows from it.
        transfer: learning rates per role.
        schedule: learning-rate multiplier over the steps.
        optimizer: factory of the optimizer from parameter groups that carry `role` and `lr`.
        recurrences: factory `num_recurrences -> RecurrenceSampler` of the counts that training steps run, or class_path
            and init_args.
        val_every_steps: optimizer steps between validations; None validates at the end only.
        eval_recurrences: recurrences of validate, test and predict; None: the model's `num_recurrences`, which a fit
            always validates with.
        compile_layers: compile the layers (torch.compile): the first step takes a minute or so, later ones are faster.
        architecture: arguments of LoopedTransformer.

    Raises:
        UserError: a size, horizon or combination of components that cannot train.
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        horizon: Horizon,
        batch_tokens: int = 2**18,
        transfer: HyperP | None = None,
        schedule: LinearSchedule | None = None,
        optimizer: Callable[[Iterable], Optimizer] = MuonH,
        recurrences: Callable[[int], RecurrenceSampler] = FixedRecurrences,
        val_every_steps: int | None = None,
        eval_recurrences: int | None = None,
        compile_layers: bool = False,
        **architecture: Any,
    ) -> None:
        super().__init__()
        if batch_tokens < 1:
            raise UserError(f"batch_tokens is {batch_tokens}; it must be at least 1.")
        if val_every_steps is not None and val_every_steps < 1:
            raise UserError(f"val_every_steps is {val_every_steps}; it must be at least 1, or null.")
        self.model = LoopedTransformer(vocab_size, seq_len, **architecture)
        self.seq_len, self.batch_tokens, self.val_every_steps = seq_len, batch_tokens, val_every_steps
        self.compile_layers = compile_layers
        self.horizon: Horizon = as_instance(horizon)
        self.transfer: HyperP = HyperP() if transfer is None else as_instance(transfer)
        self.schedule: LinearSchedule = LinearSchedule() if schedule is None else as_instance(schedule)
        self.optimizer_factory = as_factory(optimizer)
        self.sections = accounting.count_parameters(self.model)
        r = self.model.num_recurrences
        self.recurrences: RecurrenceSampler = SEAMS["recurrences"].build(recurrences, {"num_recurrences": r})
        self._flops_at: dict[int, float] = {}
        self.plan: Plan = self.horizon.plan(
            RunSize(
                accounting.flops_per_token(self.model, seq_len),
                batch_tokens,
                self.sections.n_once,
                self.sections.n_rec,
                r,
                self.step_flops if self.recurrences.varies else None,
            )
        )
        #: How many of the planned steps run each count of recurrences.
        self.drawn = drawn(self.recurrences, self.plan.steps)
        self.model.refuse_untrainable(self.drawn)
        #: Training FLOPs per token F in the convention `paper`, the mean over the planned steps.
        self.flops_per_token = accounting.mean_flops_per_token(self.model, seq_len, self.drawn)
        #: Recurrences that evaluation runs.
        self.eval_recurrences = r if eval_recurrences is None else eval_recurrences
        self.model.check_recurrences(self.eval_recurrences)
        #: Name, seed and resolved configuration of the run; set by the command line.
        self.provenance: dict[str, Any] = {}
        #: Loss (nats/token) and tokens of the last evaluation, unrounded.
        self.evaluated: tuple[float, int] | None = None
        self.val_loss = TokenLoss()
        self.due_validation = DueValidation()
        #: Sums over the step's tokens of the objective's total and terms, by their name as metric.
        self._step_sums: dict[str, Tensor] = {}
        self._step_tokens = 0
        self._stop_requested = False
        self._derived = Derived()
        # Plain data that rebuilds this object, with every default written out.
        self.save_hyperparameters(
            {
                **self.model.architecture(),
                "batch_tokens": batch_tokens,
                "val_every_steps": val_every_steps,
                "compile_layers": compile_layers,
                **self.component_specs(),
            }
        )

    def component_specs(self) -> dict[str, Spec]:
        """`{"class_path", "init_args"}` of every component, by its key."""
        return {
            **specs(self.model),
            **specs(self, of_training=True),
            "optimizer": callable_spec(self.optimizer_factory, "optimizer"),
            **{name: component_spec(getattr(self, name)) for name in ("horizon", "transfer", "schedule")},
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B,T,V) of int64 tokens (B,T), with `eval_recurrences`."""
        return self.model(tokens, num_recurrences=self.eval_recurrences)

    def loss(self, batch: Batch, num_recurrences: int | None = None) -> Tensor:
        """The total that training minimises; `num_recurrences` None: the model's own count."""
        inputs, targets = batch
        return self.model(inputs, targets, num_recurrences)

    def step_recurrences(self, step: int) -> int:
        """Recurrences of optimizer step t = 0, 1, ..."""
        return checked_count(self.recurrences, step)

    def step_flops(self, step: int) -> float:
        """Training FLOPs of optimizer step t = 0, 1, ..., convention `paper`."""
        r = self.step_recurrences(step)
        if r not in self._flops_at:
            flops = accounting.flops_per_token(self.model, self.seq_len, num_recurrences=r)
            self._flops_at[r] = flops * self.batch_tokens
        return self._flops_at[r]

    def setup(self, stage: str) -> None:
        device = self.trainer.strategy.root_device
        if self.compile_layers:
            problem = compile_in_place(self.model, device)
            if problem:
                say(self.trainer, f"compile_layers has no effect here; layers run uncompiled: {problem}")
        if keeps_embedding_in_bf16(device, self.trainer.precision):
            self.model.embedding.to(torch.bfloat16)
        start, bos = self.model.document_start, getattr(self.trainer.datamodule, "bos_id", None)  # type: ignore[attr-defined]
        if None not in (start, bos) and start != bos:
            raise UserError(
                f"document_start is {start}, but documents of this data begin with the id {bos}, BOS of its tokenizer: "
                f"use --model.document_start {bos}, or null for rows as one context."
            )
        if stage == "fit":
            if self.eval_recurrences != self.model.num_recurrences:
                raise UserError(
                    f"eval_recurrences is {self.eval_recurrences}, but a run's loss is that of its own "
                    f"{self.model.num_recurrences} recurrences: leave it unset in fit, and set it in validate, test or "
                    "predict."
                )
            self._stop_requested = False
            self._step_sums, self._step_tokens = {}, 0
            self.val_loss.reset()
            self.due_validation = DueValidation()
            steps, every = self.plan.steps, self.val_every_steps
            self._derived = derive(self.trainer, steps, self.batch_tokens, self.seq_len, every, self._derived)

    def on_train_start(self) -> None:
        self.due_validation.make_up(self.trainer)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        count = self.step_recurrences(self.trainer.global_step)
        loss, terms = self.model.losses(*batch, count, self._numbers(len(batch[0]), batch_idx))
        for name, value in {"loss": loss, **terms}.items():
            summed = value.detach().double() * batch[1].numel()
            self._step_sums[name] = self._step_sums[name] + summed if name in self._step_sums else summed
        self._step_tokens += batch[1].numel()
        return loss

    def _numbers(self, rows: int, batch_idx: int) -> range:
        """Numbers of this micro-batch's rows among all of the run, in the order of `datamodules.EndlessBatches`."""
        trainer = self.trainer
        micro = (batch_idx % trainer.accumulate_grad_batches) * trainer.world_size + trainer.global_rank
        first = trainer.global_step * (self.batch_tokens // self.seq_len) + micro * rows
        return range(first, first + rows)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the step's loss over all its micro-batches and ranks, at logging steps only."""
        step = self.trainer.global_step + 1
        # The metric `step` is the x axis of loggers and names checkpoints; Lightning's own counter lags by one.
        # A tensor on the host: a number would be copied to the device at every step.
        self.log("step", torch.tensor(float(step), dtype=torch.float64))
        if self.logs_step(step) and self._step_sums:
            nats = self._step_sums["loss"]
            sums = torch.stack((*self._step_sums.values(), torch.full_like(nats, self._step_tokens)))
            *totals, tokens = self.trainer.strategy.reduce(sums, reduce_op="sum")
            means = {name: total / tokens for name, total in zip(self._step_sums, totals, strict=True)}
            # What is logged for a bar is fetched at every micro-batch; our bar fetches the losses itself.
            bar = self.trainer.progress_bar_callback
            tell = bar is not None and not getattr(bar, "fetches_losses", False)
            for name, mean in means.items():
                self.log(f"train/{name}", mean, prog_bar=tell and name == "loss")
            if self.recurrences.varies:
                # Losses of few and of many recurrences do not compare.
                count = self.step_recurrences(self.trainer.global_step)
                self.log("train/recurrences", torch.tensor(float(count), dtype=torch.float64))
        self._step_sums, self._step_tokens = {}, 0

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """A request to stop, whoever made it, takes effect at the end of the optimizer step."""
        trainer = self.trainer
        self._stop_requested |= trainer.should_stop
        trainer.should_stop = self._stop_requested and self.ends_step(batch_idx)

    def ends_step(self, batch_idx: int) -> bool:
        """Whether micro-batch `batch_idx` is the last of its optimizer step, as the last of an epoch always is."""
        trainer = self.trainer
        return (
            (batch_idx + 1) % trainer.accumulate_grad_batches == 0
            or trainer.is_last_batch
            or batch_idx + 1 == trainer.num_training_batches
        )

    def logs_step(self, step: int) -> bool:
        """Whether metrics of optimizer step `step`, counted from 1, reach the logger."""
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        last = self.trainer.max_steps
        return self.trainer.should_stop or 0 < last <= step or (every > 0 and step % every == 0)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_loss.update(self.model.cross_entropy(*batch, self.eval_recurrences), batch[1].numel())

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of every token (B,T) in nats."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).transpose(1, 2), targets, reduction="none")

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> None:
        loss, tokens = self.val_loss.compute()
        self.val_loss.reset()
        self.evaluated = (float(loss), int(tokens))
        self.log(f"{prefix}/loss", loss, prog_bar=True)
        self.log(f"{prefix}/perplexity", loss.exp())
        self.log(f"{prefix}/tokens", tokens)
        if self.trainer.state.fn == "fit":
            self.due_validation.validated_at = self.trainer.global_step
            self.log("step", float(self.trainer.global_step))
        else:
            self.log(f"{prefix}/recurrences", float(self.eval_recurrences))

    def learning_rates(self) -> dict[str, float]:
        """Initial learning rate of every role."""
        reference = accounting.reference_tokens(self.model.num_recurrences)
        return self.transfer.learning_rates(
            self.model.d_model, self.batch_tokens, self.plan.tokens, reference
        )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """One optimizer group per role: named parameters, `role` and `lr`."""
        roles = accounting.parameter_roles(self.model)
        rates = self.learning_rates()
        named: dict[str, list[tuple[str, Tensor]]] = {}
        for name, parameter in self.model.named_parameters():
            named.setdefault(roles[name], []).append((name, parameter))
        return [{"params": params, "role": role, "lr": rates[role]} for role, params in named.items()]

    def configure_optimizers(self) -> dict[str, Any]:  # type: ignore[override]
        optimizer = self.optimizer_factory(self.parameter_groups())
        # A plain function: of a method, the scheduler's state would hold the attributes.
        scheduler = LambdaLR(optimizer, lambda step: self._multiplier(step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _multiplier(self, step: int) -> float:
        """Multiplier of the learning rates after `step` optimizer steps."""
        return self.schedule.multiplier(min(step, self.plan.steps), self.plan.steps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[VALIDATED_AT] = self.due_validation.validated_at
        if is_attached(self):
            checkpoint[MICRO_BATCHES] = self.trainer.accumulate_grad_batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare the checkpoint with this module before a Trainer goes on from it.

        A changed recipe is reported and used: only the optimizer's state comes from the checkpoint.

        Raises:
            UserError: another architecture; in fit also another or no optimizer, or no step left.
        """
        # load_from_checkpoint takes the checkpoint's own hyperparameters, without a trainer.
        recipe = changed_recipe(checkpoint, dict(self.hparams)) if is_attached(self) else []
        compare_tensors(checkpoint["state_dict"], self.state_dict())
        if not is_attached(self) or self.trainer.state.fn != "fit":
            return
        if self.due_validation.nothing_left(checkpoint, self.plan.steps, same_recipe=not recipe):
            raise UserError(
                f"The checkpoint is at step {checkpoint['global_step']} of {self.plan.steps}: nothing is left to "
                "train. Raise model.horizon to go on."
            )
        refuse_weights_alone(checkpoint)
        self.due_validation.load(self.trainer, checkpoint)
        realign(checkpoint, self.trainer.accumulate_grad_batches, self.trainer.datamodule)  # type: ignore[attr-defined]
        if recipe:
            own = self.configure_optimizers()["optimizer"]
            multiplier = self._multiplier(checkpoint["global_step"])
            use_own_recipe(checkpoint, recipe, own, multiplier, self.trainer)
