"""How the processes of a run share the orthogonalisation: stacks, shares, and the exchange of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from looped_lm.training.orthogonalisation import orthogonalisation_dtype, orthogonalisation_flops

# Its name since torch 2.13, or the earlier one.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

#: Every process's segment begins at a multiple of this many elements.
ALIGNMENT = 16


class Stack:
    """Matrices (rows,cols) of one shape, dtype and device that one parameter group updates together.

    `norms` are the Frobenius norms that each matrix and its update keep; `shares` has, for every process, the indices
    of the matrices that it orthogonalises.
    """

    def __init__(self, group: dict[str, Any], params: list[Tensor], norms: list[float]) -> None:
        self.group, self.params, self.norms = group, params, norms
        self.shares = [list(range(len(params)))]
        #: FLOPs to orthogonalise one matrix.
        self.flops = orthogonalisation_flops(*params[0].shape)
        self._layouts: dict[tuple[bool, ...], Layout] = {}

    def layout(self) -> Layout:
        """Where results go, for the matrices that have a gradient now."""
        present = tuple(p.grad is not None for p in self.params)
        if present not in self._layouts:
            self._layouts[present] = Layout(self, present)
        return self._layouts[present]


class Layout:
    """Slots for a stack's results, where some matrices may lack a gradient. Kept: making one waits for the device.

    Attributes:
        shares: for every process, the indices of its matrices that have a gradient.
        order: these indices in one list.
        slots: (process, slot) of each of them; every process has `depth` slots.
        radii: (processes,depth), the norm of the update in each slot.
        ordered_radii: the same, in the order of `order`.
        mask: (n,), 1 where a matrix has a gradient.
    """

    def __init__(self, stack: Stack, present: tuple[bool, ...]) -> None:
        like = stack.params[0]
        self.shares = [[i for i in share if present[i]] for share in stack.shares]
        self.order = [i for share in self.shares for i in share]
        self.depth = max(len(share) for share in stack.shares)
        self.slots = [(r, k) for r, share in enumerate(self.shares) for k in range(len(share))]
        precise = torch.promote_types(like.dtype, torch.float32)
        norms = torch.tensor([stack.norms[i] for i in self.order], dtype=torch.float64)
        radii = torch.zeros(len(self.shares), self.depth, dtype=torch.float64)
        for slot, norm in zip(self.slots, norms, strict=True):
            radii[slot] = norm
        self.ordered_radii, self.radii = norms.to(like.device, precise), radii.to(like.device, precise)
        self.mask = torch.tensor(present).to(like.device, orthogonalisation_dtype(like.device))


def stacks_of(groups: Sequence[dict[str, Any]]) -> list[Stack]:
    """The stacks of parameter groups that carry `initial_norms`, the costliest first."""
    members: dict[tuple[Any, ...], list[tuple[Tensor, float]]] = {}
    for index, group in enumerate(groups):
        for p, norm in zip(group["params"], group["initial_norms"], strict=True):
            members.setdefault((index, p.shape, p.dtype, p.device), []).append((p, norm))
    stacks = [
        Stack(groups[index], [p for p, _ in pairs], [norm for _, norm in pairs])
        for (index, *_), pairs in members.items()
    ]
    return sorted(stacks, key=lambda stack: -stack.flops * len(stack.params))


def share_out(stacks: Sequence[Stack], world_size: int) -> None:
    """Give every matrix to one process, so that all have about the same FLOPs; every process finds the same shares.

    The costliest come first, each to the process with the least work so far (Graham, 1969).
    """
    loads = [0] * world_size
    for stack in sorted(stacks, key=lambda stack: -stack.flops):
        stack.shares = [[] for _ in range(world_size)]
        for index in range(len(stack.params)):
            rank = loads.index(min(loads))
            loads[rank] += stack.flops
            stack.shares[rank].append(index)


class Exchange:
    """The results of one stack in one step: each process writes `own` and calls `start`; then all have `results`.

    Each process also sends which matrices have a gradient: if they disagreed, their weights would diverge.
    """

    def __init__(self, layout: Layout, like: Tensor, rank: int) -> None:
        processes, self._rank = len(layout.shares), rank
        size, flags = layout.depth * like.numel(), len(layout.mask)
        length = -(-(size + flags) // ALIGNMENT) * ALIGNMENT
        dtype = orthogonalisation_dtype(like.device)
        self._buffer = torch.empty(processes, length, dtype=dtype, device=like.device)
        self._flags = self._buffer[:, size : size + flags]
        self._flags[rank].copy_(layout.mask)
        self._by_process = self._buffer[:, :size].view(processes, layout.depth, *like.shape)
        #: (own matrices with a gradient,rows,cols), for this process to write.
        self.own = self._by_process[rank, : len(layout.shares[rank])]
        self._work: Work | None = None

    def start(self) -> None:
        """Begin to send. This is a collective: every process must call it."""
        if len(self._buffer) > 1:
            own = self._buffer[self._rank]
            self._work = all_gather_single(self._buffer.view(-1), own, async_op=True)

    def results(self) -> Tensor:
        """(processes,depth,rows,cols), once all have sent theirs. A GPU waits for them; the host does not.

        Raises:
            RuntimeError: processes differ in which matrices have a gradient (on a GPU, a device-side assertion).
        """
        if self._work is not None:
            self._work.wait()
            torch._assert_async(
                (self._flags == self._flags[:1]).all(),
                "MuonH: the processes of this run differ in which parameters have a gradient, so their weights would "
                "diverge. Every parameter must contribute to the loss on every process.",
            )
        return self._by_process
