"""The shipped laws and the forms of their multiplier, and the base classes for your own."""

from __future__ import annotations

from fitting.laws.forms import AdditiveLaw, ChinchillaLaw, EqualExponentsLaw, JointLaw, LossShift, OneTokenLaw
from fitting.laws.law import Inputs, Law
from fitting.laws.multipliers import (
    DriftingPower,
    FixedPower,
    LogGrowth,
    Multiplier,
    PerRecurrence,
    Power,
    Saturating,
    StudyPower,
    TokenDriftingPower,
)

__all__ = [
    "AdditiveLaw", "ChinchillaLaw", "DriftingPower", "EqualExponentsLaw", "FixedPower", "Inputs", "JointLaw", "Law",
    "LogGrowth", "LossShift", "Multiplier", "OneTokenLaw", "PerRecurrence", "Power", "Saturating", "StudyPower",
    "TokenDriftingPower",
]  # fmt: skip
