"""The token-weighted mean."""

from __future__ import annotations

import pytest
import torch

from looped_lm.training.metrics import TokenLoss


def test_batches_weigh_as_many_tokens_as_they_have() -> None:
    metric = TokenLoss()
    metric.update(torch.tensor(2.0), 30)
    metric.update(torch.tensor(6.0), 10)
    loss, tokens = metric.compute()
    assert float(loss) == pytest.approx(3.0) and int(tokens) == 40 and loss.dtype is torch.float64
    assert metric.to(torch.bfloat16).nats.dtype is torch.float64
    metric.reset()
    metric.update(torch.tensor(1.0), 1)
    assert float(metric.compute()[0]) == 1.0
