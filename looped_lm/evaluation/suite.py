"""The downstream suite as data, and what the names of `--tasks` stand for.

Source of the axes, their public tasks and the number of shots: arXiv 2604.21106 (downstream suite). The axis of
reasoning primitives consists of our own probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from looped_lm.evaluation.probes import PROBES, Probe

OWN_TASKS = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class PublicTask:
    """A task of lm-eval, under the name that users and results give it.

    Args:
        shots: solved examples in a prompt; None: as the task says.
        metric: lm-eval's metric to show as accuracy; None: the first of `METRICS` that the task has.
        scale: factor that brings the metric into [0, 1].
        spec: name in lm-eval, or path of a task file; None: `name`.
    """

    name: str
    shots: int | None = None
    metric: str | None = None
    scale: float = 1.0
    spec: str | None = None

    @property
    def source(self) -> str:
        """Name in lm-eval, or path of a task file."""
        return self.spec or self.name


#: Metrics that count right answers, by preference.
METRICS = ("acc", "exact_match", "em", "exact")

PROBE_AXIS = "reasoning_primitives"
#: TyDiQA's English part, as the paper's corpora are English. lm-eval lacks SVAMP and MAWPS: we supply the files.
PUBLIC: dict[str, tuple[PublicTask, ...]] = {
    "parametric_knowledge": (
        PublicTask("triviaqa", 5, "exact_match"),
        PublicTask("nq_open", 5, "exact_match"),
        PublicTask("webqs", 5, "exact_match"),
    ),
    "reading_comprehension": (
        PublicTask("lambada_openai", 0, "acc"),
        PublicTask("tydiqa_goldp_en", 3, "exact_match"),
        PublicTask("squadv2", 3, "exact", scale=0.01),
        PublicTask("drop", 3, "em"),
        PublicTask("coqa", 1, "em"),
    ),
    "math_word_problems": (
        PublicTask("svamp", 5, "acc", spec=str(OWN_TASKS / "svamp.yaml")),
        PublicTask("asdiv", 5, "acc"),
        PublicTask("mawps", 5, "acc", spec=str(OWN_TASKS / "mawps.yaml")),
    ),
    "compositional_symbolic": (
        PublicTask("bigbench_dyck_languages_generate_until", 10, "exact_match"),
        PublicTask("bigbench_qa_wikidata_generate_until", 10, "exact_match"),
        PublicTask("bigbench_cs_algorithms_generate_until", 10, "exact_match"),
        PublicTask("arc_easy", 10, "acc"),
    ),
}
#: Names of the tasks of every axis.
AXES: dict[str, tuple[str, ...]] = {
    **{axis: tuple(task.name for task in tasks) for axis, tasks in PUBLIC.items()},
    PROBE_AXIS: tuple(probe.name for probe in PROBES),
}
RECURRENCES = "recurrences"
#: Names that stand for several; any other is a probe, an axis, a task of lm-eval or a task file.
GROUPS = {
    "probes": (PROBE_AXIS,),
    "public": tuple(PUBLIC),
    "all": (RECURRENCES, PROBE_AXIS, *PUBLIC),
}
#: Names that do not need lm-eval.
OWN_NAMES = (RECURRENCES, "probes", PROBE_AXIS, *AXES[PROBE_AXIS])


def axis_of(task: str) -> str | None:
    """The axis to which a task belongs; None for a task outside the suite."""
    return next((axis for axis, names in AXES.items() if task in names), None)


def is_task_file(source: str) -> bool:
    """Whether this is the path of a task file rather than a name in lm-eval."""
    return Path(source).suffix in (".yaml", ".yml")


@dataclass(frozen=True)
class Selection:
    """Parts of an evaluation, each once, in the order of the request."""

    recurrences: bool
    probes: tuple[Probe, ...]
    public: tuple[PublicTask, ...]


def select(names: Sequence[str]) -> Selection:
    """The parts that names of groups, axes, probes and tasks (also of lm-eval or a file) stand for."""
    wanted = [part for name in names for part in GROUPS.get(name, (name,))]
    parts = dict.fromkeys(part for name in wanted for part in AXES.get(name, (name,)) if part != RECURRENCES)
    probes = {probe.name: probe for probe in PROBES}
    tasks = {task.name: task for axis in PUBLIC.values() for task in axis}
    return Selection(
        RECURRENCES in wanted,
        tuple(probes[name] for name in parts if name in probes),
        tuple(
            tasks.get(name) or PublicTask(Path(name).stem if is_task_file(name) else name, spec=name)
            for name in parts
            if name not in probes
        ),
    )
