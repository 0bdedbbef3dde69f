"""The run record: one JSON file per training run, the only thing that training hands to fitting.

The schema is the frozen dataclass `RunRecord`. Everything in it is a plain JSON type, so that the same object
can be written beside a checkpoint, stored under one key inside it and read back years later without this
package's classes. What training and fitting must agree on beside the schema stands here, too, since training imports
nothing else of `fitting`: where a record lies, what its architecture is called, how files are written. Only the
standard library is imported: the training callback pays nothing for it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

RECORD_SUFFIX = ".run.json"
STATUSES = ("completed", "stopped", "diverged")
FLOPS_CONVENTIONS = ("paper", "causal")
FLOPS_TOLERANCE = 0.01
"""How far training_flops of a completed run may lie from tokens·flops_per_token."""


class RecordError(ValueError):
    """A record or run table that cannot be used: names file, field, value, reason and way out."""

    def __init__(self, source: str, field: str | None, reason: str, way_out: str) -> None:
        self.source, self.field, self.reason, self.way_out = source, field, reason, way_out
        where = f"{source}: field '{field}'" if field else source
        super().__init__(f"{where}: {reason}. {way_out}")


@dataclass(frozen=True)
class RunRecord:
    """What one training run was and what it reached. Raises `RecordError` when a value cannot be right.

    Units: losses are nats per token, FLOPs are training FLOPs in the convention named by `flops_convention`
    ("paper": attention not halved for causality; "causal": halved), parameters and tokens are counts, times
    are seconds.
    """

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int
    run_name: str
    seed: int
    code_version: str
    created: str
    """ISO 8601, UTC."""
    status: str
    """completed, stopped (before its horizon) or diverged."""
    stop_reason: str | None
    data_manifest_hash: str | None
    tokenizer: str | None
    vocab_size: int
    seq_len: int
    unique_tokens: int | None
    """Distinct training tokens in the data; fewer than `tokens` means that data was repeated."""
    d_model: int
    head_dim: int
    n_heads: int
    n_kv_heads: int
    prelude_layers: int
    recurrent_layers: int
    coda_layers: int
    num_recurrences: int
    components: dict[str, dict[str, Any]]
    """Seam name -> {"class_path": str, "init_args": dict}, such as injection, lanes, bptt, optimizer. A record that is
    older than a seam lacks it.
    """
    parameters: dict[str, int]
    """Section -> count: embedding, prelude, block, injection, lanes, coda, norms, head."""
    n_once: int
    """Parameters used once per token: prelude + coda + model-level norms."""
    n_rec: int
    """Parameters used at every recurrence: block + injection (or lanes)."""
    steps: int
    steps_planned: int
    tokens: int
    tokens_target: float
    batch_tokens: int
    flops_per_token: float
    """The mean over the tokens so far where steps differ in their recurrences."""
    training_flops: float
    flops_convention: str
    flops_budget: float | None
    """Nominal budget the horizon was derived from; None if it came from tokens or steps."""
    val_loss: float | None
    """Nats per token; None only if the run did not complete."""
    val_tokens: int | None
    val_step: int | None
    wall_seconds: float
    hardware: str
    precision: str
    world_size: int
    config: dict[str, Any] | None
    rollbacks: int = 0
    """How often the run went back to a checkpoint and left out the rows that followed it."""

    def __post_init__(self) -> None:
        _check(vars(self), f"RunRecord(run_name={self.run_name!r})")

    @property
    def finished(self) -> bool:
        """Whether the run reached its horizon, so that its loss may enter a fit."""
        return self.status == "completed"

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "run record") -> RunRecord:
        """Build from plain types; `source` names the file in error messages. Raises `RecordError`."""
        _check(data, source)
        return cls(**data)

    def to_json(self) -> str:
        """The record as a JSON text, one field per line."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "run record") -> RunRecord:
        """Parse a JSON text. Raises `RecordError` if it is no JSON or not a record of this schema version."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecordError(
                source, None, f"is not valid JSON ({error})", "Write it again, or leave it out"
            ) from None
        if not isinstance(data, dict):
            raise RecordError(
                source,
                None,
                f"holds a {type(data).__name__}, not an object",
                "A run record is one JSON object",
            )
        return cls.from_dict(data, source)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write atomically to `path` (a reader sees the old file or the new one). Returns the path."""
        return write_text_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunRecord:
        """Read one record file. Raises `RecordError` naming file and field."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(
                str(path), None, f"cannot be read ({error})", "Check the path and the file"
            ) from None
        return cls.from_json(text, str(path))


# The names that CSV files use for the shipped components, so that records and CSV rows make one architecture.
_NAMES = {
    "LinearInjection": "linear",
    "AdditiveInjection": "additive",
    "PassthroughInjection": "passthrough",
    "SingleLane": "",
    "FullBPTT": "full",
    "TruncatedBPTT": "truncated",
    "PassthroughInjection+HyperConnectionLanes(num_lanes=2)": "hyperconnections",
    "PassthroughInjection+HyperConnectionLanes": "hyperconnections",
}


def architecture(components: Mapping[str, Mapping[str, Any]], num_recurrences: int) -> tuple[str, str]:
    """(injection with lanes, gradients) in the words of the CSV files; a component of one's own keeps its
    label. Counts of recurrences that are drawn in training stand beside the gradients; their seed does not.

    `components` are those of a run record.
    """
    injection, bptt = _fixed_architecture(components, num_recurrences)
    counts = components.get("recurrences")
    if counts is not None:
        init_args = {k: v for k, v in counts["init_args"].items() if k != "seed"}
        label = _label({"recurrences": {**counts, "init_args": init_args}}, "recurrences")
        if label != "FixedRecurrences":
            return injection, f"{bptt}+{label}"
    return injection, bptt


def _fixed_architecture(components: Mapping[str, Mapping[str, Any]], num_recurrences: int) -> tuple[str, str]:
    if num_recurrences == 1:
        return "none", "full"
    parts = [_label(components, "injection")]
    # Records of models made before a seam existed do not name it.
    parts += [_label(components, seam) for seam in ("lanes", "residual") if seam in components]
    parts = [part for part in parts if part != "PlainResidual"]
    whole = "+".join(parts)
    injection = _NAMES.get(whole) or "+".join(filter(None, (_NAMES.get(part, part) for part in parts)))
    bptt = _label(components, "bptt")
    return injection, _NAMES.get(bptt, bptt)


def _label(components: Mapping[str, Mapping[str, Any]], seam: str) -> str:
    if seam not in components:
        return "unnamed"
    arguments = {k: v for k, v in components[seam]["init_args"].items() if v is not None}
    name = str(components[seam]["class_path"]).rpartition(".")[2]
    return f"{name}({', '.join(f'{k}={v}' for k, v in sorted(arguments.items()))})" if arguments else name


def record_path(checkpoint: str | os.PathLike[str]) -> Path:
    """Where the record of a checkpoint lies: beside it, `<stem>.run.json`."""
    path = Path(checkpoint)
    return path.with_name(path.stem + RECORD_SUFFIX)


def write_text_atomically(path: str | os.PathLike[str], text: str) -> Path:
    """Write UTF-8 text the way `write_bytes_atomically` does."""
    return write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write bytes through a temporary file in the same folder, fsync and rename. Creates missing folders."""
    target = Path(path)
    try:
        return _write(target, data)
    except OSError as error:
        # What fails on a handle names no file.
        if error.errno is not None and error.filename is None:
            error.filename = str(target)
        raise


