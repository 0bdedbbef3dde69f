"""Residuals against their formulas, inside the block and out of it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from looped_lm import LinearInjection, PlainResidual, ScaledResidual
from looped_lm.model.accounting import count_parameters, flops_per_token, parameter_roles
from tests.support.own_components import LayerScale
from tests.support.tiny import perturb, tiny_model, tokens


def test_sums() -> None:
    x, branch = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    assert torch.equal(PlainResidual(8, 4)(x, branch), x + branch)
    torch.testing.assert_close(ScaledResidual(8, 4)(x, branch), x + branch / 4)
    torch.testing.assert_close(ScaledResidual(8, 4, gain=0.5)(x, branch), x + branch / 8)
    assert torch.equal(ScaledResidual(8, 1)(x, branch), x + branch)
    with pytest.raises(ValueError, match="gain is 0.0; it must be positive"):
        ScaledResidual(8, 4, gain=0.0)


def test_the_recurrent_block_alone_is_scaled_by_one_over_r() -> None:
    """The same numbers as a plain model whose recurrent branches end in matrices a third as large."""
    scaled = tiny_model(torch.float64, num_recurrences=3, recurrent_layers=2, residual=ScaledResidual)
    perturb(scaled)
    plain = tiny_model(torch.float64, num_recurrences=3, recurrent_layers=2)
    plain.load_state_dict(scaled.state_dict())
    inputs, _ = tokens()
    assert not torch.allclose(scaled(inputs), plain(inputs), rtol=1e-2)
    with torch.no_grad():
        for name, p in plain.block.named_parameters():
            if name.endswith(("attn.out.weight", "mlp.fc_out.weight")):
                p.div_(3)
    torch.testing.assert_close(scaled(inputs), plain(inputs))


def test_a_residual_of_ones_own_enters_counts_flops_and_roles() -> None:
    model = tiny_model(recurrent_layers=2, residual=partial(LayerScale, start=0.2))
    plain = tiny_model(recurrent_layers=2)
    own = 2 * 2 * (64 + 64 * 64)
    assert count_parameters(model).block - count_parameters(plain).block == own
    assert count_parameters(model).prelude == count_parameters(plain).prelude
    assert flops_per_token(model, 16) - flops_per_token(plain, 16) == 3 * 2 * 2 * own
    roles = parameter_roles(model)
    assert roles["block.1.residual_mlp.mix.weight"] == roles["block.0.residual_attn.gain"] == "norm"
    # The block's initialisation is for its own matrices: a residual's stay as it made them.
    assert torch.equal(model.block[0].residual_attn.mix.weight, torch.eye(64))  # type: ignore[union-attr, arg-type]
    assert isinstance(model.injection, LinearInjection)
