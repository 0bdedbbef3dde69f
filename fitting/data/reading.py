"""How foreign tables are read: names of columns and units of losses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fitting.errors import FitError

LOSS_UNITS = ("nats", "bits", "bits-per-byte")


@dataclass(frozen=True)
class Reading:
    """How tables are read. Raises `FitError` for a unit without what it needs, or a mapping that says nothing."""

    allow_mixed: bool = False
    """Whether runs may differ in tokenizer, data and the like; the result is marked."""
    loss_unit: str | None = None
    """One of `LOSS_UNITS`; None: nats, unless the numbers say otherwise, which is refused."""
    bytes_per_token: float | None = None
    columns: tuple[str, ...] = ()
    """`ours=theirs`, for tables whose columns have other names."""

    def __post_init__(self) -> None:
        if self.loss_unit not in (None, *LOSS_UNITS):
            raise FitError(f"--loss-unit is {self.loss_unit!r}. Use one of: {', '.join(LOSS_UNITS)}")
        if (self.loss_unit == "bits-per-byte") != (self.bytes_per_token is not None):
            raise FitError(
                "--loss-unit bits-per-byte and --bytes-per-token go together. Give both, or leave both out"
            )
        if self.bytes_per_token is not None and not self.bytes_per_token > 0:
            raise FitError(f"--bytes-per-token is {self.bytes_per_token:g}; it must be positive")
        for pair in self.columns:
            ours, sign, theirs = pair.partition("=")
            if not (ours.strip() and sign and theirs.strip()):
                raise FitError(f"--columns holds {pair!r}. Write OURS=THEIRS, such as tokens=D")

    @property
    def renamed(self) -> dict[str, str]:
        """Their name of a column -> ours."""
        pairs = (pair.split("=", 1) for pair in self.columns)
        return {theirs.strip(): ours.strip() for ours, theirs in pairs}

    @property
    def nats(self) -> float:
        """Nats per token in one unit of the losses."""
        if self.loss_unit in (None, "nats"):
            return 1.0
        return math.log(2) * (self.bytes_per_token or 1.0)
