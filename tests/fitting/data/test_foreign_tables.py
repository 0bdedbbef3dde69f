"""Tables and records from elsewhere: read, converted, or refused with what is wrong and what to do."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitting import ChinchillaLaw, fit, load_grid, load_runs
from fitting.__main__ import main
from fitting.data.reading import Reading
from fitting.data.runs import concatenate
from fitting.errors import FitError
from fitting.estimation.fits import gradient_error
from fitting.laws import EqualExponentsLaw
from fitting.published import GRID
from fitting.records import RecordError, RunRecord
from tests.support.run_records import record_fields

ROWS = list(csv.DictReader(GRID.read_text().splitlines()))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def table(rows: list[dict[str, Any]], delimiter: str = ",", name: str = "runs.csv") -> Path:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        path = tmp_path / name
        path.write_text(text.getvalue())
        return path

    return table


def changed(**changes: Callable[[dict[str, str]], Any]) -> list[dict[str, Any]]:
    return [{**row, **{name: change(row) for name, change in changes.items()}} for row in ROWS]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_other_separators_are_read(write: Callable[..., Path], delimiter: str) -> None:
    found, expected = load_runs(write(ROWS, delimiter)), load_grid()
    assert np.array_equal(found.val_loss, expected.val_loss) and np.array_equal(found.cell, expected.cell)


def test_empty_files_and_other_headers_are_refused_by_name(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    empty = tmp_path / "empty.csv"
    for content in ("", "\n", "  \n1,2\n"):
        empty.write_text(content)
        with pytest.raises(RecordError, match=r"empty\.csv: is empty\. A table of runs has a header"):
            load_runs(empty)
    rows = [{("VAL_LOSS" if k == "val_loss" else k): v for k, v in row.items()} for row in ROWS]
    with pytest.raises(
        RecordError, match="'val_loss': is missing. Is it VAL_LOSS.*--columns OURS=THEIRS renames"
    ):
        load_runs(write(rows))
    with pytest.raises(RecordError, match="'Seed': is no column; is it seed."):
        load_runs(write([{**row, "Seed": 1} for row in ROWS]))
    renamed = load_runs(write(rows), reading=Reading(columns=("val_loss=VAL_LOSS",)))
    assert np.array_equal(renamed.val_loss, load_grid().val_loss)
    with pytest.raises(RecordError, match="'L': is named by --columns and is not there. The columns are: r,"):
        load_runs(write(ROWS), reading=Reading(columns=("val_loss=L",)))


@pytest.mark.parametrize("factor, name", [(1e3, "thousands"), (1e6, "millions"), (1e9, "billions")])
def test_tokens_in_another_unit_are_refused(write: Callable[..., Path], factor: float, name: str) -> None:
    rows = changed(tokens=lambda row: float(row["tokens"]) / factor, flops_budget=lambda row: "")
    with pytest.raises(
        RecordError, match=f"'tokens': the median is .* tokens per parameter.*they look like {name}"
    ):
        load_runs(write(rows))


def test_losses_in_another_unit_are_refused_or_converted(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    nats = load_grid().val_loss
    bits = write(changed(val_loss=lambda row: float(row["val_loss"]) / math.log(2)))
    options = ["--quiet", "--starts", "40", "--bootstrap", "0", "--no-rivals"]
    assert main(["fit", str(bits), *options]) == 2
    assert "E is 2.26" in (told := capsys.readouterr().err) and "Give --loss-unit bits" in told
    assert main(["fit", str(bits), *options, "--loss-unit", "bits"]) == 0
    for command in (["predict", str(bits), "--equivalent", "1e9"], ["compare", str(bits), str(bits)]):
        assert main([*command, "--quiet", "--starts", "40", "--bootstrap", "0"]) == 2, command
        assert "Give --loss-unit bits" in capsys.readouterr().err
    assert np.allclose(load_runs(bits, reading=Reading(loss_unit="bits")).val_loss, nats, rtol=1e-14)
    assert np.allclose(load_runs(bits, reading=Reading(loss_unit="nats")).val_loss, nats / math.log(2))
    per_byte = write(changed(val_loss=lambda row: float(row["val_loss"]) / math.log(2) / 4.4))
    reading = Reading(loss_unit="bits-per-byte", bytes_per_token=4.4)
    assert np.allclose(load_runs(per_byte, reading=reading).val_loss, nats, rtol=1e-14)
    rows = changed(val_loss=lambda row: 0.8 * math.exp(float(row["val_loss"])))
    with pytest.raises(
        RecordError, match="'val_loss': losses are [34].* times what .* They look like perplexities"
    ):
        load_runs(write(rows))
    for wrong, says in (
        ({"loss_unit": "dits"}, "--loss-unit is 'dits'"),
        ({"loss_unit": "bits-per-byte"}, "go together"),
        ({"bytes_per_token": 4.0}, "go together"),
        ({"loss_unit": "bits-per-byte", "bytes_per_token": 0.0}, "--bytes-per-token is 0"),
        ({"columns": ("tokens",)}, "--columns holds 'tokens'. Write OURS=THEIRS"),
    ):
        with pytest.raises(FitError, match=says):
            Reading(**wrong)  # type: ignore[arg-type]


def test_small_models_with_perplexities_are_refused(write: Callable[..., Path]) -> None:
    rows = [{"parameters": 1e5, "tokens": 1e6 * (i + 1), "loss": 60.0 + i} for i in range(8)]
    with pytest.raises(RecordError, match="'val_loss': the median is 63.5, more than any loss in nats"):
        load_runs(write(rows))


def test_small_models_and_the_shipped_results_are_not_suspected() -> None:
    results = Path(__file__).parents[3] / "results"
    for folder in ("nano_iso_depth", "nano_hyperconnections", "nano_variants"):
        assert len(load_runs(results / folder)) > 10


def test_runs_whose_losses_do_not_compare_are_refused_unless_allowed(
    tmp_path: Path, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, values in (
        ("tokenizer", ("a", "b")),
        ("vocab_size", (1024, "50257")),
        ("data", ("x", "y")),
        ("val_set", ("1", "2")),
        ("seq_len", (128, 256)),
    ):
        rows = [{**row, name: values[i > 50]} for i, row in enumerate(ROWS)]
        path = write(rows)
        with pytest.raises(
            RecordError, match=f"'{name}': differs between runs .*runs.csv:2.*runs.csv:53.*--allow-mixed"
        ):
            load_runs(path)
        runs = load_runs(path, reading=Reading(allow_mixed=True))
        assert runs.mixed and runs.mixed[0].startswith(f"{name} differs")
    # Empty cells and equal numbers say nothing.
    rows = [{**row, "vocab_size": ("1024", "1024.0", "")[i % 3]} for i, row in enumerate(ROWS)]
    assert load_runs(write(rows)).mixed == ()
    options = ["--quiet", "--starts", "40", "--bootstrap", "0", "--no-rivals"]
    path = write([{**row, "data": "xy"[i > 50]} for i, row in enumerate(ROWS)])
    assert main(["fit", str(path), *options]) == 2
    assert "--allow-mixed" in capsys.readouterr().err
    assert main(["fit", str(path), *options, "--allow-mixed"]) == 0
    assert "Mixed runs, whose losses may not compare" in capsys.readouterr().out
    for command in (
        ["predict", str(path), "--equivalent", "1e9", "--bootstrap", "0"],
        ["match", str(path), "--grids", "0"],
    ):
        main([*command, "--quiet", "--starts", "40", "--allow-mixed"])
        assert "Mixed runs, whose losses may not compare" in capsys.readouterr().out, command
    one = write([{**row, "data": "x"} for row in ROWS], name="one.csv")
    two = write([{**row, "data": "y"} for row in ROWS], name="two.csv")
    with pytest.raises(FitError, match="data differs between runs"):
        concatenate(load_runs(one), load_runs(two))
    assert main(["compare", str(one), str(two), "--quiet", "--bootstrap", "0"]) == 2
    options = ["--quiet", "--bootstrap", "0", "--grids", "0", "--starts", "40", "--allow-mixed"]
    capsys.readouterr()
    main(["compare", str(one), str(two), *options])
    assert "Warning: mixed runs, whose losses may not compare: data differs" in capsys.readouterr().out


def test_records_of_several_data_sets_are_refused(tmp_path: Path) -> None:
    for i, digest in enumerate(("a" * 64, "b" * 64)):
        fields = record_fields(run_name=f"run{i}", seed=i, data_manifest_hash=digest)
        RunRecord(**fields).save(tmp_path / f"{i}.run.json")
    with pytest.raises(RecordError, match="'data': differs between runs .aaaaaaaaaaaa in .*0.run.json, bbbb"):
        load_runs(tmp_path)
    assert len(load_runs(tmp_path, reading=Reading(allow_mixed=True))) == 2


def ordinary(noise: float = 0.0005) -> list[dict[str, float]]:
    rng, rows = np.random.default_rng(0), []
    for n in np.geomspace(2e7, 5e9, 6):
        for tokens in np.geomspace(4e8, 5e10, 6):
            loss = 1.69 + 406.4 / n**0.34 + 410.7 / tokens**0.28
            rows.append({"parameters": n, "tokens": tokens, "loss": loss * math.exp(rng.normal(0, noise))})
    return rows


def test_ordinary_transformers_need_parameters_tokens_and_loss(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(ordinary())
    runs = load_runs(path)
    assert set(runs.r) == {1.0} and np.array_equal(runs.flops_per_token, 6 * runs.n_total)
    # Six token counts would be too few cells.
    assert runs.cells_by == "budget within a factor of two" and 8 <= runs.cell_count <= 18
    found = fit(runs, ChinchillaLaw(), starts=60)
    for name, true in (("E", 1.69), ("alpha", 0.34), ("beta", 0.28)):
        assert found[name] == pytest.approx(true, abs=0.02)
    options = ["--law", "chinchilla", "--quiet", "--starts", "60", "--bootstrap", "40"]
    assert main(["fit", str(path), *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fit"]["parameters"]["E"] == pytest.approx(1.69, abs=0.02)
    assert told["data"]["cells_by"] == "budget within a factor of two"
    rows = [{"N": row["parameters"], "D": row["tokens"], "L": row["loss"]} for row in ordinary()]
    names = "parameters=N,tokens=D,val_loss=L"
    assert main(["fit", str(write(rows)), *options, "--columns", names, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"]["parameters"] == told["fit"]["parameters"]
    assert main(["fit", str(write(rows)), *options]) == 2
    with pytest.raises(RecordError, match="'r': is 2 beside parameters. Give n_once and n_rec"):
        load_runs(write([{**row, "r": 2} for row in ordinary()]))


def test_one_exponent_for_both() -> None:
    law, runs = EqualExponentsLaw(), load_grid().where("r=1")
    x, theta = law.inputs(runs), law.to_theta({"A": 300.0, "alpha": 0.3, "B": 500.0, "E": 1.5})
    expected = 1.5 + 300 * x.n_total**-0.3 + 500 * x.tokens**-0.3
    assert np.allclose(law.predict(theta[None], x)[0], expected, rtol=1e-12)
    assert gradient_error(law, theta, x) is None
    exact = runs.with_loss(expected)
    found = fit(exact, law, starts=60)
    assert found["alpha"] == pytest.approx(0.3, abs=1e-6) and found["E"] == pytest.approx(1.5, abs=1e-5)


def test_n_with_embedding_counts_the_tables() -> None:
    results = load_runs(Path(__file__).parents[3] / "results" / "nano_iso_depth")
    counted = results.counting("with-embedding")
    # 1,024 tokens, padded to themselves, in embedding and head.
    assert np.array_equal(counted.n_once - results.n_once, 2 * 1024 * results.d_model)
    assert np.array_equal(counted.n_rec, results.n_rec)
    with pytest.raises(FitError, match="does not say how many parameters embedding and head have"):
        load_grid().counting("with-embedding")


def test_cells_without_budgets_are_the_first_grouping_that_has_company() -> None:
    grid = load_grid()
    bare = dataclasses.replace(grid, flops_budget=np.full(len(grid), np.nan))
    assert bare.cells_by == "budget" and bare.cell_count == grid.cell_count
    rng = np.random.default_rng(0)
    apart = dataclasses.replace(bare, tokens=bare.tokens * np.exp(rng.uniform(-0.5, 0.5, len(bare))))
    assert apart.cells_by == "budget within a factor of two"
    doublings = np.log2(apart.training_flops / apart.training_flops.min()) // 1
    keys = set(zip(doublings.tolist(), apart.architecture.tolist(), strict=True))
    assert apart.cell_count == len(keys)
    costs = bare.flops_per_token * np.exp(rng.uniform(-0.5, 0.5, len(bare)))
    two = np.where(np.arange(len(bare)) % 2, 1e9, 3e9)
    tokens = dataclasses.replace(bare, tokens=two, flops_per_token=costs)
    assert tokens.cells_by == "tokens" and tokens.cell_count == 2 * 4
    few = apart.take(np.arange(0, len(apart), 12))
    assert few.cells_by == "run" and few.cell_count == len(few)


def test_counts_without_an_injection_do_not_split_it_off(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    grid = load_grid()
    rows = [
        {**row, "n_once": float(once), "n_rec": float(rec)}
        for row, once, rec in zip(ROWS, grid.n_once, grid.n_rec, strict=True)
    ]
    path = write(rows)
    options = ["--quiet", "--starts", "40", "--bootstrap", "0", "--no-rivals"]
    assert main(["fit", str(path), *options]) == 0
    assert main(["fit", str(path), *options, "--split", "injection_once"]) == 2
    assert "needs to know how much of n_rec is the injection" in capsys.readouterr().err
    told = write([{**row, "injection": "linear"} for row in rows])
    assert main(["fit", str(told), *options, "--split", "injection_once"]) == 0


def test_columns_that_nothing_reads_are_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "published", "--starts", "40", "--bootstrap", "0", "--no-rivals"])
    err = capsys.readouterr().err
    assert err.count("columns that nothing but --where and --exclude reads: quality") == 1
