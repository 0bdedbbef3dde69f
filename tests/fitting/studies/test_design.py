"""The cheapest design for a target, and phi from one token count."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import fitting.studies.design as designs
from fitting import JointLaw, fit, load_grid
from fitting.__main__ import main
from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.fits import gradient_error
from fitting.estimation.resampling import resample, widening
from fitting.laws import OneTokenLaw
from fitting.studies.design import _Pool, design, law_for
from fitting.studies.planner import Noise, half_width
from fitting.studies.prediction import forecast

GRID = load_grid()
LAW = JointLaw()
TRUTH = {"A": 28.13, "alpha": 0.1996, "B": 928.1, "beta": 0.3693, "E": 1.5697, "phi": 0.4332}
NOISE = Noise(0.003, 0.0026)


def one_token(noise: float = 0.0) -> Runs:
    """The first run of every (r, width) of the grid with 2e9 tokens, and losses of the law."""
    first = {(r, d): i for i, (r, d) in reversed([*enumerate(zip(GRID.r, GRID.d_model, strict=True))])}
    runs = GRID.take(np.array(sorted(first.values())))
    runs = dataclasses.replace(runs, tokens=np.full(len(runs), 2e9), flops_budget=np.full(len(runs), np.nan))
    x = LAW.inputs(runs)
    loss = np.exp(LAW.log_loss_and_gradient(LAW.to_theta(TRUTH)[None], x)[0][0])
    return runs.with_loss(loss * np.exp(noise * np.random.default_rng(0).standard_normal(len(runs))))


def test_one_token_count_gives_phi_without_beta() -> None:
    runs = one_token()
    found = fit(runs, OneTokenLaw(), starts=60)
    assert found.trusted and found["phi"] == pytest.approx(0.4332, abs=1e-6)
    assert found["alpha"] == pytest.approx(0.1996, abs=1e-6)
    assert found["E"] == pytest.approx(1.5697 + 928.1 * 2e9**-0.3693, rel=1e-6)
    law, x = OneTokenLaw(), OneTokenLaw().inputs(runs)
    theta = law.to_theta({"A": 20.0, "alpha": 0.25, "E": 1.9, "phi": 0.7})
    size = x.n_once + runs.r**0.7 * x.n_rec
    assert np.allclose(law.predict(theta[None], x)[0], 1.9 + 20 * size**-0.25, rtol=1e-12)
    assert gradient_error(law, theta, x) is None
    with pytest.raises(
        FitError, match="saw from 3.24e.08 to 7.97e.09 tokens, and this law is for one token count"
    ):
        fit(GRID, law, starts=20)
    drawn = resample(found, x, np.log(runs.val_loss), np.arange(len(runs)), 20, 0)
    with pytest.raises(FitError, match="do not say what tokens are worth"):
        forecast(runs, found, 1e19, drawn)


def test_the_command_fits_one_token_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = one_token(0.001)
    lines = ["r,d_model,flops_budget,flops_per_token,tokens,val_loss"]
    for row in zip(runs.r, runs.d_model, runs.flops_per_token, runs.val_loss, strict=True):
        r, d, flops, loss = map(float, row)
        lines.append(f"{r:g},{d:g},,{flops!r},2e9,{loss!r}")
    path = tmp_path / "one.csv"
    path.write_text("\n".join(lines) + "\n")
    options = ["--law", "one-token", "--quiet", "--starts", "60", "--bootstrap", "60"]
    assert main(["fit", str(path), *options]) == 0
    out = capsys.readouterr().out
    assert "phi" in out and "runs of one token count do not say what tokens are worth" in out


def test_size_and_tokens_that_move_together_are_refused() -> None:
    together = dataclasses.replace(GRID, tokens=20 * GRID.n_total)
    with pytest.raises(
        FitError, match="one ratio of tokens to parameters, 20: size and tokens move together"
    ):
        law_for(together, LAW)
    assert isinstance(law_for(one_token(), LAW), OneTokenLaw) and law_for(GRID, LAW) is LAW


def pool(existing: int, law: JointLaw = LAW, runs: Runs = GRID, seeds: int = 2) -> _Pool:
    return _Pool.of(runs, existing, law, TRUTH, NOISE, seeds)


def test_widths_are_the_planners_times_the_widening() -> None:
    whole = pool(len(GRID))
    jacobian = LAW.log_loss_and_gradient(LAW.to_theta(TRUTH)[None], LAW.inputs(GRID))[1][0]
    expected = half_width(jacobian, GRID.cell, NOISE) * widening(24, 6)
    # The box as a prior tells almost nothing beside 116 runs.
    assert whole.half_width([]) == pytest.approx(expected, rel=0.01)


def test_candidates_in_one_batch_are_those_of_a_loop() -> None:
    some = pool(60)
    order = [70, 70, 80]
    batch = some._half_widths(order, np.array([65, 70, 100]))
    assert np.allclose(batch, [some.half_width([*order, row]) for row in (65, 70, 100)], rtol=1e-9)


def test_a_choice_meets_its_target_with_no_idle_run() -> None:
    whole = pool(0)
    order = whole.chosen(0.15)
    assert whole.half_width(order) <= 0.15 and whole.cell_count(order) >= 10
    assert max(order.count(row) for row in order) <= 2
    cost = GRID.training_flops[order].sum()
    assert cost < 0.25 * GRID.training_flops.sum()
    for row in set(order):
        fewer = list(order)
        fewer.remove(row)
        assert whole.half_width(fewer) > 0.15 or whole.cell_count(fewer) < 10
    # With runs that are there already, less is to be added.
    assert GRID.training_flops[pool(60).chosen(0.15)].sum() < cost
    with pytest.raises(FitError, match="The whole menu, 116 runs of 2 seeds each beside 0, would give"):
        whole.chosen(0.01)


def test_what_is_predicted_is_what_bootstraps_quote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(designs, "_SIMULATED", 24)
    found = design(GRID, LAW, TRUTH, NOISE, 0.15, seeds=2, workers=1)
    assert found.half_width == pytest.approx(0.13, abs=0.06)
    assert found.reached == (found.half_width <= 1.05 * 0.15)
    assert found.spread[0] < found.half_width < found.spread[1]
    assert found.training_flops == pytest.approx(sum(c.budget for c in found.runs), rel=0.05)
    halves = [c.half_width for c in found.runs]
    assert halves[-1] == pytest.approx(found.half_width) and halves[0] > 1
    for wrong, says in (({"target": 0.0}, "--target is 0"), ({"target": 0.1, "seeds": 0}, "--seeds is 0")):
        with pytest.raises(FitError, match=says):
            design(GRID, LAW, TRUTH, NOISE, **wrong)  # type: ignore[arg-type]


def test_the_command_designs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(designs, "_SIMULATED", 12)
    asked = ["--target", "0.2", "--seeds", "1", "--starts", "60", "--quiet"]
    assert main(["plan", "published", "--runs", "published", *asked]) == 0
    out = capsys.readouterr().out
    assert "0 runs in 24 cells beside 116" in out
    status = main(["plan", "published", *asked, "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["noise"]["run"] == pytest.approx(0.0033, abs=2e-4) and len(found["runs"]) < 60
    assert status == int(not found["reached"]) and ("Give a wider menu" in err) == (status == 1)
    assert main(["plan", "published", "--runs", "published", "--quiet"]) == 2
    assert "--runs are what --target adds to" in capsys.readouterr().err
