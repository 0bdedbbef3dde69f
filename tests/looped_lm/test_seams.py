"""The table of axes agrees with all that names them, and one row more is all that a new axis takes."""

from __future__ import annotations

import inspect
import json
import sys
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from fitting.records import architecture
from looped_lm import (
    AdditiveInjection,
    FullBPTT,
    HyperConnectionLanes,
    LoopedLM,
    LoopedTransformer,
    ScaledResidual,
    SwiGLULayer,
    TruncatedBPTT,
    WeightedRecurrences,
)
from looped_lm.common.errors import UserError
from looped_lm.configuration.config_files import BASE, LAYOUT, is_architecture
from looped_lm.conformance import ConformanceError, checks
from looped_lm.loop.component import PerRecurrence, class_path
from looped_lm.loop.lanes import State
from looped_lm.loop.layer import LoopContext
from looped_lm.loop.recurrences import LogNormalPoisson
from looped_lm.model.accounting import count_parameters, flops_per_token, parameter_roles
from looped_lm.seams import SEAMS, Seam
from looped_lm.sharing.export import save_pretrained
from looped_lm.sharing.load import load_pretrained
from looped_lm.sharing.reference import config_to_reference
from looped_lm.training.resume import changed_recipe
from tests.support.tiny import tiny_lm, tiny_model

#: A component of every seam that is not its default.
OTHERS: dict[str, Any] = {
    "injection": AdditiveInjection,
    "lanes": HyperConnectionLanes,
    "residual": ScaledResidual,
    "layer": SwiGLULayer,
    "bptt": TruncatedBPTT(1),
    "objective": WeightedRecurrences,
    "recurrences": LogNormalPoisson,
}


# ---- The table and what names its axes in other words ------------------------------------------------------------


def test_signatures_and_base_yaml_name_the_defaults_of_the_table() -> None:
    base = yaml.safe_load(BASE.read_text())["model"]
    for key, seam in SEAMS.items():
        owner = LoopedLM if seam.of_training else LoopedTransformer
        default = inspect.signature(owner).parameters[key].default
        assert default is (seam.default if seam.sizes else None), key
        assert base[key] == class_path(seam.default), key
    for key in LAYOUT:
        assert base[key] == inspect.signature(LoopedTransformer).parameters[key].default


def label(**overrides: Any) -> tuple[str, str]:
    lm = tiny_lm(**overrides)
    return architecture(lm.component_specs(), lm.model.num_recurrences)


def test_records_tell_every_seam_apart_and_nothing_else() -> None:
    """The words of a record's architecture follow the table, though `fitting` may not import it."""
    assert set(OTHERS) == set(SEAMS)
    plain = label()
    for key, other in OTHERS.items():
        assert label(**{key: other}) != plain, key
    specs = tiny_lm().component_specs()
    for key in specs.keys() - SEAMS.keys():
        changed = {**specs, key: {"class_path": "my.Own", "init_args": {"rate": 1.0}}}
        assert architecture(changed, 2) == plain, f"{key} says how to train, not what"
    for key, seam in SEAMS.items():
        if seam.later:
            older = {k: v for k, v in specs.items() if k != key}
            assert architecture(older, 2) == plain, f"records from before {key} are of its default"


# ---- One axis more -----------------------------------------------------------------------------------------------


class Gate(PerRecurrence, nn.Module, ABC):
    """What of the block's output reaches the lanes: the base class of an axis that the project does not have."""

    def __init__(self, d_model: int, num_recurrences: int) -> None:
        super().__init__()
        self.d_model, self.num_recurrences = d_model, num_recurrences

    @abstractmethod
    def forward(self, y: Tensor, i: int) -> Tensor:
        """Gated output (B,T,d) of recurrence `i`."""


class OpenGate(Gate):
    def forward(self, y: Tensor, i: int) -> Tensor:
        return y


class ScaledGate(Gate):
    """One factor per recurrence, and a matrix that must not be orthogonalised."""

    step_specific = True

    def __init__(self, d_model: int, num_recurrences: int, start: float = 1.0) -> None:
        super().__init__(d_model, num_recurrences)
        self.factor = nn.Parameter(torch.full((num_recurrences,), start))
        self.mix = nn.Linear(d_model, d_model, bias=False)

    def forward(self, y: Tensor, i: int) -> Tensor:
        return self.factor[i] * self.mix(y)

    def flops_per_token(self) -> int:
        return 2 * self.mix.weight.numel()

    def parameter_roles(self) -> dict[str, str]:
        return {"mix.weight": "norm"}


class IdleGate(ScaledGate):
    def forward(self, y: Tensor, i: int) -> Tensor:
        return super().forward(y, 0) + 0.0 * self.factor.sum()


class CheapGate(ScaledGate):
    def flops_per_token(self) -> int:
        return super().flops_per_token() // 2


