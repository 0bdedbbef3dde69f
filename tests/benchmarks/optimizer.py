"""Speed of MuonH's orthogonalisation and step: python tests/benchmarks/optimizer.py [--config r8] [--rounds 7]

In every round the stacks of equal matrices of one architecture are orthogonalised as the optimizer does it, and plainly
as one batch each. A whole optimizer step and the matrix products of the model's own layer, forward and backward, run
beside them. Rates count matrix products alone; a column is the median over the rounds of the ratio to the layer's rate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from looped_lm.training.orthogonalisation import (  # noqa: E402
    POLAR_EXPRESS,
    orthogonalisation_dtype,
    orthogonalisation_flops,
    orthogonalise,
)
from looped_lm.training.sharding import stacks_of  # noqa: E402
from tests.benchmarks.steps import Sizes, Subject, clock  # noqa: E402


def plain(g: Tensor) -> Tensor:
    """The formulas on a whole stack (n,rows,cols)."""
    x = g.to(orthogonalisation_dtype(g.device))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (1.02 * x.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="r8", help="shipped config")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=8, help="d_model is 64 times this")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=None, help="torch's threads")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = Sizes(args.size, args.head_dim, seq_len=512, vocab=4096, rows=4, step_tokens=8192)
    subject = Subject(args.config, sizes, device, orthogonalisation_dtype(device), compiled=False)
    for p in subject.model.parameters():
        p.grad = torch.randn_like(p)
    groups = [g for g in subject.optimizer.param_groups if g["role"] == "matrix"]
    stacks = {tuple(s.params[0].shape): s for s in stacks_of(groups)}
    works: dict[Any, tuple[float, Callable[[], Any]]] = {"gemm": (subject.gemms.flops, subject.gemms)}
    total = 0
    for shape, stack in stacks.items():
        grads = [p.grad for p in stack.params if p.grad is not None]
        flops = len(grads) * orthogonalisation_flops(*shape)
        works[shape, "ours"] = flops, partial(orthogonalise, grads)
        works[shape, "plain"] = flops, partial(lambda g: plain(torch.stack(g)), grads)
        total += flops
    works["step"] = total, subject.optimizer.step
    seconds: dict[Any, list[float]] = {name: [] for name in works}
    for _, work in works.values():
        work()
    for _ in range(args.rounds):
        for name, (_, work) in works.items():
            seconds[name].append(clock(work, device))

    def of_gemm(*names: Any) -> float:
        flops = sum(works[n][0] for n in names)
        return median(
            flops / sum(seconds[n][i] for n in names) / (works["gemm"][0] / seconds["gemm"][i])
            for i in range(args.rounds)
        )

    rate = works["gemm"][0] / median(seconds["gemm"]) / 1e9
    print(f"{args.config}, d_model {subject.model.d_model}, {device.type}, {torch.get_num_threads()} threads")
    print(
        f"medians of {args.rounds} interleaved rounds; the layer's own products run at {rate:.1f} GFLOPs/s\n"
    )
    print("| matrices | orthogonalised, of GEMM rate | plain, of GEMM rate |\n|---|---|---|")
    for shape, stack in stacks.items():
        ours, other = of_gemm((shape, "ours")), of_gemm((shape, "plain"))
        print(f"| {len(stack.params)} of {shape[0]} x {shape[1]} | {ours:.3f} | {other:.3f} |")
    ours, other = (of_gemm(*[(s, which) for s in stacks]) for which in ("ours", "plain"))
    print(f"| all | {ours:.3f} | {other:.3f} |")
    print(
        f"\na whole step: {median(seconds['step']):.3f} s, {of_gemm('step'):.3f} of the GEMM rate by the same FLOPs"
    )


if __name__ == "__main__":
    main()
