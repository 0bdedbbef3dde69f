"""Speed of a training step on one GPU: python tests/benchmarks/gpu_step.py [--json FILE]

Size 20, T = 2,048, bf16 autocast, compiled layers, steps of 2^18 tokens; under six minutes on one GPU. MFU is the rate
of counted FLOPs (convention `paper`) over the device's bf16 peak. Without a GPU the same program runs on the CPU at a
small size in fp32, with the measured GEMM rate in place of the peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.steps import Sizes, Subject, ratio  # noqa: E402

GPU_SIZES = Sizes(size=20, head_dim=128, seq_len=2048, vocab=32001, rows=16, step_tokens=2**18)
CPU_SIZES = Sizes(size=2, head_dim=64, seq_len=128, vocab=1024, rows=4, step_tokens=2048)
#: Name, shipped config, further arguments, and whether a plain eager version is timed beside it.
SUBJECTS: tuple[tuple[str, str, dict[str, Any], bool], ...] = (
    ("r1", "r1", {}, True),
    ("r4", "r4", {}, True),
    ("r8", "r8", {}, False),
    ("r8_hc", "r8_hc", {}, False),
    ("r8_truncated", "r8_truncated", {}, False),
    ("r8, recomputed", "r8", {"recompute": True}, False),
)


def figures(
    label: str, config: str, options: dict[str, Any], plain: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure one architecture, then free its memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    sizes = GPU_SIZES if on_gpu else CPU_SIZES
    if args.rows:
        sizes = Sizes(**{**vars(sizes), "rows": args.rows})
    dtype = torch.bfloat16 if on_gpu else torch.float32
    subject = Subject(config, sizes, device, dtype, compiled=not args.eager, **options)
    if on_gpu:
        # As in training, where the embedding is bf16 on a GPU.
        subject.model.embedding.to(dtype)
    for _ in range(3):
        subject.measure(0, plain)
    subject.rounds.clear()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for index in range(args.rounds):
        subject.measure(index, plain)
    gemm = median(subject.rates("gemm"))
    peak = args.peak or (get_available_flops(device, dtype) if on_gpu else None) or gemm
    step_rate = subject.flops / sizes.tokens * sizes.step_tokens / median(subject.step_seconds())
    row = {
        "architecture": label,
        "peak": peak,
        "mfu": median(subject.rates("ours")) / peak,
        "mfu_with_optimizer": step_rate / peak,
        "of_gemm": ratio(subject.rates("ours"), subject.rates("gemm")),
        "over_plain": ratio(subject.rates("ours"), subject.rates("plain")) if plain else None,
        "tokens_per_second": sizes.step_tokens / median(subject.step_seconds()),
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
        "rounds": subject.rounds,
    }
    del subject
    if on_gpu:
        torch.cuda.empty_cache()
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as a markdown table."""
    first = rows[0]["mfu"]

    def optional(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        "| architecture | MFU | with optimizer | of GEMM rate | over plain | per FLOP, over r1 | tokens/s | GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['architecture']} | {row['mfu']:.3f} | {row['mfu_with_optimizer']:.3f} | {row['of_gemm']:.3f} "
            f"| {optional(row['over_plain'], '.2f')} | {row['mfu'] / first:.3f} | {row['tokens_per_second']:,.0f} "
            f"| {optional(row['peak_gib'], '.1f')} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=None, help="rows of a micro-batch")
    parser.add_argument("--peak", type=float, default=None, help="peak FLOPs/s of the device")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--json", type=Path, default=None, help="file for all figures")
    args = parser.parse_args()
    begin = time.perf_counter()
    rows = []
    for label, config, options, plain in SUBJECTS:
        rows.append(figures(label, config, options, plain, args))
        print(f"{label}: done after {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU (small sizes, fp32)"
    print(f"{name}; peak {rows[0]['peak'] / 1e12:.3g} TFLOP/s; torch {torch.__version__}\n\n{table(rows)}")
    if args.json:
        args.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))
        print(f"all times: {args.json}")


if __name__ == "__main__":
    main()
