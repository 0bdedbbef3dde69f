"""A learned distribution over exits, kept broad by its entropy.

Source: Ouro, arXiv 2510.25741, the objective of its pretraining. Left out: the later stage that trains the gate alone,
by how much one more recurrence would lower the loss, and leaving the loop early in generation.
"""

from __future__ import annotations

from torch import Tensor

from looped_lm.loop.variants.halting import Halting


class ExitDistribution(Halting):
    """Σ_i E[p_i·ℓ_i] - beta·E[H(p)] over the exits of `Halting`; also logs `exit_entropy`, E[H(p)] in nats.

    The entropy is the distance from a uniform prior: without it, the gate soon settles on one recurrence.

    Args:
        d_model: width d.
        num_recurrences: recurrences r of training, not used.
        beta: weight of the entropy.

    Raises:
        UserError: a negative or infinite beta, or a step of one recurrence.
    """

    def __init__(self, d_model: int, num_recurrences: int, beta: float = 0.05) -> None:
        super().__init__(d_model, num_recurrences, beta)

    def penalty(self, log_p: Tensor) -> tuple[Tensor, str, Tensor]:
        entropy = -(log_p.exp() * log_p).sum(0).mean()
        return -entropy, "exit_entropy", entropy
