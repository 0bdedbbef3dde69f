"""Public tasks, and the user's own task files, through lm-eval (extra `eval`)."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from looped_lm.common.errors import UserError
from looped_lm.common.text import did_you_mean
from looped_lm.evaluation.results import TaskRow
from looped_lm.evaluation.suite import METRICS, OWN_NAMES, PublicTask, axis_of, is_task_file

if TYPE_CHECKING:
    from looped_lm.evaluation.harness import HarnessLM


def require_lm_eval(tasks: Iterable[PublicTask]) -> None:
    """Refuse to go on without lm-eval, which these tasks need."""
    if importlib.util.find_spec("lm_eval") is None:
        meant = "".join(did_you_mean(task.source, OWN_NAMES) for task in tasks)
        raise UserError(
            "Public tasks and task files run through lm-eval, which is not installed: pip install 'looped-lm[eval]'. "
            f"The validation loss and the probes do not need it (--tasks recurrences probes).{meant}"
        )


def hub_problem() -> str | None:
    """Why the Hugging Face Hub cannot be reached; None if it can be, or if only a proxy can tell."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return None
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        with socket.create_connection((url.hostname or "", url.port or 443), timeout=5.0):
            return None
    except OSError as error:
        return f"{url.hostname} cannot be reached ({error})"


def leave_hub_alone() -> None:
    """Read data from the local cache only; otherwise each task would try the network for half a minute."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Modules that are already loaded have read the environment before.
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


class TaskLibrary:
    """Tasks of lm-eval by name, and those of task files by path."""

    def __init__(self) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        from lm_eval.tasks import TaskManager

        # Names need an index of all task files, which takes a while to build; paths do not.
        self._manager = functools.cache(lambda names: TaskManager(include_defaults=names))

    def refuse_unknown(self, tasks: Iterable[PublicTask]) -> None:
        """Refuse names that lm-eval does not know, and paths without a file."""
        for task in tasks:
            if is_task_file(task.source):
                if not Path(task.source).is_file():
                    raise UserError(f"There is no task file {task.source!r}.")
            elif task.source not in (known := self._manager(True).task_index):
                raise UserError(
                    f"lm-eval has no task {task.source!r}.{did_you_mean(task.source, known)} `lm-eval ls tasks` lists "
                    "them; name a task file by its path (.yaml)."
                )

    def load(self, task: PublicTask) -> dict[str, Any]:
        """lm-eval's task objects by name; a group has several. Its errors are passed on."""
        loaded = self._manager(not is_task_file(task.source)).load([task.source])["tasks"]
        for one in loaded.values():
            if task.shots is not None or one.get_config("num_fewshot") is None:
                one.set_config(key="num_fewshot", value=task.shots or 0)
            if not (one.has_training_docs() or one.has_validation_docs()):
                # Shots come from the questions themselves; lm-eval then leaves out the one that it asks.
                one.fewshot_cfg.split = one.config.test_split
        return loaded


def measure(
    task: PublicTask, library: TaskLibrary, lm: HarnessLM, limit: int | None, seed: int
) -> list[TaskRow]:
    """Results of a task, or of all in a group, on `limit` examples (None: all); the seed chooses the shots.

    What lm-eval cannot run here gets a refused row.
    """

    def refused(name: str, error: Exception) -> TaskRow:
        if os.environ.get("LOOPED_LM_TRACEBACK"):
            raise error
        first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        reason = f"{type(error).__name__}: {first[:300]}"
        if os.environ.get("HF_HUB_OFFLINE") == "1":
            reason += " (no network: data must be in the cache of `datasets`)"
        return TaskRow(name, axis_of(task.name), lm.num_recurrences, shots=task.shots, refused=reason)

    # Tasks are other people's code, which may raise anything.
    try:
        loaded = library.load(task)
    except Exception as error:
        return [refused(task.name, error)]
    rows = []
    for name, one in loaded.items():
        try:
            rows.append(_measure(task, name, one, lm, limit, seed))
        except Exception as error:
            rows.append(refused(name, error))
    return rows


def _measure(task: PublicTask, name: str, one: Any, lm: HarnessLM, limit: int | None, seed: int) -> TaskRow:
    from lm_eval.evaluator import evaluate

    one.set_fewshot_seed(seed=seed)
    found = evaluate(lm, {"tasks": {name: one}}, limit=limit, bootstrap_iters=0, log_samples=True)
    samples = found["samples"][name]
    first = [s for s in samples if s["filter"] == samples[0]["filter"]]
    gold = [pair for pair in (gold_continuation(one, s) for s in first) if pair is not None]
    scored = lm.scores(gold, f"{name}: gold answers")
    tokens = sum(score.tokens for score, _ in scored)
    metrics = plain(found["results"][name])
    metric, accuracy = accuracy_of(metrics, task)
    return TaskRow(
        task=name,
        axis=axis_of(task.name),
        recurrences=lm.num_recurrences,
        loss=sum(score.nats for score, _ in scored) / tokens if tokens else None,
        accuracy=accuracy,
        metric=metric,
        examples=len(first),
        tokens=tokens,
        shots=int(one.get_config("num_fewshot") or 0),
        cut=sum(cut for _, cut in scored),
        metrics=metrics,
    )


def gold_continuation(task: Any, sample: Mapping[str, Any]) -> tuple[str, str] | None:
    """(context, gold continuation) of a logged sample; None if the task has none (whole texts).

    Of several right answers the first counts. For a task that generates, it is what the task's shots show: the
    delimiter, then the target.
    """
    arguments, target = sample["arguments"], sample["target"]
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return None
    if task.OUTPUT_TYPE == "loglikelihood":
        return tuple(arguments[0])
    if task.OUTPUT_TYPE == "multiple_choice":
        right = task.doc_to_text(sample["doc"]) if task.multiple_input else target
        right = right[0] if isinstance(right, Sequence) and not isinstance(right, str) else right
        index = right if isinstance(right, int) else task.doc_to_choice(sample["doc"]).index(right)
        return tuple(arguments[index])
    answer = str(target[0] if isinstance(target, list) else target)
    delimiter = "" if answer[:1].isspace() else task.config.target_delimiter
    return arguments[0][0], f"{delimiter}{answer}"


def accuracy_of(metrics: Mapping[str, float], task: PublicTask) -> tuple[str | None, float | None]:
    """Name and value, in [0, 1], of the metric that counts right answers; (None, None) if there is none."""
    for wanted in (task.metric,) if task.metric else METRICS:
        for key, value in metrics.items():
            if key.partition(",")[0] == wanted:
                return wanted, value * task.scale
    return None, None


def plain(found: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among lm-eval's results, by "metric,filter"."""
    return {
        key: float(value)
        for key, value in found.items()
        if "," in key and not isinstance(value, (str, bool)) and math.isfinite(value)
    }
