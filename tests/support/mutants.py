"""Components each of which breaks one promise, for the test that the conformance suite notices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from looped_lm import (
    AdditiveInjection,
    FinalCrossEntropy,
    HyperConnectionLanes,
    Injection,
    LayerSizes,
    LinearInjection,
    LoopContext,
    PlainResidual,
    PreNormLayer,
    ScaledResidual,
    SingleLane,
)
from tests.support.own_components import SignDescent


class UnusedParameter(LinearInjection):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.spare = nn.Parameter(torch.ones(d_model))


class CutGradient(LinearInjection):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.gain = nn.Parameter(torch.ones(d_model))

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return super().forward(e, s, i) + 0.0 * self.gain


class IdleRecurrence(HyperConnectionLanes):
    """Always reads with the weights of the first recurrence."""

    def read_weights(self, i: int) -> Tensor:
        return self.alpha[0] + 0.0 * self.alpha.sum()


class ZeroMatrix(LinearInjection):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        nn.init.zeros_(self.proj.weight)


SHARED = nn.Parameter(torch.ones(64))


class SharedInjection(AdditiveInjection):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.gain = SHARED


class SharedResidual(PlainResidual):
    def __init__(self, d_model: int, num_recurrences: int) -> None:
        super().__init__(d_model, num_recurrences)
        self.gain = SHARED


class TooCheap(LinearInjection):
    def flops_per_token(self) -> int:
        return super().flops_per_token() // 2


class TooDear(AdditiveInjection):
    def flops_per_token(self) -> int:
        return 2 * self.d_model


class DearResidual(ScaledResidual):
    def flops_per_token(self) -> int:
        return 3 * self.d_model


class ReadsTwice(FinalCrossEntropy):
    def forward(self, states: Any, read: Any, auxiliary: Any) -> tuple[Tensor, dict[str, Tensor]]:
        (state,) = states.values()
        return (read(state, None) + read(state, None)) / 2, {}


class HiddenProduct(SingleLane):
    """A matrix where no FLOPs are declared for: at the end of the loop."""

    def __init__(self, d_model: int, num_recurrences: int) -> None:
        super().__init__(d_model, num_recurrences)
        self.out = nn.Linear(d_model, 4 * d_model, bias=False)
        self.back = nn.Linear(4 * d_model, d_model, bias=False)

    def reduce(self, state: Tensor) -> Tensor:
        return self.back(self.out(state))


class CallCounter(AdditiveInjection):
    """Depends on how often it was called."""

    calls = 0

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        self.calls += 1
        return s + e / self.calls


class InPlaceWrite(SingleLane):
    def write(self, state: Tensor, y: Tensor, i: int) -> Tensor:
        return y.mul_(2.0)


class InPlaceState(AdditiveInjection):
    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        s += 0.5
        return s + e


class OtherMixing(HyperConnectionLanes):
    """Shows another matrix than the one it mixes with."""

    def mixing_matrices(self) -> Tensor:
        return super().mixing_matrices().softmax(dim=-1)


class LooksAhead(LinearInjection):
    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return super().forward(e, s, i) + s.mean(dim=1, keepdim=True)


class LooksAside(LinearInjection):
    """What batch normalisation would do."""

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return super().forward(e, s, i) - s.mean(dim=0, keepdim=True)


class TableWithoutRule(AdditiveInjection):
    """Has a row for each of four recurrences but does not say so."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.table = nn.Parameter(torch.ones(4, d_model))

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return s + e + self.table[i]


class OneDtype(LinearInjection):
    """lerp needs one dtype, but under autocast the product is bf16 and the state is fp32."""

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return torch.lerp(s, super().forward(e, s, i), 0.5)


class OtherWhenCompiled(LinearInjection):
    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        u = super().forward(e, s, i)
        return 2.0 * u if torch.compiler.is_compiling() else u


class OtherWhenRecomputed(LinearInjection):
    """Gives another result when a recurrence runs again."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.seen: set[int] = set()

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        u = super().forward(e, s, i)
        u = 1.5 * u if i in self.seen else u
        self.seen.add(i)
        return u


def lost_argument(d_model: int) -> Injection:
    """Gives a component a value that its constructor's arguments do not contain."""
    injection = WithFactor(d_model)
    injection.factor = 2.0
    return injection


class WithFactor(LinearInjection):
    factor = 1.0

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return self.factor * super().forward(e, s, i)


class Ascent(SignDescent):
    def __init__(self, params: Any, lr: float = 1e-3, scale: float = -1.0) -> None:
        super().__init__(params, lr, scale)


class CheapLayer(PreNormLayer):
    """Counts half of what it does."""

    def flops_per_token(self, seq_len: float = 0.0, i: int = 0) -> float:
        return super().flops_per_token(seq_len, i) / 2


class LeakingLayer(PreNormLayer):
    """Adds the mean over all tokens."""

    def forward(self, x: Tensor, context: LoopContext, cache: Any = None) -> Any:
        return super().forward(x, context, cache) + x.mean(dim=1, keepdim=True)


class IdleLayer(PreNormLayer):
    """Has a parameter that it does not use."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes)
        self.idle = nn.Parameter(torch.ones(sizes.d_model))


class GrowingMemory(PreNormLayer):
    """Keeps what it has seen at every recurrence."""

    def forward(self, x: Tensor, context: LoopContext, cache: Any = None) -> Any:
        seen = x[:, :, None] if context.memory is None else torch.cat((context.memory, x[:, :, None]), dim=2)
        return super().forward(x + seen.mean(dim=2), context, cache), seen


class MutatedMemory(PreNormLayer):
    """Scales the memory in place, which enters by a product."""

    def forward(self, x: Tensor, context: LoopContext, cache: Any = None) -> Any:
        memory = torch.ones_like(x) if context.memory is None else context.memory
        out = super().forward(x * memory, context, cache)
        memory.data.mul_(0.9)
        return out, memory


class ListedAdapters(PreNormLayer):
    """A module for each recurrence, in a list that is indexed by i."""

    step_specific = True

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes)
        self.gains = nn.ModuleList(nn.RMSNorm(sizes.d_model) for _ in range(sizes.num_recurrences))

    def forward(self, x: Tensor, context: LoopContext, cache: Any = None) -> Any:
        return super().forward(self.gains[context.i](x), context, cache)
