"""Checkpoints of the reference code, written from the format's description, against the plain re-implementation."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fitting.records import RunRecord
from looped_lm import DiagonalInjection, LoopedLM, ScaledResidual, Steps
from looped_lm.commands.convert import main
from looped_lm.common.errors import UserError
from looped_lm.sharing.reference import config_to_reference, reference_name
from tests.support.reference import checkpoint as reference
from tests.support.tiny import TinyData, tiny_model, tiny_trainer


def convert(folder: Path, out: Path, *options: str) -> LoopedLM:
    main(["--from", "reference", str(folder), "--out", str(out), *options])
    return LoopedLM.load_from_checkpoint(out)


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    (model,), (meta,) = folder.glob("*.pt"), folder.glob("*.json")
    return torch.load(model, weights_only=True), json.loads(meta.read_text())


@pytest.mark.parametrize("injection", reference.INJECTIONS)
def test_logits_and_round_trip(tmp_path: Path, injection: str) -> None:
    config = reference.model_config(injection)
    files, weights = reference.tensors(config)
    reference.write(tmp_path / "theirs", config, files)
    lm = convert(tmp_path / "theirs", tmp_path / "ours.ckpt")
    tokens = torch.randint(70, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, expected = lm.model(tokens), reference.logits(config, weights, tokens)
    assert expected.std() > 0.5, "logits that are all alike would prove nothing"
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)

    main(["--to", "reference", str(tmp_path / "ours.ckpt"), "--out", str(tmp_path / "back")])
    back, meta = read(tmp_path / "back")
    assert {f.name for f in (tmp_path / "back").iterdir()} == {"model_001200.pt", "meta_001200.json"}
    assert back.keys() == files.keys()
    for name, tensor in files.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
    # Gradients through all recurrences is what an empty window means.
    assert meta["model_config"] == {**config, "bptt_k": 3} and meta["step"] == 1200


def test_prefixes_precision_and_a_window(tmp_path: Path) -> None:
    """As a compiled model on a GPU saves: `_orig_mod.` before names, the embedding in bfloat16."""
    config = reference.model_config("inject_init_prelude", bptt_k=2, n_kv_head=3)
    files, _ = reference.tensors(config)
    files["transformer.wte.weight"] = files["transformer.wte.weight"].to(torch.bfloat16)
    reference.write(tmp_path / "a", config, {f"_orig_mod.{name}": t for name, t in files.items()})
    lm = convert(tmp_path / "a", tmp_path / "a.ckpt")
    assert [lm.model.bptt.keeps_grad(i, 3) for i in range(3)] == [False, True, True]
    main(["--to", "reference", str(tmp_path / "a.ckpt"), "--out", str(tmp_path / "back")])
    back, meta = read(tmp_path / "back")
    assert back.keys() == files.keys() and meta["model_config"] == config
    assert all(torch.equal(back[name].view(torch.uint8), t.view(torch.uint8)) for name, t in files.items())


def test_the_record_says_what_is_known(tmp_path: Path) -> None:
    config = reference.model_config("hyperconnect")
    files, _ = reference.tensors(config)
    for step in (900, 1200):
        reference.write(tmp_path / "theirs", config, files, step)
    convert(tmp_path / "theirs", tmp_path / "a.ckpt", "--batch-tokens", "1024")
    record = RunRecord.load(tmp_path / "a.run.json")
    assert (record.steps, record.tokens, record.num_recurrences) == (1200, 1200 * 1024, 3)
    assert record.n_once + record.n_rec == sum(
        t.numel() for name, t in files.items() if "wte" not in name and "lm_head" not in name
    )
    assert record.status == "stopped" and not record.finished and record.val_loss is None
    assert record.components["lanes"] == {
        "class_path": "looped_lm.HyperConnectionLanes",
        "init_args": {"num_lanes": 2},
    }
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)["run_record"]
    assert stored == record.to_dict()
    convert(tmp_path / "theirs", tmp_path / "b.ckpt", "--step", "900")
    assert RunRecord.load(tmp_path / "b.run.json").steps == 900


def test_a_fault_of_ours_in_reading_keeps_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(config: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr("looped_lm.sharing.reference_folder.architecture_from_reference", faulty)
    with pytest.raises(ValueError, match="^a bug$"):
        convert(fixture(tmp_path), tmp_path / "a.ckpt")


def test_a_checkpoint_is_read_whole_and_verified_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(fixture(tmp_path), tmp_path / "a.ckpt")
    whole, verified = [], []
    load, test = torch.load, zipfile.ZipFile.testzip
    monkeypatch.setattr(torch, "load", lambda *a, **o: (o.get("mmap") or whole.append(a), load(*a, **o))[1])
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: (verified.append(self), test(self))[1])
    main(["--to", "reference", str(tmp_path / "a.ckpt"), "--out", str(tmp_path / "back")])
    assert len(whole) == len(verified) == 1


def test_training_does_not_go_on_without_an_optimizer(tmp_path: Path) -> None:
    config = reference.model_config("additive")
    files, _ = reference.tensors(config)
    convert(reference.write(tmp_path / "theirs", config, files), tmp_path / "a.ckpt", "--batch-tokens", "128")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    lm = LoopedLM(**{**stored, "horizon": Steps(1300)})
    with pytest.raises(ValueError, match="no optimizer state, like every converted one"):
        tiny_trainer(tmp_path).fit(lm, TinyData(vocab_size=70), ckpt_path=tmp_path / "a.ckpt")


def fixture(tmp_path: Path, tensors: Any = None, config: Any = None, injection: str = "additive") -> Path:
    """A folder with some tensors and some keys of the configuration changed; None as value removes one."""
    base = reference.model_config(injection)
    files, _ = reference.tensors(base)
    content = {k: v for k, v in {**files, **(tensors or {})}.items() if v is not None}
    keys = {k: v for k, v in {**base, **(config or {})}.items() if v != "absent"}
    return reference.write(tmp_path / "theirs", keys, content)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"tensors": {"x0_lambdas": torch.ones(3)}}, "unknown: x0_lambdas"),
        ({"tensors": {"inject.weight": torch.ones(3)}}, "unknown: inject.weight"),
        ({"tensors": {"norm_recur.weight": None}}, "missing: norm_recur.weight"),
        ({"tensors": {"norm_recur.weight": torch.ones(3)}}, r"norm_recur.weight: \(3,\) in the checkpoint"),
        ({"tensors": {"_orig_mod.lm_head.weight": torch.ones(3)}}, "both with and without _orig_mod."),
        ({"config": {"n_layer": 3}}, "unknown: n_layer"),
        ({"config": {"num_recur": "absent"}}, "missing: num_recur"),
        ({"config": {"input_injection": "gated"}}, "input_injection is 'gated'; known are inject_init_prelude"),
        ({"config": {"n_head": 5}}, "n_embd 192 is not a multiple of n_head 5"),
        ({"config": {"n_head": 0}}, "meta_001200.json: n_head is 0; it must be a whole number of at least 1"),
        ({"config": {"sequence_len": "2048"}}, "sequence_len is '2048'"),
        ({"config": {"logit_softcap": None}}, "logit_softcap is None; it must be a positive number"),
        ({"config": {"n_coda": 2}}, "missing: transformer.coda.1.attn.c_k.weight"),
        ({"injection": "hyperconnect", "config": {"bptt_k": 2}}, "HyperConnectionLanes has separate parameters"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    folder = fixture(tmp_path, **changes)
    with pytest.raises(ValueError, match=says):
        main(["--from", "reference", str(folder), "--out", str(tmp_path / "out.ckpt")])
    assert {f.name for f in tmp_path.iterdir()} == {"theirs"}, "nothing is written"


def test_files_that_are_missing_or_no_tensors(tmp_path: Path) -> None:
    def attempt(*options: str) -> None:
        main(["--from", "reference", str(tmp_path / "theirs"), "--out", str(tmp_path / "out.ckpt"), *options])

    with pytest.raises(UserError, match="no file model_<step>.pt"):
        attempt()
    folder = fixture(tmp_path)
    with pytest.raises(UserError, match="no step 7; it has 1200"):
        attempt("--step", "7")
    (folder / "model_001200.pt").write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="model_001200.pt and meta_001200.json cannot be read"):
        attempt()
    meta = (folder / "meta_001200.json").read_text()
    for path in folder.iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot be read \(\w+(: [^\n]+)?\); the first must hold"):
        attempt()
    (folder / "meta_001200.json").write_text(meta)
    # A pickle may run code; weights_only refuses it.
    torch.save({"a": Path("x")}, folder / "model_001200.pt")
    with pytest.raises(ValueError, match="the first must hold tensors only"):
        attempt()
    torch.save([1], folder / "model_001200.pt")
    with pytest.raises(ValueError, match="something other than a mapping"):
        attempt()
    (folder / "model_001200.pt").rename(folder / "model_000007.pt")
    (folder / "meta_001200.json").rename(folder / "meta_000007.json")
    torch.save({}, folder / "model_000007.pt")
    with pytest.raises(ValueError, match="says that it is of step 1200, but its name says 7"):
        attempt()
    (folder / "model_000007.pt").rename(folder / "model_001200.pt")
    (folder / "meta_000007.json").rename(folder / "meta_001200.json")
    (folder / "meta_001200.json").write_text('{"model_config": [1]}')
    with pytest.raises(ValueError, match="cannot be read"):
        attempt()
    (folder / "meta_001200.json").unlink()
    with pytest.raises(UserError, match="meta_001200.json is missing"):
        attempt()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder, out = fixture(tmp_path), tmp_path / "out.ckpt"
    out.write_text("mine")
    with pytest.raises(UserError, match="nothing is overwritten"):
        main(["--from", "reference", str(folder), "--out", str(out)])
    assert out.read_text() == "mine"
    (tmp_path / "other.run.json").write_text("mine, too")
    with pytest.raises(UserError, match="other.run.json exists, and nothing is overwritten"):
        main(["--from", "reference", str(folder), "--out", str(tmp_path / "other.pt")])
    assert not (tmp_path / "other.pt").exists()


def test_a_size_that_is_not_the_width_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(fixture(tmp_path, config={"size": 2}), tmp_path / "out.ckpt")
    assert "gives size 2; n_embd 192 decides, which is size 3" in capsys.readouterr().err


def test_options_of_the_other_direction_are_refused(tmp_path: Path) -> None:
    for option in ("--step", "--batch-tokens"):
        with pytest.raises(ValueError, match="belong to --from"):
            main(["--to", "reference", str(tmp_path / "a.ckpt"), "--out", str(tmp_path / "b"), option, "5"])


def test_what_the_reference_code_cannot_express_is_refused() -> None:
    with pytest.raises(
        ValueError, match="no DiagonalInjection with SingleLane; it has LinearInjection with SingleLane"
    ):
        config_to_reference(tiny_model(injection=DiagonalInjection))
    with pytest.raises(ValueError, match="no ScaledResidual"):
        config_to_reference(tiny_model(residual=ScaledResidual))
    with pytest.raises(ValueError, match="no tensor for injection.gate"):
        reference_name("injection.gate")
