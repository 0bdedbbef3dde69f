"""What a run trains: its configuration as `fit` would resolve it, reduced to the keys that decide what is trained.

Two ways to write a run resolve to the same configuration, so they have the same identity. Old run folders and records
hold a resolved configuration, too, which is how their runs are found again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from looped_lm.loop.component import class_path, import_class

IDENTITY = (
    "seed_everything", "model", "data", "trainer.precision", "trainer.gradient_clip_val",
    "trainer.gradient_clip_algorithm", "trainer.max_steps", "trainer.max_time", "trainer.limit_train_batches",
    "trainer.limit_val_batches", "trainer.overfit_batches",
)  # fmt: skip
"""What decides what is trained. Loggers, callbacks and devices do not."""
NOT_IDENTITY = (
    "model.val_every_steps", "model.compile_layers", "model.recompute", "data.batch_size", "data.val_batch_size",
    "data.val_rows", "data.num_workers",
)  # fmt: skip
"""Of those: what may change from one machine to the next without making it another run. An axis always counts."""


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration as one mapping from dotted keys to values.

    A component's key has its class, by one name whatever the configuration calls it, and its arguments follow without
    `init_args`. Whole numbers are integers, so that 1e18 and 1000000000000000000 are one value.
    """
    return dict(_leaves(config))


def identity(config_values: Mapping[str, Any], axes: Collection[str]) -> dict[str, Any]:
    """What of the values of a configuration decides what is trained.

    A value that every run had before its key existed is left out, so that a new key changes no identity.

    Args:
        config_values: as `values` gives them.
        axes: keys that count because they are axes of the sweep.
    """
    axes = {plain_key(axis) for axis in axes}
    before = _before()
    return {
        key: value
        for key, value in config_values.items()
        if (counts(key) or _within(key, axes)) and not (key in before and before[key] == value)
    }


def digest(an_identity: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits that follow from an identity."""
    return hashlib.sha256(json.dumps(an_identity, sort_keys=True).encode()).hexdigest()[:8]


def counts(key: str) -> bool:
    """Whether a key decides what is trained, if it is not an axis."""
    return _within(key, IDENTITY) and key not in NOT_IDENTITY


def plain_key(key: str) -> str:
    """A key without the words that say how a component is written."""
    return ".".join(part for part in key.split(".") if part not in ("class_path", "init_args"))


def _within(key: str, keys: Collection[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def _leaves(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(content, Mapping) or not content:
        yield key, _plain(content)
        return
    for name, value in content.items():
        if name == "class_path":
            yield key, _one_name(value)
        elif name != "init_args":
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
        elif value:
            yield from _leaves(value, key)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [values(item) if isinstance(item, Mapping) else _plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@cache
def _one_name(path: str) -> str:
    try:
        return class_path(import_class(path))
    except (ValueError, AttributeError):
        # Of a class that is gone, or of no class.
        return path


@cache
def _before() -> dict[str, Any]:
    from looped_lm.seams import before
    from looped_lm.training.resume import BEFORE

    return values({"model": {**BEFORE, **before()}})
