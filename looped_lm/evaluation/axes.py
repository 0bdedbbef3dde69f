"""The downstream suite as data: five axes, their public tasks, and how many solved examples each prompt shows.

Source: arXiv 2604.21106 (downstream suite). The axis of reasoning primitives has our own probes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from looped_lm.evaluation.probes import PROBES

OWN_TASKS = Path(__file__).parent / "tasks"


def is_task_file(source: str) -> bool:
    """Whether a task is named by the path of its file, and not by a name of lm-eval."""
    return Path(source).suffix in (".yaml", ".yml")


@dataclass(frozen=True)
class PublicTask:
    """A task of lm-eval.

    Args:
        name: what the user calls it, and what results call it.
        shots: solved examples of a prompt; None: as the task says.
        metric: lm-eval's metric that is shown as accuracy; None: the first of `METRICS` that the task has.
        scale: what the metric is multiplied by to lie in [0,1].
        spec: name of lm-eval, or path of a task file; None: `name`.
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
#: TyDiQA in English, as the corpora of the paper are. lm-eval has no SVAMP and no MAWPS: their files are ours.
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


def axis_of(task: str) -> str | None:
    """The axis that a task counts for; None for a task outside of the suite."""
    return next((axis for axis, names in AXES.items() if task in names), None)
