"""Memory of a training step on CPUs: python tests/benchmarks/memory.py [--json FILE]

Bytes that the backward pass needs, without the head (distinct storages of saved tensors), the growth of a fresh
process's peak resident memory, and the time of a step, each relative to full backpropagation through r = 8; then the
loss head against a plain one at B = 8, T = 512, V = 32,064.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from looped_lm.model.loss import softcapped_cross_entropy  # noqa: E402
from tests.benchmarks.steps import Sizes, Subject, clock, ratio  # noqa: E402
from tests.support.saved_tensors import held_bytes  # noqa: E402

CPU = torch.device("cpu")
SIZES = Sizes(size=8, head_dim=128, seq_len=512, vocab=4096, rows=4, step_tokens=8192)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "r8 full": ("r8", {}),
    "r8 truncated, k = 4": ("r8_truncated", {}),
    "r8 recomputed": ("r8", {"recompute": True}),
}
HEAD_ROWS, HEAD_LEN, HEAD_VOCAB, HEAD_WIDTH = 8, 512, 32064, 512
ROUNDS = 5


def peak_mib() -> float:
    """Peak resident memory of this process in MiB (Linux). `getrusage` would start from the parent's peak."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def step_growth(name: str) -> float:
    """MiB by which the peak of a fresh process grows in one step."""
    config, options = VARIANTS[name]
    subject = Subject(config, SIZES, CPU, compiled=False, **options)
    before = peak_mib()
    subject.ours()
    return peak_mib() - before


def plain_head(hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, cap: float) -> Tensor:
    logits = (hidden @ weight.T)[:, :vocab].float()
    return F.cross_entropy(cap * torch.tanh(logits / cap), targets)


HEADS = {"plain head": plain_head, "chunked head": softcapped_cross_entropy}


def head_inputs() -> tuple[Tensor, Tensor, Tensor, int, float]:
    torch.manual_seed(0)
    hidden = torch.randn(HEAD_ROWS * HEAD_LEN, HEAD_WIDTH, requires_grad=True)
    weight = (0.01 * torch.randn(HEAD_VOCAB, HEAD_WIDTH)).requires_grad_()
    return hidden, weight, torch.randint(HEAD_VOCAB, (len(hidden),)), HEAD_VOCAB, 15.0


def head_growth(name: str) -> float:
    """MiB by which the peak of a fresh process grows in forward and backward of a head."""
    inputs = head_inputs()
    # Weights and gradients exist in either case.
    for leaf in inputs[:2]:
        leaf.grad = torch.zeros_like(leaf)
    before = peak_mib()
    HEADS[name](*inputs).backward()
    return peak_mib() - before


def fresh(work: Any, name: str, mapped: bool = True) -> float:
    """The result of `work(name)` in a process of its own.

    With `mapped` the C library maps every tensor separately and returns it when freed, so the peak is what was in use
    at once. Otherwise the heap's fragmentation adds to it, which depends on the order of allocations.
    """
    os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    if mapped:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, (name,))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=None, help="file for all figures")
    args = parser.parse_args()
    tokens = torch.zeros(SIZES.rows, SIZES.seq_len, dtype=torch.int64)
    subjects = {
        name: Subject(config, SIZES, CPU, compiled=False, **options)
        for name, (config, options) in VARIANTS.items()
    }
    held = {name: held_bytes(subject.model, tokens) for name, subject in subjects.items()}
    for index in range(-1, ROUNDS):
        for subject in subjects.values():
            if index == 0:
                subject.rounds.clear()
            subject.measure(index, plain=False)
    growth = {name: fresh(step_growth, name) for name in VARIANTS}
    heaped = {name: fresh(step_growth, name, mapped=False) for name in VARIANTS}
    base = subjects["r8 full"]
    print("| step | saved, MiB | of full | peak, MiB | of full | peak with heap | of full | time, of full |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name, subject in subjects.items():
        rows.append(
            {
                "name": name,
                "saved": held[name] / held["r8 full"],
                "peak": growth[name] / growth["r8 full"],
                "heaped": heaped[name] / heaped["r8 full"],
                "time": ratio(subject.seconds("ours"), base.seconds("ours")),
            }
        )
        print(
            f"| {name} | {held[name] / 2**20:.0f} | {rows[-1]['saved']:.3f} | {growth[name]:.0f} "
            f"| {rows[-1]['peak']:.3f} | {heaped[name]:.0f} | {rows[-1]['heaped']:.3f} | {rows[-1]['time']:.3f} |"
        )
    times: dict[str, list[float]] = {name: [] for name in HEADS}
    inputs = head_inputs()
    for index in range(-1, ROUNDS):
        for name, head in HEADS.items():
            seconds = clock(lambda head=head: head(*inputs).backward(), CPU)  # type: ignore[misc]
            if index >= 0:
                times[name].append(seconds)
    peaks = {name: fresh(head_growth, name) for name in HEADS}
    print("\n| head | peak, MiB | of plain | seconds | of plain |\n|---|---|---|---|---|")
    for name in HEADS:
        print(
            f"| {name} | {peaks[name]:.0f} | {peaks[name] / peaks['plain head']:.3f} | {median(times[name]):.3f} "
            f"| {ratio(times[name], times['plain head']):.3f} |"
        )
    if args.json:
        args.json.write_text(json.dumps({"steps": rows, "heads": peaks, "head_seconds": times}))


if __name__ == "__main__":
    main()
