"""Speed of packing against the plain quadratic version: python tests/benchmarks/packing.py [DOCUMENTS]

100,000 documents of log-normal lengths (mean 1,000 tokens), rows of 2,049, a buffer of 1,000, one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from datamodules.packing import pack  # noqa: E402
from tests.support.reference.packing import plain_pack  # noqa: E402


def main(documents: int) -> None:
    sigma = 1.0
    lengths = np.random.default_rng(0).lognormal(np.log(1000) - sigma**2 / 2, sigma, documents)
    lengths = np.maximum(lengths.astype(int), 1).tolist()
    start = time.perf_counter()
    rows = list(pack(lengths, 2049, 1000))
    fast = time.perf_counter() - start
    start = time.perf_counter()
    plain = plain_pack(lengths, 2049, 1000)
    slow = time.perf_counter() - start
    print(f"{documents:,} documents, mean {np.mean(lengths):.0f} tokens -> {len(rows):,} rows")
    print(
        f"plain {slow:.2f} s, ours {fast:.3f} s: {slow / fast:.0f} times as fast; identical: {rows == plain}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", nargs="?", type=int, default=100_000, help="default: %(default)s")
    main(parser.parse_args().documents)