class GatedTransformer(LoopedTransformer):
    """The use in the model, written as a subclass: a parameter, a line of the constructor, a line of the loop."""

    __signature__ = inspect.Signature(
        [
            *inspect.signature(LoopedTransformer).parameters.values(),
            inspect.Parameter("gate", inspect.Parameter.KEYWORD_ONLY, default=OpenGate),
        ]
    )

    def __init__(self, *args: Any, gate: Any = OpenGate, **others: Any) -> None:
        super().__init__(*args, **others)
        sizes = {"d_model": self.d_model, "num_recurrences": self.num_recurrences}
        self.gate: Gate = SEAMS["gate"].build(gate, sizes)
        self.refuse_untrainable()

    def refuse_untrainable(self, drawn: Any = ()) -> None:
        if hasattr(self, "gate"):  # The constructor above asks before there is one.
            super().refuse_untrainable(drawn)

    def recurrence(
        self, state: State, memory: Any, context: LoopContext, cache: Any = None
    ) -> tuple[State, Any]:
        assert context.e is not None
        i = context.i
        u = self.injection(context.e, self.lanes.read(state, i), i)
        for layer in self.block:
            u = layer(u, context, cache)
        return self.lanes.write(state, self.gate(self.norm_recur(u), i), i), memory


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The row, and the model with the axis wherever the project names the model."""
    monkeypatch.setitem(SEAMS, "gate", Seam("gate", Gate, OpenGate, ("d_model", "num_recurrences")))
    for name, module in list(sys.modules.items()):
        if name.startswith("looped_lm.") and "LoopedTransformer" in vars(module):
            monkeypatch.setattr(module, "LoopedTransformer", GatedTransformer)
    return partial(ScaledGate, start=0.5)


SPEC = {"class_path": f"{__name__}.ScaledGate", "init_args": {"start": 0.5}}


def test_a_new_axis_is_in_hyperparameters_records_and_counts(gate: Any) -> None:
    lm, plain = tiny_lm(gate=gate), tiny_lm()
    assert lm.hparams["gate"] == lm.model.architecture()["gate"] == SPEC
    # These are the components of the run record.
    assert lm.component_specs()["gate"] == SPEC
    assert "ScaledGate(start=0.5)" in architecture(lm.component_specs(), 2)[0]
    assert plain.component_specs()["gate"] == {"class_path": f"{__name__}.OpenGate", "init_args": {}}
    own = 2 + 64 * 64
    assert count_parameters(lm.model).n_rec - count_parameters(plain.model).n_rec == own
    assert sum(lm.sections.as_dict().values()) == sum(p.numel() for p in lm.model.parameters())
    assert flops_per_token(lm.model, 16) - flops_per_token(plain.model, 16) == 3 * 2 * 2 * 64 * 64
    roles = parameter_roles(lm.model)
    assert roles["gate.mix.weight"] == roles["gate.factor"] == "norm"


def test_a_new_axis_comes_back_from_an_exported_folder(gate: Any, tmp_path: Path) -> None:
    model = GatedTransformer(61, 16, size=1, head_dim=16, num_recurrences=2, gate=gate)
    folder = save_pretrained(model, tmp_path / "model")
    again = load_pretrained(folder)
    assert isinstance(again, GatedTransformer) and again.architecture() == model.architecture()
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"]["gate"] == SPEC
    config["architecture"]["gate"] = {"class_path": "os.system"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"gate is 'os\.system', which is not a subclass of Gate"):
        load_pretrained(folder)


def test_files_from_before_an_axis_have_its_default(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.delitem(SEAMS, "gate")
        folder = save_pretrained(tiny_model(), tmp_path / "model")
    loaded = load_pretrained(folder)
    assert isinstance(loaded, GatedTransformer) and isinstance(loaded.gate, OpenGate)
    # A row says which axes every file names: one that lacks these is damaged.
    config = json.loads((folder / "config.json").read_text())
    del config["architecture"]["injection"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"lacks \['injection'\]"):
        load_pretrained(folder)


def test_resuming_compares_a_new_axis(gate: Any) -> None:
    older = dict(tiny_lm().hparams)
    del older["gate"]
    assert changed_recipe({"hyper_parameters": older}, tiny_lm().hparams) == []
    with pytest.raises(
        UserError, match=r"another model.*\n  gate\.class_path: '.*OpenGate' in the checkpoint"
    ):
        changed_recipe({"hyper_parameters": older}, tiny_lm(gate=gate).hparams)


def test_a_new_axis_that_cannot_train_or_run_is_refused(gate: Any) -> None:
    with pytest.raises(UserError, match="ScaledGate has separate parameters .* or OpenGate with truncation"):
        tiny_lm(gate=gate, bptt=TruncatedBPTT(1))
    with pytest.raises(
        UserError, match="ScaledGate has separate parameters for each of 2 recurrences and no"
    ):
        tiny_lm(gate=gate, eval_recurrences=3)
    with pytest.raises(UserError, match="The reference code has no ScaledGate"):
        config_to_reference(tiny_lm(gate=gate).model)
    assert config_to_reference(tiny_lm().model)["num_recur"] == 2


def test_the_conformance_suite_takes_a_new_axis(gate: Any) -> None:
    for check in checks(ddp=False, gate=gate):
        check()
    faults = [
        ("gradients", IdleGate, r"IdleGate.factor does not train in recurrences \[1, 2, 3\]"),
        # A use of its own would be compared more sharply: `_measured` in conformance/properties.py.
        ("flops", CheapGate, "the accounting says"),
    ]
    for name, faulty, says in faults:
        (check,) = [c for c in checks(gate=faulty) if str(c) == name]
        with pytest.raises(ConformanceError, match=says):
            check()


def test_an_architecture_config_may_name_a_new_axis(gate: Any, tmp_path: Path) -> None:
    path = tmp_path / "gated.yaml"
    path.write_text(yaml.safe_dump({"model": {**dict.fromkeys(LAYOUT, 1), "gate": "my.Gate"}}))
    assert is_architecture(path)
    path.write_text(yaml.safe_dump({"model": {**dict.fromkeys(LAYOUT, 1), "size": 2}}))
    assert not is_architecture(path)


def test_a_component_without_sizes_may_be_an_instance_and_others_may_not() -> None:
    assert isinstance(tiny_model(bptt=FullBPTT).bptt, FullBPTT)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"(?s)The injection is AdditiveInjection.*give a class.*\(d_model=64\)"
    ):
        tiny_model(injection=AdditiveInjection(64))  # type: ignore[arg-type]
