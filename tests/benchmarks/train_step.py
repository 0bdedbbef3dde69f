"""Speed of a training step on CPUs: python tests/benchmarks/train_step.py [--pairs 15] [--json FILE]

Forward and backward of one micro-batch in fp32. In every round each architecture is timed next to a plain eager version
of the same step and next to the matrix products of its own layer, so all figures are ratios within one round; a column
is the median over the rounds. The optimizer step, one per 8,192 tokens, is timed separately.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.steps import Sizes, Subject, ratio  # noqa: E402

ARCHITECTURES = ("r1", "r4", "r8", "r8_hc", "r8_truncated")


def summary(subject: Subject, first: Subject, linear: Subject | None) -> dict[str, Any]:
    """The figures of one architecture, relative to the first and to the linear one of the same recurrences."""
    optimizer, step = subject.seconds("optimizer"), subject.step_seconds()
    row = {
        "architecture": subject.name,
        "gflops_per_token": subject.flops / subject.sizes.tokens / 1e9,
        "gflops_per_second": median(subject.rates("ours")) / 1e9,
        "of_gemm": ratio(subject.rates("ours"), subject.rates("gemm")),
        "over_plain": ratio(subject.rates("ours"), subject.rates("plain")),
        "over_first": ratio(subject.rates("ours"), first.rates("ours")),
        "optimizer_share": ratio(optimizer, step),
    }
    if linear is not None:
        row["time_over_linear"] = ratio(subject.seconds("ours"), linear.seconds("ours"))
        row["flops_over_linear"] = subject.flops / linear.flops
    return row


def table(rows: list[dict[str, Any]], pairs: int) -> str:
    """The figures as a markdown table."""
    first = rows[0]["architecture"]
    lines = [
        f"Medians of {pairs} interleaved rounds.",
        "",
        f"| architecture | GFLOPs/token | of GEMM rate | over plain | per FLOP, over {first} | optimizer step |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['architecture']} | {row['gflops_per_token']:.3f} | {row['of_gemm']:.3f} | {row['over_plain']:.3f} "
            f"| {row['over_first']:.3f} | {row['optimizer_share']:.1%} |"
        )
    for row in rows:
        if "time_over_linear" in row:
            lines.append(
                f"{row['architecture']}: {row['time_over_linear']:.3f} of r8's time for "
                f"{row['flops_over_linear']:.3f} of its FLOPs"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15, help="rounds")
    parser.add_argument("--size", type=int, default=8, help="d_model is 64 times this")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--threads", type=int, default=None, help="torch's threads")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--architectures", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--json", type=Path, default=None, help="file for all figures")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    sizes = Sizes(args.size, args.head_dim, args.seq_len, args.vocab, args.rows, step_tokens=8192)
    subjects = [
        Subject(name, sizes, torch.device("cpu"), compiled=not args.eager) for name in args.architectures
    ]
    for subject in subjects:
        # The first round compiles and warms up.
        subject.measure(0)
        subject.rounds.clear()
    for index in range(args.pairs):
        for subject in subjects:
            subject.measure(index)
        print(f"round {index + 1} of {args.pairs}", file=sys.stderr, flush=True)
    linear = next((s for s in subjects if s.name == "r8"), None)
    rows = [summary(s, subjects[0], linear if s.name.startswith("r8_") else None) for s in subjects]
    print(table(rows, args.pairs))
    if args.json:
        figures = {
            "settings": {k: str(v) for k, v in vars(args).items()},
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "rows": rows,
            "rounds": {s.name: s.rounds for s in subjects},
        }
        args.json.write_text(json.dumps(figures, indent=1))
        print(f"all times: {args.json}")


if __name__ == "__main__":
    main()