def _write(target: Path, data: bytes) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; a record is for every reader that the folder admits
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


# ---------------------------------------------------------------------------------------------- validation

# With `from __future__ import annotations` a field's type is its source text: "int", "float | None", ...
_FIELDS = {field.name: str(field.type) for field in dataclasses.fields(RunRecord)}
#: Fields that came after the first records were written.
_LATER = {field.name for field in dataclasses.fields(RunRecord) if field.default is not dataclasses.MISSING}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "dict": (dict,),
}

_POSITIVE = {
    "vocab_size", "seq_len", "unique_tokens", "d_model", "head_dim", "n_heads", "n_kv_heads",
    "recurrent_layers", "num_recurrences", "n_rec", "steps_planned", "tokens_target", "batch_tokens",
    "flops_per_token", "flops_budget", "val_loss", "val_tokens", "world_size",
}  # fmt: skip
_NOT_NEGATIVE = {
    "prelude_layers", "coda_layers", "n_once", "steps", "tokens", "training_flops", "val_step",
    "wall_seconds", "rollbacks",
}  # fmt: skip
_POSITIVE_WHEN_COMPLETED = ("steps", "tokens", "training_flops", "n_once")
_CHOICES = {"status": STATUSES, "flops_convention": FLOPS_CONVENTIONS}


