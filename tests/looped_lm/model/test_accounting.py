"""Counts against closed forms of the specification and against torch's counter on the meta device."""

from __future__ import annotations

import csv
import statistics
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from looped_lm import (
    FullBPTT,
    HyperConnectionLanes,
    Injection,
    LinearInjection,
    PassthroughInjection,
    TruncatedBPTT,
)
from looped_lm.common.errors import UserError
from looped_lm.configuration.config_files import SHIPPED
from looped_lm.model.accounting import (
    count_parameters,
    count_roles,
    flops_per_token,
    parameter_roles,
    reference_tokens,
)
from tests.support.reference import accounting as reference
from tests.support.reference import recipe
from tests.support.shipped import COMBINATIONS, SEQ_LEN, SHIPPED_ARCHITECTURES, paper_model, shipped
from tests.support.tiny import tiny_model

GRID = SHIPPED.parent / "fitting" / "published" / "iso_depth_grid.csv"


def grid_rows() -> list[dict[str, str]]:
    with GRID.open() as file:
        return list(csv.DictReader(file))


def test_every_cell_of_the_iso_depth_grid_has_the_published_flops_and_parameters() -> None:
    cells = sorted({(int(row["size"]), int(row["r"]), int(row["flops_per_token"])) for row in grid_rows()})
    assert len(cells) == 44
    for size, r, published in cells:
        model = paper_model(size, r)
        assert flops_per_token(model, SEQ_LEN) == published, (size, r)
        d, layout = 64 * size, reference.paper_layout(r)
        expected = reference.parameters(d, r, layout, reference.paper_injection(r))
        sections = count_parameters(model)
        assert sections.as_dict() == {
            "embedding": expected.embedding,
            "prelude": expected.prelude,
            "block": expected.block,
            "injection": expected.injection,
            "lanes": 0,
            "coda": expected.coda,
            "norms": expected.model_norms,
            "head": expected.head,
        }
        assert (sections.n_once, sections.n_rec, sections.n) == (
            expected.once,
            expected.recurrent,
            expected.unique,
        )


@pytest.mark.parametrize(
    "size, r, n, flops",
    [
        (20, 1, 393.3e6, 3.235e9),
        (20, 4, 160.6e6, 3.3136e9),
        (6, 1, 35_405_952, 4.7505e8),
        (6, 8, 10_917_504, 4.892e8),
    ],
)
def test_check_values_of_the_specification(size: int, r: int, n: float, flops: float) -> None:
    model = paper_model(size, r)
    assert count_parameters(model).n == pytest.approx(n, rel=2e-4)
    assert flops_per_token(model, SEQ_LEN) == pytest.approx(flops, rel=2e-5)


