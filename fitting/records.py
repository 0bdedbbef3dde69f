"""The run record: one JSON file per training run, the only thing that training hands to fitting.

It holds plain JSON types only, so that a checkpoint can store it, too, and years later no package is needed to
read it. Paths of records, names of architectures and the writing of files are here because training and fitting
must agree on them. Only the standard library is imported.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

RECORD_SUFFIX = ".run.json"
STATUSES = ("completed", "stopped", "diverged")
FLOPS_CONVENTIONS = ("paper", "causal")
FLOPS_TOLERANCE = 0.01
"""Largest relative difference of a completed run's training_flops from tokens·flops_per_token."""


class RecordError(ValueError):
    """A record or run table that cannot be used. The message names file, field, value, reason and way out."""

    def __init__(self, source: str, field: str | None, reason: str, way_out: str) -> None:
        self.source, self.field, self.reason, self.way_out = source, field, reason, way_out
        where = f"{source}: field '{field}'" if field else source
        super().__init__(f"{where}: {reason}. {way_out}")


@dataclass(frozen=True)
class RunRecord:
    """What one training run was and what it reached. Raises `RecordError` if a value cannot be right.

    Units: nats per token, seconds, counts, and training FLOPs in the convention named by `flops_convention` ("paper":
    attention not halved for causality; "causal": halved).
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
    """Distinct training tokens; fewer than `tokens` means that data was repeated."""
    d_model: int
    head_dim: int
    n_heads: int
    n_kv_heads: int
    prelude_layers: int
    recurrent_layers: int
    coda_layers: int
    num_recurrences: int
    components: dict[str, dict[str, Any]]
    """Seam name -> {"class_path": str, "init_args": dict}. A record that is older than a seam lacks it."""
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
    """Nominal budget from which the horizon was derived; None if the horizon was given in tokens or steps."""
    val_loss: float | None
    """Nats per token; None only if the run did not complete."""
    val_tokens: int | None
    val_step: int | None
    wall_seconds: float
    hardware: str
    precision: str
    world_size: int
    config: dict[str, Any] | None
    n_once_active: int | None = None
    n_rec_active: int | None = None
    """Of `n_once` and `n_rec`, the parameters that one token uses; None: all. Fewer in mixtures of experts."""
    rollbacks: int = 0
    """How often the run went back to a checkpoint and skipped the training rows that followed it."""

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
        """From plain types; `source` names the file in error messages. Raises `RecordError`."""
        _check(data, source)
        return cls(**data)

    def to_json(self) -> str:
        """The record as a JSON text, one field per line."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "run record") -> RunRecord:
        """Parse a JSON text. Raises `RecordError` if it is not a record of this schema version."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            reason = f"is not valid JSON ({error})"
            raise RecordError(source, None, reason, "Write it again, or leave it out") from None
        if not isinstance(data, dict):
            reason = f"holds a {type(data).__name__}, not an object"
            raise RecordError(source, None, reason, "A run record is one JSON object")
        return cls.from_dict(data, source)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to `path` atomically: a reader sees the old file or the new one. Returns the path."""
        return write_text_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunRecord:
        """Read one record file. Raises `RecordError` naming file and field."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = f"cannot be read ({error})"
            raise RecordError(str(path), None, reason, "Check the path and the file") from None
        return cls.from_json(text, str(path))


TRAINING_COMPONENTS = ("optimizer", "horizon", "transfer", "schedule")
"""Components of a record that do not belong to its architecture; all others do."""
UNNAMED_COMPONENTS = {
    "lanes": "SingleLane",
    "residual": "PlainResidual",
    "layer": "PreNormLayer",
    "objective": "FinalCrossEntropy",
    "recurrences": "FixedRecurrences",
}
"""Seam -> the component that a label leaves out: models made before the seam existed behave like it."""
_GRADIENTS = ("bptt", "recurrences")
# What CSV files call the shipped components, so that a record and a CSV row can be of one architecture.
_CSV_NAMES = {
    "LinearInjection": "linear",
    "AdditiveInjection": "additive",
    "PassthroughInjection": "passthrough",
    "FullBPTT": "full",
    "TruncatedBPTT": "truncated",
    "PassthroughInjection+HyperConnectionLanes(num_lanes=2)": "hyperconnections",
    "PassthroughInjection+HyperConnectionLanes": "hyperconnections",
}


def architecture(components: Mapping[str, Mapping[str, Any]], num_recurrences: int) -> tuple[str, str]:
    """(injection with all other `components` of the model, gradients) of a record, as CSV files label them.

    A component of your own is labelled by class name and arguments. Where training draws the number of recurrences,
    the gradients' label names the distribution. Seeds of draws are left out.
    """
    injection, bptt = "none", "full"
    if num_recurrences > 1:
        others = [seam for seam in components if seam not in ("injection", *_GRADIENTS, *TRAINING_COMPONENTS)]
        parts = list(filter(None, (_label(components, seam) for seam in ("injection", *others))))
        whole = "+".join(parts)
        injection = _CSV_NAMES.get(whole) or "+".join(_CSV_NAMES.get(part, part) for part in parts)
        bptt = _label(components, "bptt")
    drawn = _label(components, "recurrences") if "recurrences" in components else ""
    return injection, "+".join(filter(None, (_CSV_NAMES.get(bptt, bptt), drawn)))


def _label(components: Mapping[str, Mapping[str, Any]], seam: str) -> str:
    """Class and arguments of a component; empty for the one that a label leaves out."""
    if seam not in components:
        return "unnamed"
    arguments = {k: v for k, v in components[seam]["init_args"].items() if v is not None and k != "seed"}
    name = str(components[seam]["class_path"]).rpartition(".")[2]
    if arguments:
        return f"{name}({', '.join(f'{k}={v}' for k, v in sorted(arguments.items()))})"
    return "" if name == UNNAMED_COMPONENTS.get(seam) else name


def record_path(checkpoint: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint's record: beside it, `<stem>.run.json`."""
    path = Path(checkpoint)
    return path.with_name(path.stem + RECORD_SUFFIX)


