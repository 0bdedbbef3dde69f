"""Lanes: what is carried from one recurrence to the next.

B batch rows, T sequence length, d = d_model, K lanes, r recurrences. Sources: arXiv 2604.21106, arXiv 2409.19606.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.loop.component import PerRecurrence

#: A tensor, or tensors in any nesting of tuples, lists and dicts. The loop only hands it on.
State: TypeAlias = Any


class Lanes(PerRecurrence, nn.Module, ABC):
    """The state between recurrences. A subclass takes `d_model` and `num_recurrences` first."""

    def __init__(self, d_model: int, num_recurrences: int) -> None:
        super().__init__()
        self.d_model, self.num_recurrences = d_model, num_recurrences

    @abstractmethod
    def expand(self, s: Tensor) -> State:
        """Lane state from the initial state s_0 (B,T,d)."""

    @abstractmethod
    def read(self, state: State, i: int) -> Tensor:
        """What the injection reads at recurrence `i` (B,T,d)."""

    @abstractmethod
    def write(self, state: State, y: Tensor, i: int) -> State:
        """New lane state after recurrence `i` produced y (B,T,d); `state` must stay unchanged."""

    @abstractmethod
    def reduce(self, state: State) -> Tensor:
        """What the coda reads (B,T,d) after the last recurrence."""

    def mixing_matrices(self) -> Tensor | None:
        """Matrices M_i (r,K,K) that mix the lanes in each recurrence; None if none do. For telemetry."""
        return None

    def recurrence_weights(self) -> dict[str, Tensor]:
        """Each recurrence's weights for the lanes, by name: (r,K,K), (r,K) or (r,). `callbacks.LaneMaps` draws them."""
        mixing = self.mixing_matrices()
        return {} if mixing is None else {"mixing": mixing}

    def parameter_roles(self) -> dict[str, str]:
        """Roles of parameters, by name; lanes have their own optimizer group."""
        return {name: "lanes" for name, _ in self.named_parameters()}


class SingleLane(Lanes):
    """One state, replaced by each recurrence's output."""

    def expand(self, s: Tensor) -> Tensor:
        return s

    def read(self, state: Tensor, i: int) -> Tensor:
        return state

    def write(self, state: Tensor, y: Tensor, i: int) -> Tensor:
        return y

    def reduce(self, state: Tensor) -> Tensor:
        return state


class HyperConnectionLanes(Lanes):
    """K parallel states l_k (B,T,d), read, mixed and written with separate scalars for every recurrence.

    u = sum_k alpha_i[k] l_k; l <- M_i l + beta_i ⊗ y; the coda reads sum_k l_k. Init: alpha_i = one-hot(i mod K),
    M_i = I, beta_i = 1. Parameters: r (K² + 2K). The state is (K,B,T,d): lanes lead, so mixing is one matrix product.

    Beyond the trained r the scalars start again from the first, i mod r. In four small runs (r = 4 and 8, K = 2 and 3)
    this raised the loss by 0.04 to 0.07 nats at 2r, while repeating the last scalars, or the last K in turn, raised it
    by 0.2 and more. At r + 1, repeating the last K in turn raised it less in three of the four.

    Args:
        d_model: width d.
        num_recurrences: recurrences r.
        num_lanes: lanes K.

    Raises:
        UserError: fewer than two lanes.
    """

    step_specific = True

    def __init__(self, d_model: int, num_recurrences: int, num_lanes: int = 2) -> None:
        super().__init__(d_model, num_recurrences)
        if num_lanes < 2:
            raise UserError(
                f"num_lanes is {num_lanes}; hyperconnections need at least 2 (SingleLane carries one)."
            )
        self.num_lanes = num_lanes
        r, k = num_recurrences, num_lanes
        self.alpha = nn.Parameter(torch.eye(k)[torch.arange(r) % k])  # (r, K)
        self.mixing = nn.Parameter(torch.eye(k).repeat(r, 1, 1))  # (r, K, K)
        self.beta = nn.Parameter(torch.ones(r, k))  # (r, K)

    def beyond_trained(self, i: int, trained: int) -> int:
        return i % trained

    def _step(self, i: int) -> int:
        return i if i < self.num_recurrences else self.beyond_trained(i, self.num_recurrences)

    def expand(self, s: Tensor) -> Tensor:
        return s.expand(self.num_lanes, *s.shape)

    def read_weights(self, i: int) -> Tensor:
        """alpha_i (K,) of recurrence `i`."""
        return self.alpha[self._step(i)]

    def mixing_matrix(self, i: int) -> Tensor:
        """M_i (K,K) of recurrence `i`."""
        return self.mixing[self._step(i)]

    def write_weights(self, i: int) -> Tensor:
        """beta_i (K,) of recurrence `i`."""
        return self.beta[self._step(i)]

    def read(self, state: Tensor, i: int) -> Tensor:
        # Unlike tensordot, matmul gives bf16 under autocast on every device, which is what the block reads.
        return torch.matmul(self.read_weights(i), state.flatten(1)).view(state.shape[1:])

    def write(self, state: Tensor, y: Tensor, i: int) -> Tensor:
        # The residual stream stays fp32 under autocast, which would run this product in bf16.
        device = state.device.type
        autocast = torch.amp.is_autocast_available(device)
        with torch.autocast(device, enabled=False) if autocast else nullcontext():
            mixing = self.mixing_matrix(i)
            mixed = torch.tensordot(mixing, state.to(mixing.dtype), dims=1)
        return mixed + self.write_weights(i).view(-1, *(1,) * y.dim()) * y

    def reduce(self, state: Tensor) -> Tensor:
        return state.sum(dim=0)

    def mixing_matrices(self) -> Tensor:
        return torch.stack([self.mixing_matrix(i) for i in range(self.num_recurrences)])

    def recurrence_weights(self) -> dict[str, Tensor]:
        every = range(self.num_recurrences)
        alpha = torch.stack([self.read_weights(i) for i in every])
        beta = torch.stack([self.write_weights(i) for i in every])
        return {"mixing": self.mixing_matrices(), "alpha": alpha, "beta": beta}

    def flops_per_token(self) -> int:
        return 2 * (self.num_lanes**2 + 2 * self.num_lanes) * self.d_model
