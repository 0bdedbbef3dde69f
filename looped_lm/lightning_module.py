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

from looped_lm import accounting
from looped_lm.component import Spec, as_factory, as_instance, callable_spec, component_spec
from looped_lm.metrics import TokenLoss
from looped_lm.optim import MuonH
from looped_lm.schedules import Horizon, HyperP, LinearSchedule, Plan, RunSize, accumulation
from looped_lm.transformer import LoopedTransformer

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
        val_every_steps: optimizer steps between validations; None validates at the end only.
        architecture: arguments of LoopedTransformer.

    Raises:
        ValueError: a size, horizon or combination of components that cannot train.
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
        val_every_steps: int | None = None,
        **architecture: Any,
    ) -> None:
        super().__init__()
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens is {batch_tokens}; it must be at least 1.")
        if val_every_steps is not None and val_every_steps < 1:
            raise ValueError(
                f"val_every_steps is {val_every_steps}; it must be at least 1, or null for none."
            )
        self.model = LoopedTransformer(vocab_size, seq_len, **architecture)
        self.seq_len, self.batch_tokens, self.val_every_steps = seq_len, batch_tokens, val_every_steps
        self.horizon: Horizon = as_instance(horizon)
        self.transfer: HyperP = HyperP() if transfer is None else as_instance(transfer)
        self.schedule: LinearSchedule = LinearSchedule() if schedule is None else as_instance(schedule)
        self.optimizer_factory = as_factory(optimizer)
        self.sections = accounting.count_parameters(self.model)
        self.flops_per_token = accounting.flops_per_token(self.model, seq_len)
        self.plan: Plan = self.horizon.plan(
            RunSize(
                self.flops_per_token,
                batch_tokens,
                self.sections.n_once,
                self.sections.n_rec,
                self.model.num_recurrences,
            )
        )
        #: Where the run comes from (name, seed, resolved configuration); set by the command line for the run record.
        self.provenance: dict[str, Any] = {}
        self.val_loss = TokenLoss()
        self._step_nats: Tensor | None = None
        self._step_tokens = 0
        # Plain data that rebuilds this object, whether a parser or a caller in Python made the components.
        specs = {**architecture, **self.component_specs()}
        self.save_hyperparameters(
            dict(
                vocab_size=vocab_size,
                seq_len=seq_len,
                batch_tokens=batch_tokens,
                val_every_steps=val_every_steps,
                **specs,
            )
        )

    def component_specs(self) -> dict[str, Spec]:
        """`{"class_path", "init_args"}` of every component, by the name of its key."""
        return {
            "injection": component_spec(self.model.injection, sizes=1),
            "lanes": component_spec(self.model.lanes, sizes=2),
            "bptt": component_spec(self.model.bptt),
            "optimizer": callable_spec(self.optimizer_factory, "optimizer"),
            "horizon": component_spec(self.horizon),
            "transfer": component_spec(self.transfer),
            "schedule": component_spec(self.schedule),
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B,T,V) of int64 tokens (B,T)."""
        return self.model(tokens)

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross entropy in nats per token."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    # ---- Trainer settings that follow from the recipe -------------------------------------------------------------

    def setup(self, stage: str) -> None:
        if stage != "fit":
            return
        trainer = self.trainer
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, but accumulation follows from "
                f"model.batch_tokens ({self.batch_tokens:,}): leave it at 1 and set batch_tokens."
            )
        if trainer.val_check_interval != 1.0:
            raise ValueError(
                f"trainer.val_check_interval is {trainer.val_check_interval}, but the interval follows from "
                f"model.val_every_steps ({self.val_every_steps}), in optimizer steps: leave it unset."
            )
        rows = getattr(trainer.datamodule, "batch_size", None)  # type: ignore[attr-defined]
        if rows is None:
            raise ValueError(
                "The data module has no `batch_size` (rows per device), so batch_tokens cannot be met."
            )
        micro_batches = accumulation(self.batch_tokens, rows, self.seq_len, trainer.world_size)
        trainer.accumulate_grad_batches = micro_batches
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self.val_every_steps is not None:
            trainer.val_check_interval = self.val_every_steps * micro_batches
        elif trainer.check_val_every_n_epoch is None:
            # Validation at the end comes from the FinalValidation callback; no interval is longer than the run.
            trainer.val_check_interval = (self.plan.steps + 1) * micro_batches
        if trainer.max_steps == -1:
            trainer.fit_loop.epoch_loop.max_steps = self.plan.steps
        elif trainer.max_steps < self.plan.steps:
            self.print(
                f"trainer.max_steps stops this run after {trainer.max_steps} of the {self.plan.steps} steps that its "
                "horizon plans; the learning-rate schedule follows the plan."
            )
        else:
            raise ValueError(
                f"trainer.max_steps is {trainer.max_steps}, beyond the {self.plan.steps} steps that model.horizon "
                "plans: set model.horizon instead, for example looped_lm.Steps."
            )

    # ---- Training -----------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        nats = loss.detach().double() * batch[1].numel()
        self._step_nats = nats if self._step_nats is None else self._step_nats + nats
        self._step_tokens += batch[1].numel()
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the step's loss over all its micro-batches and ranks, at logging steps only."""
        step = self.trainer.global_step + 1
        # The metric `step` is the x axis of loggers and names checkpoints; Lightning's own counter lags by one.
        self.log("step", float(step))
        if self.logs_step(step) and self._step_nats is not None:
            sums = torch.stack((self._step_nats, torch.full_like(self._step_nats, self._step_tokens)))
            nats, tokens = self.trainer.strategy.reduce(sums, reduce_op="sum")
            self.log("train/loss", nats / tokens, prog_bar=True)
        self._step_nats, self._step_tokens = None, 0

    def logs_step(self, step: int) -> bool:
        """Whether metrics of optimizer step `step`, counted from 1, reach the logger."""
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        last = self.trainer.max_steps
        return self.trainer.should_stop or 0 < last <= step or (every > 0 and step % every == 0)

    # ---- Evaluation ---------------------------------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_loss.update(self.loss(batch), batch[1].numel())

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
        # float64, so that a stored loss and its reproduction compare bit by bit.
        self.log(f"{prefix}/loss", loss, prog_bar=True)
        self.log(f"{prefix}/perplexity", loss.exp())
        self.log(f"{prefix}/tokens", tokens)
        if self.trainer.training or self.trainer.validating:
            self.log("step", float(self.trainer.global_step))

    # ---- Optimizer ----------------------------------------------------------------------------------------------

    def learning_rates(self) -> dict[str, float]:
        """Initial learning rate of every role."""
        return self.transfer.learning_rates(
            self.model.d_model,
            self.batch_tokens,
            self.plan.tokens,
            accounting.reference_tokens(self.model.num_recurrences),
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
        steps = self.plan.steps
        scheduler = LambdaLR(optimizer, lambda step: self.schedule.multiplier(min(step, steps), steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another architecture with one message that names what differs."""
        ours, theirs = self.state_dict(), checkpoint["state_dict"]
        shapes = [
            f"{name}: {tuple(theirs[name].shape)} in the checkpoint, {tuple(ours[name].shape)} in the model"
            for name in sorted(ours.keys() & theirs.keys())
            if theirs[name].shape != ours[name].shape
        ]
        only = [f"{name}: only in the checkpoint" for name in sorted(theirs.keys() - ours.keys())]
        only += [f"{name}: only in the model" for name in sorted(ours.keys() - theirs.keys())]
        problems = shapes + only
        if problems:
            shown = "\n  ".join(
                problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else [])
            )
            raise ValueError(
                f"The checkpoint holds another architecture; {len(problems)} tensor(s) differ:\n  {shown}\n"
                "Use the configuration the checkpoint was trained with, or LoopedLM.load_from_checkpoint(path)."
            )
