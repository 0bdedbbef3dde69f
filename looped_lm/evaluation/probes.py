"""Synthetic probes of in-context reasoning: texts made from a seed, the same on every machine.

Source: the reasoning primitives of arXiv 2604.21106 (downstream suite). The wording around the assignments is ours:
compare results with each other, not with the paper's.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

from looped_lm.common.errors import UserError

VARIABLES = 5
SHOTS = 5
#: Examples of a probe in the paper's suite.
EXAMPLES = 1000
BETWEEN = "\n\n"


@dataclass(frozen=True)
class Example:
    """A question and its answer.

    Args:
        query: text up to where the answer begins.
        answer: the gold continuation, including the space before it.
        shots: solved examples to put before the query; the last one is nearest to it.
        end: what follows the answer if the model stops there; empty if no answer is the beginning of another.
    """

    query: str
    answer: str
    shots: tuple[str, ...] = ()
    end: str = ""

    def prompt(self, shots: int) -> str:
        """The query, preceded by the last `shots` of the solved examples."""
        kept = self.shots[len(self.shots) - shots :]
        return "".join(f"{shot}{BETWEEN}" for shot in kept) + self.query


@dataclass(frozen=True)
class Probe:
    """A kind of example: its name, how one is drawn, and how many solved ones precede it."""

    name: str
    draw: Callable[[random.Random], Example]
    shots: int

    def examples(self, count: int, seed: int) -> list[Example]:
        """The first `count` (at least 1) examples of a seed, which do not depend on the count."""
        if count < 1:
            raise UserError(f"{count} examples were asked for; ask for at least 1.")
        found = []
        for i in range(count):
            rng = random.Random(f"{seed}/{self.name}/{i}")
            *solved, asked = [self.draw(rng) for _ in range(self.shots + 1)]
            found.append(replace(asked, shots=tuple(e.query + e.answer for e in solved)))
        return found


def induction_head(rng: random.Random) -> Example:
    """Eight lines "key -> value" of 4 and 3 random letters, keys distinct, then one of the keys and "->"."""
    pairs: dict[str, str] = {}
    while len(pairs) < 8:
        key = _letters(rng, 4)
        if key not in pairs:
            pairs[key] = _letters(rng, 3)
    asked = rng.choice(list(pairs))
    lines = [f"{key} -> {value}" for key, value in pairs.items()]
    return Example("\n".join([*lines, f"{asked} ->"]), f" {pairs[asked]}")


def variable_assignment(depth: int, write: Callable[[list[tuple[str, str]], str], str]) -> Callable:
    """A way to draw examples of five variables, whose values are distinct integers from 1 to 25.

    An answer thus tells which variable was looked up. As 22 begins with 2, it counts only if its end follows.

    Args:
        depth: 0 asks about a variable, 1 about one of five aliases of the variables, in a random order.
        write: gives the text of the assignments (name, right-hand side) and of the question about a name.
    """

    def draw(rng: random.Random) -> Example:
        names = rng.sample(string.ascii_lowercase, VARIABLES * (1 + depth))
        values = [str(v) for v in rng.sample(range(1, 26), VARIABLES)]
        direct = dict(zip(names[:VARIABLES], values, strict=True))
        aliases = dict(zip(names[VARIABLES:], rng.sample(names[:VARIABLES], VARIABLES * depth), strict=True))
        asked = rng.choice(list(aliases or direct))
        answer = direct[aliases.get(asked, asked)]
        return Example(write([*direct.items(), *aliases.items()], asked), f" {answer}", end=BETWEEN)

    return draw


def _letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(count))


def in_words(assignments: list[tuple[str, str]], asked: str) -> str:
    """The assignments as mathematics in an English sentence."""
    *first, last = [f"{name}={value}" for name, value in assignments]
    return f"Let {', '.join(first)} and {last}. Then the value of {asked} is"


def in_python(assignments: list[tuple[str, str]], asked: str) -> str:
    """The assignments as a Python program."""
    lines = [f"{name} = {value}" for name, value in assignments]
    return "\n".join([*lines, f"assert {asked} =="])


PROBES = (
    Probe("induction_head", induction_head, 0),
    Probe("variable_assignment_0_math", variable_assignment(0, in_words), SHOTS),
    Probe("variable_assignment_1_math", variable_assignment(1, in_words), SHOTS),
    Probe("variable_assignment_0_code", variable_assignment(0, in_python), SHOTS),
    Probe("variable_assignment_1_code", variable_assignment(1, in_python), SHOTS),
)