@pytest.mark.parametrize("r", [2, 4, 8])
@pytest.mark.parametrize("size", [6, 10, 22])
def test_truncation_and_lanes_equal_the_closed_forms(size: int, r: int) -> None:
    d, layout = 64 * size, reference.paper_layout(r)
    truncated = paper_model(size, r, bptt=TruncatedBPTT())
    window = -(-r // 2)
    for convention in ("paper", "causal"):
        assert flops_per_token(truncated, SEQ_LEN, convention) == reference.flops_per_token(
            d, r, layout, "linear", window=window, convention=convention
        )
    for k in (2, 3):
        lanes = paper_model(
            size, r, injection=PassthroughInjection, lanes=partial(HyperConnectionLanes, num_lanes=k)
        )
        assert flops_per_token(lanes, SEQ_LEN) == reference.flops_per_token(
            d, r, layout, "passthrough", lanes=k
        )
        assert count_parameters(lanes).lanes == r * (k * k + 2 * k)


def test_truncation_gives_the_published_median_ratio_of_tokens() -> None:
    sizes = {"4.64e17": [6, 8, 10, 12], "1e18": [6, 8, 10, 12, 14, 16], "2.15e18": range(8, 19, 2)}
    sizes["4.64e18"] = range(10, 23, 2)
    ratios = [
        flops_per_token(paper_model(s, r), SEQ_LEN)
        / flops_per_token(paper_model(s, r, bptt=TruncatedBPTT()), SEQ_LEN)
        for cell in sizes.values()
        for s in cell
        for r in (2, 4, 8)
    ]
    assert len(ratios) == 69
    assert statistics.median(ratios) == pytest.approx(1.315, rel=0.01)


@pytest.mark.parametrize("name", [*COMBINATIONS, *SHIPPED_ARCHITECTURES])
def test_flops_agree_with_torchs_counter_on_the_meta_device(name: str) -> None:
    """Within 1%, once what the convention counts and the counter does not is taken out.

    The convention counts norm scales like matrices (6 FLOPs per parameter and use), and the elementwise beta ⊗ y of
    lanes; torch counts matrix products and attention alone, attention in full on the meta device.
    """
    arguments = COMBINATIONS[name] if name in COMBINATIONS else shipped(name)
    # How many tokens an expert gets is known on a real device only.
    with torch.device("cpu" if name == "r4_moe.yaml" else "meta"):
        model = tiny_model(size=4, head_dim=64, **{"num_recurrences": 4, **arguments})
        inputs = torch.zeros(2, 64, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(inputs, inputs).backward()

    def scales(layers: nn.Module) -> int:
        return sum(p.numel() for p in layers.parameters() if p.dim() == 1)

    r = model.num_recurrences
    passes = sum(3 if model.bptt.keeps_grad(i, r) else 1 for i in range(r))
    readings = len(model.objective.readings(r))
    uncounted = 6 * (scales(model.prelude) + readings * scales(model.coda)) + 2 * passes * scales(model.block)
    if isinstance(model.lanes, HyperConnectionLanes):
        uncounted += passes * 2 * model.lanes.num_lanes * model.d_model
    expected = flops_per_token(model, 64) - uncounted
    assert counter.get_total_flops() / inputs.numel() == pytest.approx(expected, rel=0.01)


def test_the_reference_tokens_are_the_published_ones() -> None:
    published = {1: 983_315_200, 2: 606_380_800, 4: 1_016_083_200, 8: 1_835_488_000}
    assert {r: reference_tokens(r) for r in published} == published
    assert all(reference_tokens(r) == recipe.reference_tokens(r) for r in (1, 2, 3, 4, 8, 16))


def test_causal_halves_the_attention_alone() -> None:
    model = paper_model(10, 4)
    attention = (12 * 4 + 12 * 4 * 4) * 640 * SEQ_LEN
    assert flops_per_token(model, SEQ_LEN) - flops_per_token(model, SEQ_LEN, "causal") == attention / 2


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(UserError, match="'halved' is unknown; there are paper, causal"):
        flops_per_token(tiny_model(), 16, "halved")


def test_roles_and_their_counts() -> None:
    model = tiny_model(lanes=HyperConnectionLanes)
    roles = parameter_roles(model)
    assert roles["embedding.weight"] == "embedding" and roles["head.weight"] == "head"
    assert roles["injection.proj.weight"] == "matrix" and roles["block.0.mlp.fc_in.weight"] == "matrix"
    assert roles["norm_recur.weight"] == "norm"
    # alpha and beta are two-dimensional, and still no matrices of MuonH.
    assert {roles[f"lanes.{n}"] for n in ("alpha", "mixing", "beta")} == {"lanes"}
    counts = count_roles(model)
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    assert counts["lanes"] == 2 * (4 + 4)


class WrongRole(PassthroughInjection):
    def parameter_roles(self) -> dict[str, str]:
        return {"gain": "fast"}


def test_a_role_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="gives 'gain' the role 'fast'; roles are"):
        parameter_roles(tiny_model(injection=WrongRole))


def test_the_bptt_predicate_alone_moves_the_flops() -> None:
    full = tiny_model(num_recurrences=4, bptt=FullBPTT())
    cut = tiny_model(num_recurrences=4, bptt=TruncatedBPTT(1))
    saved = 3 * 4 * sum(p.numel() for p in full.block.parameters())
    saved += 3 * 2 * (full.injection.flops_per_token() + 4 * full.d_model * 16)
    assert flops_per_token(full, 16) - flops_per_token(cut, 16) == saved


class Doubled(Injection):
    """A component of a user's own brings its own FLOPs."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.a, self.b = nn.Linear(d_model, d_model, bias=False), nn.Linear(d_model, d_model, bias=False)

    def initial_state(self, e: torch.Tensor) -> torch.Tensor:
        return e

    def forward(self, e: torch.Tensor, s: torch.Tensor, i: int) -> torch.Tensor:
        return self.a(e) + self.b(s)

    def flops_per_token(self) -> int:
        return 4 * self.d_model**2


def test_a_components_own_flops_enter_the_total() -> None:
    ours = flops_per_token(tiny_model(injection=Doubled), 16)
    assert ours == flops_per_token(tiny_model(injection=LinearInjection), 16)
