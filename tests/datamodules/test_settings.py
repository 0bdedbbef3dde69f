"""Settings of a preparation."""

from __future__ import annotations

import pytest

from datamodules import PrepareSettings
from datamodules.errors import DataError
from datamodules.settings import canonical_json, sha256_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seq_len": -3}, "seq_len is -3"),
        ({"val_fraction": 0.0}, "val_fraction is 0.0"),
        ({"val_fraction": 1.0}, "val_fraction is 1.0"),
        ({"packing_buffer": 0}, "packing_buffer is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(DataError, match=message):
        PrepareSettings(**settings)


def test_equal_values_have_equal_json():
    assert canonical_json({"b": (1, 2), "a": "ü"}) == canonical_json({"a": "ü", "b": [1, 2]})
    assert sha256_of({"a": 1}) != sha256_of({"a": 2})
