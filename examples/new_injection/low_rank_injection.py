"""The idea of this example: the prelude's output re-enters every recurrence through a narrow matrix."""

from __future__ import annotations

from torch import Tensor, nn

from looped_lm import Injection


class LowRankInjection(Injection):
    """u = s + U V e, with V in R^{k x d}, U in R^{d x k} and k = d / share.

    Args:
        d_model: width d.
        share: how many times narrower than the model the bottleneck is.

    Raises:
        ValueError: the share leaves no channel.
    """

    def __init__(self, d_model: int, share: int = 4) -> None:
        super().__init__(d_model)
        if not 1 <= share <= d_model:
            raise ValueError(f"share is {share}; with d_model {d_model} it must be between 1 and {d_model}.")
        self.down = nn.Linear(d_model, d_model // share, bias=False)
        self.up = nn.Linear(d_model // share, d_model, bias=False)

    def initial_state(self, e: Tensor) -> Tensor:
        return e

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return s + self.up(self.down(e))

    def flops_per_token(self) -> int:
        return 2 * (self.down.weight.numel() + self.up.weight.numel())
