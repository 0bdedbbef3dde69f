"""Decoding with the cache and without: python tests/benchmarks/decoding.py [--json FILE]

Seconds per token at a given context length, both from the same state: the cached decoder adds one token to a full
cache, the uncached one runs the whole row. Rounds alternate between the two, and ratios are taken within a round.
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

sys.path.insert(0, str(Path(__file__).parents[2]))

from looped_lm import HyperConnectionLanes, LoopedTransformer, PassthroughInjection  # noqa: E402
from looped_lm.generation import CachedDecoder, Decoder, UncachedDecoder  # noqa: E402

LAYOUTS: dict[str, dict[str, Any]] = {
    "r1": dict(
        prelude_layers=0,
        recurrent_layers=20,
        coda_layers=0,
        num_recurrences=1,
        injection=PassthroughInjection,
    ),
    "r4": dict(recurrent_layers=4, num_recurrences=4),
    "r8": dict(recurrent_layers=2, num_recurrences=8),
    "r8_hc": dict(
        recurrent_layers=2, num_recurrences=8, injection=PassthroughInjection, lanes=HyperConnectionLanes
    ),
}


@torch.inference_mode()
def seconds(decoder: Decoder, tokens: int) -> float:
    """Seconds per token, over `tokens` tokens."""
    start = time.perf_counter()
    for _ in range(tokens):
        decoder.append(decoder.logits().argmax(dim=-1))
    return (time.perf_counter() - start) / tokens


@torch.inference_mode()
def measure(layout: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds of one layout."""
    model = LoopedTransformer(1024, args.context, args.size, args.head_dim, **LAYOUTS[layout])
    prompts = torch.randint(1024, (args.rows, args.context)).tolist()
    rounds = []
    room = 2 + args.rounds * (args.tokens + 1)
    cached, uncached = CachedDecoder(model, prompts, room), UncachedDecoder(model, prompts, room)
    # The cached decoder's first token takes the pass over the prompt.
    for decoder in (cached, uncached):
        seconds(decoder, 2 if decoder is cached else 1)
    for _ in range(args.rounds):
        rounds.append((seconds(cached, args.tokens), seconds(uncached, 1)))
    return {
        "layout": layout,
        "cached_ms": 1e3 * median(c for c, _ in rounds),
        "uncached_ms": 1e3 * median(u for _, u in rounds),
        "ratio": median(u / c for c, u in rounds),
        "cache_mib": cached.cache.bytes / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=512, help="tokens of context")
    parser.add_argument("--size", type=int, default=2, help="d_model is 64 times this")
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8, help="cached tokens of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None, help="torch's threads")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--json", type=Path, default=None, help="file for all figures")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = [measure(layout, args) for layout in args.layouts]
    print(
        f"{args.context} tokens of context, d_model {64 * args.size}, {args.rows} row(s), medians of {args.rounds}"
    )
    print(
        "| layout | cached, ms/token | uncached, ms/token | times faster | cache, MiB |\n|---|---|---|---|---|"
    )
    for row in rows:
        print(
            f"| {row['layout']} | {row['cached_ms']:.2f} | {row['uncached_ms']:.1f} | {row['ratio']:.1f} "
            f"| {row['cache_mib']:.2f} |"
        )
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
