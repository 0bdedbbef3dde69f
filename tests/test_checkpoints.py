"""Comparisons of checkpoints."""

from __future__ import annotations

import pytest
import torch

from looped_lm.checkpoints import compare_tensors, differences
from tests.tiny import tiny_lm


def test_differences_name_every_leaf_that_is_not_equal() -> None:
    stored = {
        "size": 1,
        "lanes": {"class_path": "A", "init_args": {"k": 2}},
        "betas": (0.8, 0.9),
        "same": None,
    }
    given = {
        "size": 2,
        "lanes": {"class_path": "B", "init_args": {}},
        "betas": [0.8, 0.9],
        "same": None,
        "new": 3,
    }
    assert [str(d) for d in differences(stored, given)] == [
        "lanes.class_path: 'A' in the checkpoint, 'B' here",
        "lanes.init_args.k: 2 in the checkpoint, None here",
        "new: None in the checkpoint, 3 here",
        "size: 1 in the checkpoint, 2 here",
    ]


def test_hyperparameters_hold_every_default() -> None:
    """A checkpoint of a module built with defaults rebuilds it after a default has changed."""
    hparams = dict(tiny_lm().hparams)
    assert hparams["logit_softcap"] == 15.0 and hparams["rope_bf16"] is False
    assert hparams["transfer"]["init_args"]["matrix"] == 0.014


def test_tensors_that_do_not_fit_are_named() -> None:
    own = {"a": torch.zeros(2), "b": torch.zeros(3)}
    says = r"(?s)3 tensor.*a: \(4,\) in the checkpoint.*c: only in.*b: only in the model"
    with pytest.raises(ValueError, match=says):
        compare_tensors({"a": torch.zeros(4), "c": torch.zeros(1)}, own)
    compare_tensors(own, own)
