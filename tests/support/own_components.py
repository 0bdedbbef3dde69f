"""Components, a sampler and an optimizer as a user writes them: one class each, named by its class path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from looped_lm import (
    BPTTStrategy,
    Injection,
    Lanes,
    LayerSizes,
    LoopContext,
    Objective,
    PreNormLayer,
    RecurrenceSampler,
    Residual,
)


class GatedInjection(Injection):
    """u = s + g ⊙ (W e): a matrix for MuonH and a vector for AdamW."""

    def __init__(self, d_model: int, gate: float = 1.0) -> None:
        super().__init__(d_model)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.gate = nn.Parameter(torch.full((d_model,), gate))

    def initial_state(self, e: Tensor) -> Tensor:
        return e

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return s + self.gate * self.proj(e)

    def flops_per_token(self) -> int:
        return 2 * (self.proj.weight.numel() + self.gate.numel())


class MeanLane(Lanes):
    """One state, averaged with the recurrence's output by a learned weight."""

    def __init__(self, d_model: int, num_recurrences: int, weight: float = 0.5) -> None:
        super().__init__(d_model, num_recurrences)
        self.weight = nn.Parameter(torch.tensor([[weight]]))

    def expand(self, s: Tensor) -> Tensor:
        return s

    def read(self, state: Tensor, i: int) -> Tensor:
        return state

    def write(self, state: Tensor, y: Tensor, i: int) -> Tensor:
        return (1 - self.weight) * state + self.weight * y

    def reduce(self, state: Tensor) -> Tensor:
        return state


class LastRecurrence(BPTTStrategy):
    """Gradients through the last recurrence alone."""

    def keeps_grad(self, i: int, num_recurrences: int) -> bool:
        return i == num_recurrences - 1


class SignDescent(torch.optim.Optimizer):
    """w <- w - lr·sign(g)."""

    def __init__(self, params: Any, lr: float = 1e-3, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"] * group["scale"])
        return loss


class LayerScale(Residual):
    """A user's own: x + g ⊙ branch, a gain per channel of each branch; starts with a matrix of its own, too."""

    def __init__(self, d_model: int, num_recurrences: int, start: float = 0.1) -> None:
        super().__init__(d_model, num_recurrences)
        self.gain = nn.Parameter(torch.full((d_model,), start))
        self.mix = nn.Linear(d_model, d_model, bias=False)
        nn.init.eye_(self.mix.weight)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + self.gain * self.mix(branch)

    def parameter_roles(self) -> dict[str, str]:
        return {"mix.weight": "norm"}


class CarryingLayer(PreNormLayer):
    """Adds a learned share of its own output at the recurrence before, channel by channel."""

    def __init__(self, sizes: LayerSizes, share: float = 0.1) -> None:
        super().__init__(sizes)
        self.share = nn.Parameter(torch.full((sizes.d_model,), share))

    def forward(self, x: Tensor, context: LoopContext, cache: Any = None) -> tuple[Tensor, Any]:
        before = torch.zeros_like(x) if context.memory is None else context.memory
        out = super().forward(x + self.share * before, context, cache)
        assert isinstance(out, Tensor)
        return out, out


class GatedLosses(Objective):
    """Losses after the first and the last recurrence, each token's share of the first learned from its state."""

    def __init__(self, d_model: int, num_recurrences: int, bonus: float = 0.1) -> None:
        super().__init__(d_model, num_recurrences)
        self.bonus = bonus
        self.gate = nn.Linear(d_model, 1, bias=False)

    def wanted(self, num_recurrences: int) -> Sequence[int]:
        return (0, num_recurrences - 1)

    def forward(self, states: Any, read: Any, auxiliary: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        first, last = states.values()
        share = self.gate(first).sigmoid().squeeze(-1)
        total = read(first, share) + read(last, 1 - share) - self.bonus * share.mean()
        return total, {"share": share.mean()}

    def parameter_roles(self) -> dict[str, str]:
        return {"gate.weight": "norm"}


class Counts(RecurrenceSampler):
    """Counts given one by one, the last one for ever: a curriculum."""

    def __init__(self, num_recurrences: int, counts: list[Any]) -> None:
        super().__init__(num_recurrences)
        self.counts = counts

    def sample(self, step: int) -> int:
        return self.counts[min(step, len(self.counts) - 1)]


class FewerAndFewer(RecurrenceSampler):
    """3, 2, ..."""

    def sample(self, step: int) -> int:
        return self.num_recurrences - step
