"""Objective: what training minimises, from the states after chosen recurrences.

B batch rows, T sequence length, d = d_model, r recurrences. Validation does not ask it: the loss that compares runs is
always the cross entropy after the last recurrence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral

from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.loop.component import ModelComponent

#: States (B,T,d) that the coda reads, by the recurrence (0..r-1) they come after, in ascending order.
States = Mapping[int, Tensor]
#: `read(state, weights)`: mean over tokens of the weights (B,T; None: 1) times the cross entropy (nats) of coda and
#: head on a state (B,T,d). Differentiable in both.
Read = Callable[[Tensor, Tensor | None], Tensor]

#: Metrics `train/...` that are not an objective's terms.
TAKEN = ("loss", "recurrences")


class Objective(ModelComponent, nn.Module, ABC):
    """Total that a training step minimises, and the terms that are logged with it as `train/<name>`.

    A subclass takes `d_model` and `num_recurrences` first. Every state that it wants costs another pass of coda and
    head. Its parameters are used outside the loop and count with the model's own norms.
    """

    def __init__(self, d_model: int, num_recurrences: int) -> None:
        super().__init__()
        self.d_model, self.num_recurrences = d_model, num_recurrences

    def wanted(self, num_recurrences: int) -> Sequence[int]:
        """Recurrences (0..r-1) of a step with r of them whose states `forward` reads; the last must be among them."""
        return (num_recurrences - 1,)

    @abstractmethod
    def forward(
        self, states: States, read: Read, auxiliary: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Total and named terms, all scalars, from the wanted states; each is to be read once.

        `auxiliary` has the sums that layers report (`Layer.auxiliary`), by name.
        """

    def flops_per_token(self) -> int:
        """Forward FLOPs per token and reading of its own operations, without coda and head: 2 per parameter."""
        return 2 * sum(p.numel() for p in self.parameters())

    def readings(self, num_recurrences: int) -> tuple[int, ...]:
        """What `wanted` says, in ascending order.

        Raises:
            UserError: not whole numbers, a recurrence that a step of this count does not run, one named twice, or no
                last one.
        """
        given, last = self.wanted(num_recurrences), num_recurrences - 1
        if not (isinstance(given, Iterable) and all(isinstance(i, Integral) for i in given)):
            raise UserError(
                f"{type(self).__name__} wants the states after {given!r}: name recurrences by ints, such as "
                f"[{last}]."
            )
        wanted = sorted(given)
        who = f"{type(self).__name__} wants the states after recurrences {wanted} in a step of {num_recurrences}"
        if wanted and not 0 <= wanted[0] <= wanted[-1] <= last:
            raise UserError(
                f"{who}, which runs 0 to {last}: want fewer of them, counted from the end, or let every step run "
                "enough (FixedRecurrences with a larger num_recurrences)."
            )
        if last not in wanted:
            raise UserError(
                f"{who}, without the last, {last}: what runs after the one read would never train, and the validation "
                f"loss is that of the last. Add {last}."
            )
        if len(set(wanted)) < len(wanted):
            raise UserError(f"{who}: each of them costs a pass of coda and head, so name it once.")
        return tuple(wanted)

    def checked(
        self, states: States, read: Read, auxiliary: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What `forward` returns, the layers' sums among its terms.

        Raises:
            UserError: not a scalar tensor and named scalar tensors, a layer's included, a name that is taken, a total
                without gradients, or a state that was not wanted.
        """
        name = type(self).__name__
        given = self(_Wanted(states, name), read, auxiliary)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
            raise UserError(
                f"{name} returns a {type(given).__name__}: forward must return (total, terms), a scalar tensor and a "
                "dict of scalar tensors by name, which may be empty."
            )
        total, terms = given
        # The layers' first: one that is no scalar makes the total none.
        told = {f"auxiliary {key!r} of the layers": value for key, value in auxiliary.items()}
        told |= {
            f"total of {name}": total,
            **{f"term {key!r} of {name}": term for key, term in terms.items()},
        }
        for what, value in told.items():
            if not isinstance(value, Tensor) or value.dim():
                kind = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise UserError(
                    f"The {what} is a {kind}; it must be a scalar tensor, such as a mean over tokens."
                )
        names = [*TAKEN, *auxiliary, *terms]
        if taken := [key for key in (*terms, *auxiliary) if names.count(key) > 1]:
            who = name if taken[0] in terms else "Layer.auxiliary"
            raise UserError(
                f"{who} calls a term {taken[0]!r}, but train/{taken[0]} is logged already: rename it."
            )
        if not total.requires_grad and any(state.requires_grad for state in states.values()):
            raise UserError(
                f"The total of {name} has no gradients: compute it from what `read` returns, without detach or item."
            )
        return total, {**auxiliary, **terms}


class _Wanted(dict[int, Tensor]):
    """The states that an objective wanted; says so of others."""

    def __init__(self, states: States, owner: str) -> None:
        super().__init__(states)
        self.owner = owner

    def __missing__(self, i: int) -> Tensor:
        raise UserError(
            f"{self.owner} reads the state after recurrence {i!r}, but wants those after {list(self)}: name it in "
            "`wanted` too."
        )


class FinalCrossEntropy(Objective):
    """Cross entropy after the last recurrence, in nats per token."""

    def forward(
        self, states: States, read: Read, auxiliary: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        (state,) = states.values()
        return sum(auxiliary.values(), read(state, None)), {}
