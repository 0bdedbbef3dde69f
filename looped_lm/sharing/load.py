"""A trained model and its tokenizer, from a checkpoint or from an exported folder."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from looped_lm.common.errors import UserError, for_users
from looped_lm.loop.component import Component, as_instance, import_class
from looped_lm.model.transformer import LoopedTransformer
from looped_lm.runs.checkpoint import Stored, compare_tensors, look, verify_once
from looped_lm.seams import SEAMS, before
from looped_lm.sharing.export import CONFIG, FORMAT, VERSION, WEIGHTS, sha256

if TYPE_CHECKING:
    from lightning import LightningDataModule

    from looped_lm.training.lightning_module import LoopedLM


class TextTokenizer(Protocol):
    """What a tokenizer must offer; `datamodules.Tokenizer` does.

    `encode` leaves BOS out, `serialized` gives file name and content of the stored form, and `settings` the class_path
    and whatever else the class's `load(folder, settings)` needs.
    """

    vocab_size: int
    bos_id: int

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def serialized(self) -> tuple[str, bytes]: ...
    def settings(self) -> dict[str, Any]: ...


def load_model(path: str | Path) -> LoopedTransformer:
    """The model of a checkpoint, or of a folder written by `export`, on the CPU.

    Raises:
        UserError: there is nothing at `path`, or it is neither.
    """
    # Reading a folder does not need Lightning.
    return load_pretrained(path).eval() if Path(path).is_dir() else load_lm(path).model.eval()


def load_lm(path: str | Path) -> LoopedLM:
    """The Lightning module of a checkpoint, or one to evaluate an exported folder with, on the CPU.

    Raises:
        UserError: there is nothing at `path`, or it is neither.
    """
    from looped_lm.training.lightning_module import LoopedLM

    path = Path(path)
    if path.is_dir():
        from looped_lm.training.schedules import Steps

        model = load_pretrained(path)
        # The recipe is a placeholder.
        lm = LoopedLM(horizon=Steps(1), batch_tokens=model.seq_len, **model.architecture())
        lm.model = model
        return lm.eval()
    if not path.is_file():
        raise UserError(
            f"{path} is neither a checkpoint nor a folder written by `python -m looped_lm export`."
        )
    _look(path, whole=True)
    try:
        return LoopedLM.load_from_checkpoint(path, map_location="cpu").eval()
    except TypeError as error:
        # Unknown hyperparameters only: what a component raises keeps its own line.
        if not str(error).startswith(("LoopedLM.__init__()", "LoopedTransformer.__init__()")):
            raise
        raise UserError(f"{path} cannot be loaded into a LoopedLM: {error}.") from error


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of an exported folder; UserError if it is missing or has another format."""
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is not an exported model: its {CONFIG} cannot be read ({error}). "
            "`python -m looped_lm export` writes such folders."
        ) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise UserError(f"{path} does not describe a model of looped_lm: its format is not {FORMAT!r}.")
    if config.get("format_version") != VERSION:
        raise UserError(
            f"{path} has format version {config.get('format_version')!r}; this version of looped_lm reads {VERSION}."
        )
    return config


