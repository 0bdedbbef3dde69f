"""Components as plain data and back."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path

import pytest
import torch

from looped_lm import AdditiveInjection, FlopsBudget, HyperConnectionLanes, MuonH, TruncatedBPTT
from looped_lm.common.errors import UserError
from looped_lm.loop.component import as_factory, as_instance, build, callable_spec, component_spec
from tests.support.tiny import tiny_model, tokens


def test_specs_hold_what_the_constructor_was_given() -> None:
    assert component_spec(FlopsBudget(flops=3e12)) == {
        "class_path": "looped_lm.FlopsBudget",
        "init_args": {"flops": 3e12},
    }
    assert component_spec(TruncatedBPTT(2))["init_args"] == {"window": 2}
    lanes = HyperConnectionLanes(8, 4, 3)
    assert component_spec(lanes, sizes=2) == {
        "class_path": "looped_lm.HyperConnectionLanes",
        "init_args": {"num_lanes": 3},
    }


def test_specs_hold_defaults_too() -> None:
    """A default that changes later must not rebuild another component."""
    assert component_spec(TruncatedBPTT())["init_args"] == {"window": None}
    assert component_spec(HyperConnectionLanes(8, 4), sizes=2)["init_args"] == {"num_lanes": 2}


class Variadic(TruncatedBPTT):
    def __init__(self, *windows: int) -> None:
        super().__init__(windows[0])


def test_arguments_without_a_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Variadic takes \*windows, which no configuration"):
        Variadic(2)


def test_a_spec_builds_the_same_component() -> None:
    rebuilt = as_factory(component_spec(HyperConnectionLanes(8, 4, num_lanes=3), sizes=2))(8, 4)
    assert isinstance(rebuilt, HyperConnectionLanes) and rebuilt.num_lanes == 3
    assert as_instance(component_spec(FlopsBudget(5e9))).flops == 5e9


def test_copies_keep_their_arguments() -> None:
    for clone in (copy.deepcopy(HyperConnectionLanes(8, 4, 3)), pickle.loads(pickle.dumps(TruncatedBPTT(2)))):
        assert component_spec(clone)["init_args"]


def test_optimizer_factories() -> None:
    spec = callable_spec(MuonH, "optimizer")
    assert spec["class_path"] == "looped_lm.MuonH" and spec["init_args"]["momentum"] == 0.95
    partial = functools.partial(torch.optim.AdamW, lr=0.1, betas=(0.9, 0.99))
    spec = callable_spec(partial, "optimizer")
    assert spec["init_args"]["betas"] == [0.9, 0.99] and spec["init_args"]["weight_decay"] == 0.01
    assert as_factory(spec)([torch.nn.Parameter(torch.ones(2))]).defaults["lr"] == 0.1
    with pytest.raises(ValueError, match="optimizer is .*lambda.*which a checkpoint cannot restore"):
        callable_spec(lambda params: None, "optimizer")


def test_what_cannot_be_stored_is_refused() -> None:
    class Local(TruncatedBPTT):
        pass

    with pytest.raises(ValueError, match="defined inside a function"):
        component_spec(Local(1))
    with pytest.raises(ValueError, match="cannot store as plain data"):
        component_spec(TruncatedBPTT(torch.tensor(2)))  # type: ignore[arg-type]


def test_a_wrong_class_path_lists_what_exists() -> None:
    with pytest.raises(ValueError, match="has no 'TruncatedBTT'; it has: .*TruncatedBPTT"):
        as_factory({"class_path": "looped_lm.loop.bptt.TruncatedBTT"})
    with pytest.raises(ValueError, match="cannot import module 'loopedlm'"):
        as_factory({"class_path": "loopedlm.TruncatedBPTT"})
    with pytest.raises(ValueError, match="class_path and init_args"):
        as_factory({"class": "looped_lm.TruncatedBPTT"})


SIZES = {"d_model": 8, "num_recurrences": 4}


class Faulty(AdditiveInjection):
    """A bug of its author's, in the constructor or in the forward pass."""

    def __init__(self, d_model: int, at_once: bool = True) -> None:
        super().__init__(d_model)
        if at_once:
            len(d_model)  # type: ignore[arg-type]

    def forward(self, e: torch.Tensor, s: torch.Tensor, i: int) -> torch.Tensor:
        raise ValueError("the state is upside down")


def raised_in(caught: pytest.ExceptionInfo[BaseException]) -> tuple[str, str]:
    """File and function of the innermost frame."""
    return caught.traceback[-1].path.name, caught.traceback[-1].name  # type: ignore[union-attr]


def test_a_fault_in_a_component_keeps_its_error_and_its_line() -> None:
    for make in (lambda: tiny_model(injection=Faulty), lambda: as_instance(spec_of_faulty())):
        with pytest.raises(TypeError, match="^object of type 'int' has no len") as caught:
            make()
        assert raised_in(caught) == ("test_component.py", "__init__")
    model = tiny_model(injection=functools.partial(Faulty, at_once=False))
    with pytest.raises(ValueError, match="^the state is upside down$") as in_forward:
        model(tokens()[0])
    assert type(in_forward.value) is ValueError
    assert raised_in(in_forward) == ("test_component.py", "forward")


def spec_of_faulty() -> dict[str, object]:
    return {"class_path": f"{__name__}.Faulty", "init_args": {"d_model": 8}}


@pytest.mark.parametrize(
    "factory, says",
    [
        (AdditiveInjection, r"AdditiveInjection\(d_model\) .* \(d_model=8, num_recurrences=4\): too many"),
        (functools.partial(HyperConnectionLanes, lanes=3), "Hyper.* an unexpected keyword argument 'lanes'"),
        (functools.partial(HyperConnectionLanes, d_model=3), "Hyper.* multiple values for argument 'd_model'"),
        ({"class_path": "looped_lm.HyperConnectionLanes", "init_args": {"lanes": 3}}, "HyperConnectionLanes.*'lanes'"),
        (lambda d_model: None, "<lambda>.*too many positional"),
        (HyperConnectionLanes(8, 4), "is HyperConnectionLanes.*give a class or a functools.partial"),
        ("looped_lm.SingleLane", "is 'looped_lm.SingleLane': give a class"),
    ],
)  # fmt: skip
def test_a_constructor_that_does_not_take_the_sizes_is_one_message(factory: object, says: str) -> None:
    with pytest.raises(UserError, match=f"^The lanes {says}"):
        build(factory, "lanes", SIZES)  # type: ignore[arg-type]


def test_arguments_that_python_refuses_are_refused_in_the_class_s_name() -> None:
    with pytest.raises(
        TypeError, match=r"HyperConnectionLanes.__init__\(\) got an unexpected keyword argument"
    ):
        HyperConnectionLanes(8, 4, lanes=3)  # type: ignore[call-arg]


def test_an_import_that_fails_inside_a_module_keeps_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_written.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name") as caught:
        as_factory({"class_path": "half_written.Injection"})
    assert raised_in(caught) == ("half_written.py", "<module>")