def _check(data: Mapping[str, Any], source: str) -> None:
    """The one place where records are judged; raises `RecordError` for the first thing that is wrong."""
    version = data.get("schema_version")
    if version != RunRecord.SCHEMA_VERSION or isinstance(version, bool):
        raise RecordError(
            source,
            "schema_version",
            f"is {version!r}, this version of fitting reads {RunRecord.SCHEMA_VERSION}",
            "Write the record again with this version of the code, or read it with the version that wrote it",
        )
    missing = [name for name in _FIELDS if name not in data and name not in _LATER]
    if missing:
        raise RecordError(
            source, missing[0], "is missing", f"Missing in all: {', '.join(missing)}; write the record again"
        )
    unknown = [str(name) for name in data if name not in _FIELDS]
    if unknown:
        raise RecordError(
            source, unknown[0], "is unknown to this schema version", "Remove it, or raise the schema version"
        )
    for name, annotation in _FIELDS.items():
        if name in data:
            _check_value(name, annotation, data[name], source)
    _check_together(data, source)


def _check_value(name: str, annotation: str, value: Any, source: str) -> None:
    kind, _, rest = annotation.partition("|")
    base = kind.strip().partition("[")[0]
    if value is None:
        if rest.strip() == "None":
            return
        raise RecordError(
            source, name, f"is null but must be of type {annotation}", "Fill it in and write it again"
        )
    if isinstance(value, bool) or not isinstance(value, _PYTHON_TYPES[base]):
        raise RecordError(
            source,
            name,
            f"is {value!r} of type {type(value).__name__}, not {annotation}",
            "Correct the writer",
        )
    if isinstance(value, dict):
        _check_plain(name, value, source)
    if isinstance(value, int | float):
        if not math.isfinite(value):
            raise RecordError(
                source, name, f"is {value!r}, not a finite number", "Mark the run as diverged or leave it out"
            )
        if (name in _POSITIVE and value <= 0) or (name in _NOT_NEGATIVE and value < 0):
            sign = "positive" if name in _POSITIVE else "zero or more"
            raise RecordError(
                source, name, f"is {value!r} but must be {sign}", "Correct it or leave the run out"
            )
    if name in _CHOICES and value not in _CHOICES[name]:
        raise RecordError(source, name, f"is {value!r}", f"Use one of: {', '.join(_CHOICES[name])}")


def _check_together(data: Mapping[str, Any], source: str) -> None:
    if data["status"] == "completed":
        if data["val_loss"] is None:
            raise RecordError(
                source,
                "val_loss",
                "is null in a completed run",
                "Validate the checkpoint, or set another status",
            )
        for name in _POSITIVE_WHEN_COMPLETED:
            if data[name] <= 0:
                raise RecordError(
                    source, name, f"is {data[name]!r} in a completed run", "Correct it or set another status"
                )
        if data["val_step"] != data["steps"]:
            raise RecordError(
                source,
                "val_step",
                f"is {data['val_step']!r} in a run completed at step {data['steps']}, so val_loss is not the "
                "loss of the whole run",
                "Validate at the last step, or set another status",
            )
        spent = data["tokens"] * data["flops_per_token"]
        if abs(data["training_flops"] / spent - 1) > FLOPS_TOLERANCE:
            raise RecordError(
                source,
                "training_flops",
                f"is {data['training_flops']:.6g}, but tokens·flops_per_token is {spent:.6g}",
                "Correct the wrong one of the three and write the record again",
            )
    for name, component in data["components"].items():
        shape = {"class_path": str, "init_args": dict}
        if not isinstance(component, dict) or any(
            not isinstance(component.get(k), t) for k, t in shape.items()
        ):
            raise RecordError(
                source,
                f"components.{name}",
                f"is {component!r}",
                'Give {"class_path": str, "init_args": {...}}',
            )
    for name, count in data["parameters"].items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise RecordError(source, f"parameters.{name}", f"is {count!r}", "Give a count, zero or more")


def _check_plain(path: str, value: Any, source: str) -> None:
    """Nested values must survive JSON unchanged: no tuples, no NaN, only string keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RecordError(source, path, f"has the key {key!r}, which is no string", "Use string keys")
            _check_plain(f"{path}.{key}", item, source)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(f"{path}[{index}]", item, source)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RecordError(
            source, path, f"is {value!r}, which JSON cannot hold", "Write null or a string instead"
        )
    elif not isinstance(value, str | int | float | bool | None):
        raise RecordError(
            source, path, f"is a {type(value).__name__}, not a plain JSON type", "Convert it before recording"
        )
