"""What `--tasks` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from looped_lm.evaluation.axes import PROBE_AXIS, PUBLIC, PublicTask, is_task_file
from looped_lm.evaluation.probes import PROBES, Probe

RECURRENCES = "recurrences"
#: Groups of names; everything else is a probe, an axis, a task of lm-eval or a task file.
GROUPS = {
    "probes": (PROBE_AXIS,),
    "public": tuple(PUBLIC),
    "all": (RECURRENCES, PROBE_AXIS, *PUBLIC),
}


@dataclass(frozen=True)
class Selection:
    """Parts of an evaluation, each once, in the order in which they were asked for."""

    recurrences: bool
    probes: tuple[Probe, ...]
    public: tuple[PublicTask, ...]


def select(names: Sequence[str]) -> Selection:
    """The parts that names stand for: a group, an axis, a probe, or a task of the table, of lm-eval or of a file."""
    probes: dict[str, Probe] = {}
    public: dict[str, PublicTask] = {}
    by_name = {probe.name: probe for probe in PROBES}
    in_table = {task.name: task for tasks in PUBLIC.values() for task in tasks}
    wanted = [part for name in names for part in GROUPS.get(name, (name,))]
    for name in wanted:
        if name == PROBE_AXIS:
            probes.update(by_name)
        elif name in by_name:
            probes[name] = by_name[name]
        elif name in PUBLIC:
            public.update({task.name: task for task in PUBLIC[name]})
        elif name != RECURRENCES:
            public[name] = in_table.get(name) or as_task(name)
    return Selection(RECURRENCES in wanted, tuple(probes.values()), tuple(public.values()))


def own_names() -> list[str]:
    """Names of what needs no lm-eval."""
    return [RECURRENCES, "probes", PROBE_AXIS, *(probe.name for probe in PROBES)]


def as_task(name: str) -> PublicTask:
    """A task outside of the suite, by lm-eval's name or the path of its file."""
    return PublicTask(Path(name).stem if is_task_file(name) else name, spec=name)
