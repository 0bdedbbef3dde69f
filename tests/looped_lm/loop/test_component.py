"""Components as plain data and back."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch

from looped_lm import FlopsBudget, HyperConnectionLanes, MuonH, TruncatedBPTT
from looped_lm.loop.component import as_factory, as_instance, callable_spec, component_spec


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