def load_pretrained(folder: str | Path, **overrides: Any) -> LoopedTransformer:
    """The model in a folder that `save_pretrained` wrote, on the CPU, with the dtypes it was saved with.

    `overrides` are arguments of LoopedTransformer that leave the weights alone (recompute, bptt, ...).

    Raises:
        UserError: no such folder, unknown arguments or components, or weights of another architecture.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    arguments = {**_architecture(Path(folder)), **overrides}
    path = Path(folder) / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}. Copy or export the folder again.") from error
    model = LoopedTransformer(**arguments)
    way_out = f"{CONFIG} and {WEIGHTS} of {folder} do not belong together; export the model again."
    compare_tensors(tensors, model.state_dict(), way_out)
    model.load_state_dict(tensors, assign=True)
    return model


def _architecture(folder: Path) -> dict[str, Any]:
    stored = read_config(folder).get("architecture")
    known = set(inspect.signature(LoopedTransformer).parameters)
    given = set(stored) if isinstance(stored, dict) else set()
    later = {key: spec for key, spec in before().items() if key in known}
    if not isinstance(stored, dict) or not known - set(later) <= given <= known:
        raise UserError(
            f"{folder / CONFIG}: the architecture has unknown keys {sorted(given - known)} and lacks "
            f"{sorted(known - set(later) - given)}. Read it with the version of looped_lm that wrote it."
        )
    stored = {**later, **stored}
    for key, seam in SEAMS.items():
        if key in stored:
            refuse_foreign(stored[key], seam.base, f"{folder / CONFIG}: {key}")
    return stored


def refuse_foreign(spec: Any, base: type, where: str) -> None:
    """Refuse class paths of anything but a `base`: a shared file must not make us call just anything."""
    path = spec.get("class_path") if isinstance(spec, Mapping) else None
    found = import_class(path) if isinstance(path, str) else None
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise UserError(f"{where} is {path!r}, which is not a subclass of {base.__name__}.")
    for value in _nested(spec.get("init_args") or {}):
        refuse_foreign(value, Component, f"{where}, an argument of {path},")


def _nested(value: Any) -> list[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if "class_path" in value:
            return [value]
        return [spec for v in value.values() for spec in _nested(v)]
    return [spec for v in value for spec in _nested(v)] if isinstance(value, list) else []


def recorded_config(path: str | Path) -> dict[str, Any]:
    """The configuration of the run that wrote a checkpoint, where known; empty for exported folders."""
    return {} if Path(path).is_dir() else _look(path).record.get("config") or {}


def _look(path: str | Path, whole: bool = False) -> Stored:
    try:
        if whole:
            verify_once(path)
        return look(path)
    except UserError as error:
        raise UserError(f"{error} Give a checkpoint of a run, or a folder that `export` wrote.") from error


def names_data(path: str | Path) -> bool:
    """Whether `recorded_config` names data; exported folders and converted checkpoints have none."""
    return bool((recorded_config(path).get("data") or {}).get("class_path"))


def load_data(
    path: str | Path,
    given: str | None = None,
    stage: str = "validate",
    way_out: str = "Name some by --data, such as "
    "'{class_path: datamodules.TokenDataModule, init_args: {data_dir: my_data, seq_len: 256}}'.",
) -> LightningDataModule:
    """The data module that a model was trained with, set up for Lightning's `stage`.

    Args:
        path: checkpoint, which names its data, or exported folder, which does not. The embedded corpus is prepared if
            it is not there yet.
        given: class path of another data module, or class_path and init_args as YAML.

    Raises:
        UserError: the data is not known or not available; the message ends with the way out.
    """
    if given is None and not names_data(path):
        raise UserError(f"{path} does not say what data it was trained on. {way_out}")
    with _available(f"The data of {path}", way_out):
        spec = recorded_config(path)["data"] if given is None else _spec(given)
        data: LightningDataModule = as_instance(spec)
        data.prepare_data()
        data.setup(stage)
    return data


@contextmanager
def _available(what: str, way_out: str) -> Iterator[None]:
    """Say what is not available, why, and what to do; a fault in code keeps its own error."""
    try:
        yield
    except Exception as error:
        if not for_users(error):
            raise
        raise UserError(f"{what} is not available ({error}). {way_out}") from error


def _spec(given: str) -> Any:
    try:
        spec = yaml.safe_load(given)
    except yaml.YAMLError:
        spec = None
    if isinstance(spec, str):
        return {"class_path": spec}
    if not isinstance(spec, dict) or not isinstance(spec.get("class_path"), str):
        raise UserError(f"{given!r} names no class: give a class path, or class_path and init_args as YAML.")
    return spec


def load_tokenizer(path: str | Path, given: str | None = None, data: str | None = None) -> TextTokenizer:
    """The tokenizer that a model was trained with.

    Args:
        path: checkpoint, whose data has the tokenizer, or exported folder.
        given: class path of another tokenizer, or class_path and init_args as YAML.
        data: data module, as `load_data` takes it, whose tokenizer is used if `path` names none.

    Raises:
        UserError: no tokenizer is found, or not the one that the model was exported with.
    """
    if given is not None:
        tokenizer = as_instance(_spec(given))
        if not all(hasattr(tokenizer, name) for name in ("encode", "decode", "bos_id", "vocab_size")):
            raise UserError(
                f"--tokenizer {given!r} gives a {type(tokenizer).__name__}, which is not a tokenizer."
            )
        return tokenizer
    way_out = (
        "Name one by --tokenizer, such as datamodules.ByteTokenizer or "
        "'{class_path: datamodules.FileTokenizer, init_args: {path: tokenizer.json}}'."
    )
    path = Path(path)
    if path.is_dir():
        settings = read_config(path).get("tokenizer")
        if settings is not None:
            return _exported_tokenizer(path, settings, way_out)
        if data is None:
            raise UserError(f"{path} was exported without a tokenizer. {way_out}")
    module = load_data(path, None if path.is_file() and names_data(path) else data, "predict", way_out)
    if not hasattr(module, "load_tokenizer"):
        raise UserError(f"{path} was trained on {type(module).__name__}, which has no tokenizer. {way_out}")
    with _available(f"The tokenizer of {path}", way_out):
        return module.load_tokenizer()


def _exported_tokenizer(folder: Path, settings: Any, way_out: str) -> TextTokenizer:
    """The tokenizer beside an exported model; only classes of tokenizers are called."""
    name = settings.get("class_path") if isinstance(settings, dict) else None
    found = import_class(name) if isinstance(name, str) else None
    needed = ("encode", "decode", "serialized", "load")
    if not isinstance(found, type) or not all(callable(getattr(found, method, None)) for method in needed):
        raise UserError(f"{folder}: the tokenizer is {name!r}, which is not a class of tokenizers. {way_out}")
    with _available(f"The tokenizer of {folder}", way_out):
        tokenizer: TextTokenizer = found.load(folder, settings)  # type: ignore[attr-defined]
    stored, here = settings.get("sha256"), sha256(tokenizer)
    if stored not in (None, here):
        raise UserError(
            f"The tokenizer of {folder} is not the one it was exported with (sha256 {here[:12]} instead of "
            f"{str(stored)[:12]}). {way_out}"
        )
    return tokenizer


def refuse_other_tokenizer(path: str | Path, data: LightningDataModule) -> None:
    """Refuse data of another tokenizer than an exported folder's. For a checkpoint, the data module does."""
    settings = read_config(path).get("tokenizer") if Path(path).is_dir() else None
    if not settings or "sha256" not in settings or not hasattr(data, "load_tokenizer"):
        return
    found = sha256(data.load_tokenizer())
    if found != settings["sha256"]:
        raise UserError(
            f"The data was prepared with another tokenizer (sha256 {found[:12]}) than the model of {path} was exported "
            f"with ({settings['sha256'][:12]}): give --data prepared with the model's tokenizer."
        )
