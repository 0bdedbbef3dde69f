"""What objectives share in which a gate says after which recurrence each token leaves the loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.loop.objective import Objective, Read, States


class Halting(Objective):
    """Σ_i E[p_i·ℓ_i] + beta·penalty(p), with ℓ_i the cross entropy of a token after recurrence i.

    After each recurrence but the last, a gate leaves with probability λ_i = sigmoid(w·state + b): p_i = λ_i Π_{j<i}
    (1 - λ_j), and the last recurrence takes the rest. w (1,d) and b start at zero, so that every λ is 1/2. One gate
    serves all recurrences. Every recurrence is read, so all must keep gradients.

    Logs `expected_loss` (nats/token), `mean_exit_step` (recurrences, from 1) and the penalty under its own name.

    Raises:
        UserError: a negative or infinite beta, or a step of one recurrence.
    """

    def __init__(self, d_model: int, num_recurrences: int, beta: float) -> None:
        super().__init__(d_model, num_recurrences)
        if not 0.0 <= beta < float("inf"):
            raise UserError(
                f"beta is {beta}; it must be finite and not negative, or the gate would be paid for it."
            )
        self.beta = beta
        self.gate = nn.Linear(d_model, 1)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def wanted(self, num_recurrences: int) -> Sequence[int]:
        if num_recurrences < 2:
            raise UserError(
                f"{type(self).__name__} needs at least 2 recurrences in every step: with {num_recurrences} there is no "
                "exit to choose, and the gate would never train. Use FixedRecurrences with more, or FinalCrossEntropy."
            )
        return range(num_recurrences)

    def log_probabilities(self, states: States) -> Tensor:
        """log p (r,B,T), at least fp32, from the states (B,T,d) after all r recurrences."""
        *early, _ = states.values()
        gates = torch.stack([self._logits(state) for state in early])
        stays = F.logsigmoid(-gates).cumsum(0)  # log Π_{j<=i} (1 - λ_j)
        leaves = F.logsigmoid(gates)
        return torch.cat((leaves[:1], leaves[1:] + stays[:-1], stays[-1:]))

    def _logits(self, state: Tensor) -> Tensor:
        gates = self.gate(state).squeeze(-1)
        return gates.to(torch.promote_types(gates.dtype, torch.float32))

    def log_stay(self, state: Tensor) -> Tensor:
        """log(1 - λ) (B,T), at least fp32, after the recurrence of a state (B,T,d)."""
        return F.logsigmoid(-self._logits(state))

    @abstractmethod
    def penalty(self, log_p: Tensor) -> tuple[Tensor, str, Tensor]:
        """The penalty, and name and value of the term to log, scalars in nats from log p (r,B,T)."""

    def forward(
        self, states: States, read: Read, auxiliary: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        log_p = self.log_probabilities(states)
        p = log_p.exp()
        expected = torch.stack([read(state, p[i]) for i, state in states.items()]).sum()
        penalty, name, value = self.penalty(log_p)
        steps = torch.arange(1, len(p) + 1, dtype=p.dtype, device=p.device)
        terms = {
            "expected_loss": expected,
            "mean_exit_step": torch.tensordot(steps, p, 1).mean(),
            name: value,
        }
        return sum(auxiliary.values(), expected + self.beta * penalty), terms

    def parameter_roles(self) -> dict[str, str]:
        return {"gate.weight": "norm"}