def write_text_atomically(path: str | os.PathLike[str], text: str) -> Path:
    """Write UTF-8 text the way `write_bytes_atomically` does."""
    return write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write through a temporary file in the same folder, fsync and rename. Creates missing folders."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # An error from an open file does not name it.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(target)
        raise
    return target


# With `from __future__ import annotations` a field's type is its source text: "int", "float | None", ...
_FIELDS = {field.name: str(field.type) for field in dataclasses.fields(RunRecord)}
#: Fields that came after the first records were written.
_LATER = {field.name for field in dataclasses.fields(RunRecord) if field.default is not dataclasses.MISSING}
_PYTHON_TYPES: dict[str, Any] = {"int": int, "float": int | float, "str": str, "dict": dict}
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
_Wrong = tuple[str, str, str]
"""Field, reason and way out of something that is wrong with a record."""


def _check(data: Mapping[str, Any], source: str) -> None:
    """The one check of records. Raises `RecordError` for the first thing that is wrong."""
    for field, reason, way_out in _wrongs(data):
        raise RecordError(source, field, reason, way_out)


def _wrongs(data: Mapping[str, Any]) -> Iterator[_Wrong]:
    version = data.get("schema_version")
    if version != RunRecord.SCHEMA_VERSION or isinstance(version, bool):
        reason = f"is {version!r}, but this version of fitting reads {RunRecord.SCHEMA_VERSION}"
        way_out = "Write the record again with this version, or read it with the one that wrote it"
        yield "schema_version", reason, way_out
    missing = [name for name in _FIELDS if name not in data and name not in _LATER]
    if missing:
        yield missing[0], "is missing", f"All missing fields: {', '.join(missing)}; write the record again"
    unknown = [str(name) for name in data if name not in _FIELDS]
    if unknown:
        yield unknown[0], "is unknown to this schema version", "Remove it, or raise the schema version"
    for name, annotation in _FIELDS.items():
        if name in data:
            yield from _wrong_value(name, annotation, data[name])
    if data["status"] == "completed":
        yield from _wrong_in_completed(data)
    for name, component in data["components"].items():
        told = component if isinstance(component, dict) else {}
        if not isinstance(told.get("class_path"), str) or not isinstance(told.get("init_args"), dict):
            yield f"components.{name}", f"is {component!r}", 'Give {"class_path": str, "init_args": {...}}'
    for name in ("n_once", "n_rec"):
        active = data.get(f"{name}_active")
        if active is not None and not 0 <= active <= data[name]:
            yield (
                f"{name}_active",
                f"is {active!r}, but {name} is {data[name]!r}",
                "Give a part of it, or null",
            )
    for name, count in data["parameters"].items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            yield f"parameters.{name}", f"is {count!r}", "Give a count, zero or more"


def _wrong_value(name: str, annotation: str, value: Any) -> Iterator[_Wrong]:
    kind, _, rest = annotation.partition("|")
    base = kind.strip().partition("[")[0]
    if value is None:
        if rest.strip() != "None":
            yield name, f"is null but must be of type {annotation}", "Fill it in and write it again"
        return
    if isinstance(value, bool) or not isinstance(value, _PYTHON_TYPES[base]):
        yield name, f"is {value!r} of type {type(value).__name__}, not {annotation}", "Correct the writer"
    if isinstance(value, dict):
        yield from _not_plain(name, value)
    if isinstance(value, int | float):
        if not math.isfinite(value):
            yield name, f"is {value!r}, not a finite number", "Mark the run as diverged or leave it out"
        if (name in _POSITIVE and value <= 0) or (name in _NOT_NEGATIVE and value < 0):
            sign = "positive" if name in _POSITIVE else "zero or more"
            yield name, f"is {value!r} but must be {sign}", "Correct it or leave the run out"
    if name in _CHOICES and value not in _CHOICES[name]:
        yield name, f"is {value!r}", f"Use one of: {', '.join(_CHOICES[name])}"


def _wrong_in_completed(data: Mapping[str, Any]) -> Iterator[_Wrong]:
    if data["val_loss"] is None:
        yield "val_loss", "is null in a completed run", "Validate the checkpoint, or set another status"
    for name in _POSITIVE_WHEN_COMPLETED:
        if data[name] <= 0:
            yield name, f"is {data[name]!r} in a completed run", "Correct it or set another status"
    if data["val_step"] != data["steps"]:
        reason = f"is {data['val_step']!r} in a run completed at step {data['steps']}"
        reason += ", so val_loss is not the loss of the whole run"
        yield "val_step", reason, "Validate at the last step, or set another status"
    spent = data["tokens"] * data["flops_per_token"]
    if abs(data["training_flops"] / spent - 1) > FLOPS_TOLERANCE:
        reason = f"is {data['training_flops']:.6g}, but tokens·flops_per_token is {spent:.6g}"
        yield "training_flops", reason, "Correct the wrong one of the three and write the record again"


def _not_plain(path: str, value: Any) -> Iterator[_Wrong]:
    """Nested values must survive JSON unchanged: no tuples, no NaN, only string keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                yield path, f"has the key {key!r}, which is not a string", "Use string keys"
            yield from _not_plain(f"{path}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_plain(f"{path}[{index}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"is {value!r}, which JSON cannot hold", "Write null or a string instead"
    elif not isinstance(value, str | int | float | bool | None):
        yield path, f"is a {type(value).__name__}, not a plain JSON type", "Convert it before recording"
