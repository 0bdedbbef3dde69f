"""A random state before the first recurrence.

Source: arXiv 2502.05171, which trains from Gaussian states so that the loop finds its way from any of them; also arXiv
2604.12946. Left out: the cut of the Gaussian at three deviations, and draws that differ between evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from looped_lm.common.errors import UserError
from looped_lm.loop.injection import LinearInjection

#: Positions that are drawn at once in evaluation, so that a longer text begins with the states of a shorter one.
CHUNK = 64


class RandomStateInjection(LinearInjection):
    """The linear injection with s_0 ~ N(0, std²).

    In training the state of a row follows from the seed and the row's number in the run: it is the same for any number
    of processes and micro-batches, after a resume, and on a second visit to the row another. Elsewhere it follows from
    the seed and the token's position, so that evaluation repeats and decoding with a cache equals whole passes.

    All draws are made on the CPU, so that devices agree: about 10 ns for each of a row's T·d numbers.

    Args:
        d_model: the model's.
        std: standard deviation; sqrt(2/5) in the source.
        seed: seed of the draws, whatever the run's.

    Raises:
        UserError: a deviation that is not positive, or a seed out of range.
    """

    def __init__(self, d_model: int, std: float = math.sqrt(0.4), seed: int = 0) -> None:
        super().__init__(d_model)
        if not 0 < std < math.inf:
            raise UserError(f"std is {std}; it must be positive (LinearInjection starts from e).")
        if not 0 <= seed < 2**64:
            raise UserError(f"seed is {seed}; it must be between 0 and 2^64 - 1.")
        self.std, self.seed = std, seed
        self._fixed = torch.empty(0, d_model, device="cpu")

    def _drawn(self, kind: int, number: int, length: int) -> Tensor:
        """(length,d) from a stream of its own for every number of a kind."""
        key = np.random.SeedSequence((self.seed, kind, number)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(key[0]))
        return self.std * torch.randn(length, self.d_model, generator=generator, device="cpu")

    def start(self, e: Tensor, positions: Tensor | None, rows: Sequence[int] | None) -> Tensor:
        if rows is not None:
            return torch.stack([self._drawn(0, row, e.shape[1]) for row in rows]).to(e)
        length = e.shape[1] if positions is None else int(positions.max()) + 1
        if len(self._fixed) < length:
            # A tensor made in inference mode could not be used in training later.
            with torch.inference_mode(False):
                chunks = [
                    self._drawn(1, n, CHUNK) for n in range(len(self._fixed) // CHUNK, -(-length // CHUNK))
                ]
                self._fixed = torch.cat((self._fixed, *chunks))
        fixed = self._fixed[:length].to(e)
        return fixed.expand_as(e) if positions is None else fixed[positions]
