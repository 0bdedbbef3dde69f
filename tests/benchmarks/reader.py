"""Speed of reading at T = 2,048: python tests/benchmarks/reader.py

It prepares the embedded corpus as bytes, then times TokenDataModule's training batches, without start-up.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from datamodules import ByteTokenizer, TokenDataModule  # noqa: E402

SEQ_LEN = 2048
BATCH = 16
BATCHES = 300


def tokens_per_second(data: TokenDataModule) -> float:
    """Speed over BATCHES batches after the first ten."""
    batches = iter(data.train_dataloader())
    for _ in itertools.islice(batches, 10):
        pass
    begin = time.perf_counter()
    for _ in itertools.islice(batches, BATCHES):
        pass
    return BATCHES * BATCH * SEQ_LEN / (time.perf_counter() - begin)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        for workers in (0, 1, 2):
            data = TokenDataModule(
                ByteTokenizer(), seq_len=SEQ_LEN, batch_size=BATCH, num_workers=workers, cache_dir=cache
            )
            data.prepare_data()
            data.setup()
            if not workers:
                print(f"{data.unique_tokens:,} tokens in rows of {SEQ_LEN:,} + 1, batches of {BATCH} rows")
            print(f"{workers} workers: {tokens_per_second(data) / 1e6:.1f} million tokens/s")


if __name__ == "__main__":
    main()
