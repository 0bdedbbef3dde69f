"""Every shipped config parses, instantiates and runs one step; what each one says it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from looped_lm.common.errors import UserError
from looped_lm.configuration.config_files import LAYOUT, SHIPPED, resolve_arguments
from looped_lm.seams import SEAMS
from tests.support.cli_options import tiny_options
from tests.support.reference import accounting as closed
from tests.support.reference import recipe

CONFIGS = sorted(p.name for p in SHIPPED.glob("*.yaml"))
#: layout, recurrences, injection, lanes, residual, BPTT
ARCHITECTURES = {
    "r1.yaml": ((0, 20, 0), 1, "PassthroughInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r2.yaml": ((2, 8, 2), 2, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r8.yaml": ((2, 2, 2), 8, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_hc.yaml": ((2, 4, 2), 4, "PassthroughInjection", "HyperConnectionLanes", "PlainResidual", "FullBPTT"),
    "r8_hc.yaml": ((2, 2, 2), 8, "PassthroughInjection", "HyperConnectionLanes", "PlainResidual", "FullBPTT"),
    "r4_additive.yaml": ((2, 4, 2), 4, "AdditiveInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_passthrough.yaml": ((2, 4, 2), 4, "PassthroughInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_truncated.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "PlainResidual", "TruncatedBPTT"),
    "r8_truncated.yaml": ((2, 2, 2), 8, "LinearInjection", "SingleLane", "PlainResidual", "TruncatedBPTT"),
    "r4_diagonal.yaml": ((2, 4, 2), 4, "DiagonalInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_loop_index.yaml": ((2, 4, 2), 4, "LoopIndexInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_scaled.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "ScaledResidual", "FullBPTT"),
    "r4_swiglu.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_adapter.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_modulated.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_shared_kv.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_moe.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_previous.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_random_state.yaml": ((2, 4, 2), 4, "RandomStateInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_weighted.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_exit.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_ponder.yaml": ((2, 4, 2), 4, "LinearInjection", "SingleLane", "PlainResidual", "FullBPTT"),
    "r4_mhc.yaml": (
        (2, 4, 2),
        4,
        "PassthroughInjection",
        "DoublyStochasticLanes",
        "PlainResidual",
        "FullBPTT",
    ),
    "r8_sampled.yaml": ((2, 2, 2), 8, "LinearInjection", "SingleLane", "PlainResidual", "TruncatedBPTT"),
}
#: Components of the axes that the table above does not name.
OTHERS = {
    "r8_sampled.yaml": {"recurrences": "LogNormalPoisson"},
    "r4_swiglu.yaml": {"layer": "SwiGLULayer"},
    "r4_adapter.yaml": {"layer": "AdapterLayer"},
    "r4_modulated.yaml": {"layer": "LoopModulatedLayer"},
    "r4_shared_kv.yaml": {"layer": "SharedKeysValuesLayer"},
    "r4_moe.yaml": {"layer": "MixtureLayer"},
    "r4_previous.yaml": {"layer": "PreviousStateLayer"},
    "r4_weighted.yaml": {"objective": "WeightedRecurrences"},
    "r4_exit.yaml": {"objective": "ExitDistribution"},
    "r4_ponder.yaml": {"objective": "PonderCost"},
}
#: Those whose prelude and coda keep the paper's layer.
BLOCK_ONLY = {"r4_moe.yaml", "r4_previous.yaml", "r4_adapter.yaml", "r4_modulated.yaml", "r4_shared_kv.yaml"}
SCALES = ["base.yaml", "nano.yaml", "paper.yaml"]


def parsed(run_cli: Any, *options: str) -> dict[str, Any]:
    """The resolved configuration of `fit` with these options."""
    status, out = run_cli("fit", *options, "--print_config")
    assert status == 0, out
    return yaml.safe_load(out[out.index("seed_everything") :])


BASE: dict[str, Any] = {}


def base_config(run_cli: Any) -> dict[str, Any]:
    """The configuration without any option, parsed once."""
    if not BASE:
        BASE.update(parsed(run_cli))
    return BASE


def test_every_shipped_config_is_listed_here() -> None:
    assert set(CONFIGS) == {*ARCHITECTURES, *SCALES}


@pytest.mark.parametrize("config", ARCHITECTURES)
def test_an_architecture_config_says_what_its_name_says_and_nothing_about_scale(
    run_cli: Any, config: str
) -> None:
    assert set(yaml.safe_load((SHIPPED / config).read_text())) == {"model"}
    base, model = base_config(run_cli)["model"], parsed(run_cli, "--config", config)["model"]
    layout, r, injection, lanes, residual, bptt = ARCHITECTURES[config]
    assert (model["prelude_layers"], model["recurrent_layers"], model["coda_layers"]) == layout
    assert model["num_recurrences"] == r
    components = {key: seam.default.__name__ for key, seam in SEAMS.items()}
    components |= {"injection": injection, "lanes": lanes, "residual": residual, "bptt": bptt}
    components |= OTHERS.get(config, {})
    for key, name in components.items():
        spec = model[key]
        assert (spec["class_path"] if isinstance(spec, dict) else spec) == f"looped_lm.{name}"
    assert model["layer_in_block_only"] == (config in BLOCK_ONLY)
    architecture = {*LAYOUT, *SEAMS, "layer_in_block_only"}
    assert {k: v for k, v in model.items() if k not in architecture} == {
        k: v for k, v in base.items() if k not in architecture
    }


@pytest.mark.parametrize("config", ARCHITECTURES)
def test_an_architecture_config_states_its_layout_and_what_differs_from_the_base(config: str) -> None:
    base, own = (yaml.safe_load((SHIPPED / name).read_text())["model"] for name in ("base.yaml", config))
    assert {*LAYOUT, *SEAMS} <= set(base), "every default is in one place"
    assert set(LAYOUT) <= set(own)
    assert not [key for key, value in own.items() if key not in LAYOUT and value == base[key]]


@pytest.mark.parametrize("first", ARCHITECTURES)
def test_two_architectures_in_one_command_are_refused_by_name(first: str) -> None:
    """The second would keep what it does not state of the first: r4_hc.yaml under r8.yaml would leave its lanes."""
    for second in ARCHITECTURES:
        # Wherever the scale is.
        for words in (
            ["-c", first, "-c", "paper.yaml", "-c", second],
            [f"--config={first}", f"--config={second}"],
        ):
            with pytest.raises(UserError, match=f"^{first} and {second} each describe a whole architecture"):
                resolve_arguments(words)


def test_an_architecture_takes_scales_and_single_keys_on_top(in_folder: Path) -> None:
    layout = dict.fromkeys(LAYOUT, 1)
    files = {
        "axis.yaml": {"model": {"injection": "my.Injection", "num_recurrences": 6}},
        "small.yaml": {"model": {**layout, "size": 1}},
    }
    for name, content in files.items():
        (in_folder / name).write_text(yaml.safe_dump(content))
        resolve_arguments(["--config", "r4_hc.yaml", "--config", name, "--config", "nano.yaml"])
    # Below an architecture base.yaml changes nothing; above it would undo it.
    resolve_arguments(["--config", "base.yaml", "--config", "r4_hc.yaml"])
    with pytest.raises(UserError, match="r4_hc.yaml and base.yaml each describe"):
        resolve_arguments(["--config", "r4_hc.yaml", "--config", "base.yaml"])
    # One of a user's own counts like a shipped one, whatever else it holds.
    for more in ({}, {"size": 1}):
        mine = {"model": {**layout, "lanes": "my.Lanes", **more}, "data": {}}
        (in_folder / "mine.yaml").write_text(yaml.safe_dump(mine))
        for first, second in (("r4.yaml", "mine.yaml"), ("mine.yaml", "r4.yaml")):
            with pytest.raises(UserError, match=f"^{first} and {second} each describe"):
                resolve_arguments(["--config", first, "--config", second])


def test_an_architecture_after_a_file_that_sets_an_axis_is_refused_by_name(in_folder: Path) -> None:
    """It would keep that axis in silence, unless it states the axis itself."""
    (in_folder / "axis.yaml").write_text(yaml.safe_dump({"model": {"injection": "my.Injection"}}))
    with pytest.raises(UserError, match="model.injection would stay as axis.yaml .* Give r8.yaml first"):
        resolve_arguments(["--config", "axis.yaml", "--config", "nano.yaml", "--config", "r8.yaml"])
    resolve_arguments(["--config", "axis.yaml", "--config", "r8_hc.yaml"])
    # base.yaml, however its path is written, sets every axis back.
    for base in ("base.yaml", os.path.relpath(SHIPPED / "base.yaml")):
        resolve_arguments(["--config", "axis.yaml", "--config", base, "--config", "r8.yaml"])


def test_commands_and_sweeps_say_so(run_cli: Any, in_folder: Path) -> None:
    status, out = run_cli("fit", "--config", "r4_hc.yaml", "--config", "r8.yaml")
    assert status == 1 and "error: r4_hc.yaml and r8.yaml each" in out and "Traceback" not in out
    (in_folder / "both.yaml").write_text("configs: [r8.yaml]\ngrid:\n  config: [r4_hc.yaml]\n")
    status, out = run_cli("sweep", "plan", "both.yaml")
    assert status == 1 and "is refused: r4_hc.yaml and r8.yaml each" in out and "Traceback" not in out


@pytest.mark.parametrize("config", [*ARCHITECTURES, "base.yaml"])
def test_every_config_takes_a_step(run_cli: Any, in_folder: Path, tiny_data_dir: Path, config: str) -> None:
    status, out = run_cli(
        "fit", "--config", config, *tiny_options(tiny_data_dir), "--trainer.fast_dev_run=true"
    )
    assert status == 0, out
    assert not list(in_folder.iterdir()), "a fast_dev_run leaves nothing behind"


def test_the_paper_overlay_takes_a_step(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    status, out = run_cli(
        "fit", "--config", "r8_hc.yaml", "--config", "paper.yaml", *tiny_options(tiny_data_dir),
        "--data.cut_documents=true", "--data.vocab_size=257", "--trainer.precision=32-true",
        "--trainer.fast_dev_run=true", "--model.compile_layers=false",
    )  # fmt: skip
    assert status == 0, out


def test_the_paper_overlay_is_the_papers_scale(run_cli: Any) -> None:
    """Without a tokenizer at hand: V = 32,001, padded to 32,064; F, D, S and rates of the cell s=10, r=4, 1e18."""
    status, out = run_cli("plan", "--config", "r4.yaml", "--config", "paper.yaml")
    assert status == 0, out
    lines = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line.strip())
    lines = {k.strip(): v.strip() for k, v in lines.items()}
    assert lines["vocabulary"] == "32,001 (tables padded to 32,064)"
    assert lines["width"].startswith("d_model 640, 5 heads of 128")
    flops = closed.flops_per_token(640, 4, (2, 4, 2), "linear")
    steps, tokens = recipe.horizon_from_flops(1e18, flops, 2**18)
    assert float(lines["FLOPs/token (paper)"]) == pytest.approx(flops, rel=1e-6)
    assert lines["optimizer steps"] == f"{steps:,}" and lines["tokens"].endswith(f"(target {tokens:,.0f})")
    for role, rate in recipe.learning_rates(640, 4, 2**18, tokens).items():
        name = "lanes" if role == "lane" else role
        assert float(lines[f"learning rate: {name}"]) == pytest.approx(rate, rel=1e-5)
    assert lines["batch"].startswith("262,144 tokens")


SWAPS = {
    "--model.injection=looped_lm.AdditiveInjection": (
        "injection",
        {"class_path": "looped_lm.AdditiveInjection"},
    ),
    "--model.lanes=HyperConnectionLanes --model.lanes.num_lanes=3": (
        "lanes",
        {"class_path": "looped_lm.HyperConnectionLanes", "init_args": {"num_lanes": 3}},
    ),
    "--model.residual=ScaledResidual --model.residual.gain=0.5": (
        "residual",
        {"class_path": "looped_lm.ScaledResidual", "init_args": {"gain": 0.5}},
    ),
    "--model.objective=PonderCost --model.objective.prior=0.4": (
        "objective",
        {"class_path": "looped_lm.PonderCost", "init_args": {"beta": 0.01, "prior": 0.4}},
    ),
    "--model.recurrences=LogNormalPoisson --model.recurrences.max_recurrences=9": (
        "recurrences",
        {
            "class_path": "looped_lm.LogNormalPoisson",
            "init_args": {"sigma": 0.5, "max_recurrences": 9, "seed": 0},
        },
    ),
    "--model.bptt=looped_lm.TruncatedBPTT --model.bptt.window=2": (
        "bptt",
        {"class_path": "looped_lm.TruncatedBPTT", "init_args": {"window": 2}},
    ),
    "--model.optimizer=torch.optim.AdamW --model.optimizer.betas=[0.8,0.9]": (
        "optimizer",
        {"class_path": "torch.optim.AdamW", "init_args": {"betas": [0.8, 0.9]}},
    ),
    "--model.horizon=looped_lm.TokensPerParameter --model.horizon.ratio=20": (
        "horizon",
        {"class_path": "looped_lm.TokensPerParameter", "init_args": {"ratio": 20.0}},
    ),
    "--model.layer=looped_lm.AdapterLayer --model.layer.rank=4": (
        "layer",
        {"class_path": "looped_lm.AdapterLayer", "init_args": {"rank": 4}},
    ),
    "--model.transfer.matrix=0.02": (
        "transfer",
        {"class_path": "looped_lm.HyperP", "init_args": {"matrix": 0.02}},
    ),
    "--model.schedule.warmup=0.1 --model.schedule.warmdown=0.5": (
        "schedule",
        {
            "class_path": "looped_lm.LinearSchedule",
            "init_args": {"warmup": 0.1, "warmdown": 0.5, "final": 0.1},
        },
    ),
}


def test_every_seam_is_swapped_here() -> None:
    assert {key for key, _ in SWAPS.values()} >= set(SEAMS)


@pytest.mark.parametrize("options", SWAPS)
def test_swapping_a_seam_gives_the_expected_config(run_cli: Any, options: str) -> None:
    """No init_args of the class swapped out remain, and none of the new one are lost."""
    key, expected = SWAPS[options]
    spec = parsed(run_cli, "--config", "r8_hc.yaml", *options.split())["model"][key]
    if isinstance(spec, str):
        spec = {"class_path": spec}
    assert spec["class_path"] == expected["class_path"]
    given = expected.get("init_args", {})
    assert {k: v for k, v in spec.get("init_args", {}).items() if k in given} == given
    if key in {*SEAMS, "horizon", "schedule"}:
        assert set(spec.get("init_args", {})) == set(given)


def test_a_seam_swaps_back_from_one_with_arguments(run_cli: Any) -> None:
    model = parsed(run_cli, "--config", "r8_hc.yaml", "--model.lanes=looped_lm.SingleLane")["model"]
    assert model["lanes"] in ("looped_lm.SingleLane", {"class_path": "looped_lm.SingleLane"})


def test_callbacks_are_appended_or_replaced_as_written(run_cli: Any, tmp_path: Path) -> None:
    """`callbacks+` appends to what base.yaml lists."""
    required = [c["class_path"] for c in base_config(run_cli)["trainer"]["callbacks"]]
    more = tmp_path / "more.yaml"
    more.write_text(
        "trainer:\n  callbacks+:\n    - class_path: lightning.pytorch.callbacks.DeviceStatsMonitor\n"
    )
    appended = parsed(run_cli, "--config", str(more))["trainer"]["callbacks"]
    assert [c["class_path"] for c in appended] == [
        *required,
        "lightning.pytorch.callbacks.DeviceStatsMonitor",
    ]


def test_dropping_a_required_callback_is_named(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    """A list without `+` replaces base.yaml's; what then misses another says so."""
    (in_folder / "own.yaml").write_text("trainer:\n  callbacks:\n    - class_path: callbacks.RunSummary\n")
    status, out = run_cli("fit", "--config", "own.yaml", *tiny_options(tiny_data_dir))
    assert status == 1 and "needs callbacks.RunRecordWriter" in out and "`trainer.callbacks+` appends" in out
    assert not list(in_folder.rglob("*.ckpt")), "refused after training"
