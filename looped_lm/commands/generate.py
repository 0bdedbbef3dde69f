"""`python -m looped_lm generate`: text from a trained model, printed as it is generated."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from looped_lm.common.errors import UserError

if TYPE_CHECKING:
    from looped_lm.generation import Decoder, ExitRule, Generated
    from looped_lm.sharing.load import TextTokenizer


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        prog="python -m looped_lm generate",
        description="Continue prompts with a trained model. Text goes to standard output, all else to standard error.",
        allow_abbrev=False,
    )
    add = p.add_argument
    add("--ckpt", "--ckpt_path", required=True, help="checkpoint, or a folder written by `export`")
    add(
        "--prompt",
        action="append",
        default=[],
        help="text to continue; may be given several times; default: none",
    )
    add("--prompt-file", type=Path, help="file with a prompt in each line")
    add("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    add("--temperature", type=float, default=1.0, help="0 is greedy; default: %(default)s")
    add("--top-k", type=int, help="sample among the k most likely tokens")
    add("--top-p", type=float, help="sample among the tokens that hold this much probability")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--recurrences", type=int, help="recurrences to run; default: as trained")
    add("--kv-budget", type=int, help="recurrences whose keys and values are kept; default: all")
    early = p.add_mutually_exclusive_group()
    early.add_argument(
        "--exit-change",
        type=float,
        help="a token leaves the loop when the state that the coda reads changes by less, relative to its norm",
    )
    early.add_argument(
        "--exit-kl", type=float, help="the same when its next-token distribution changes by less (KL, nats)"
    )
    early.add_argument(
        "--exit-probability",
        type=float,
        help="the same when the model's exit distribution has left with this probability",
    )
    add("--no-cache", action="store_true", help="run the whole text for every token: slow, for comparison")
    add("--keep-going", action="store_true", help="do not stop where the model begins a new document (BOS)")
    add("--tokenizer", help="class path, or class_path and init_args as YAML; default: that of training")
    add("--device", help="such as cpu or cuda; default: a GPU if there is one")
    return p


def read_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """Prompts of the command line, then those of the file; a single empty one if there are none."""
    try:
        text = "" if file is None else file.read_text(encoding="utf-8").removesuffix("\n")
        "".join(given).encode()
    except OSError as error:
        raise UserError(f"--prompt-file cannot be read: {error}") from error
    except UnicodeError as error:
        where = file if isinstance(error, UnicodeDecodeError) else "--prompt"
        raise UserError(f"{where} is not UTF-8 text ({error}).") from error
    # Not splitlines(), which also ends lines at form feeds and other characters within a text.
    return [*given, *(text.split("\n") if text else [])] or [""]


class Printer:
    """Prints several texts in order while all of them grow: the first that is not finished streams."""

    def __init__(
        self, tokenizer: TextTokenizer, prompts: Sequence[str], rows: Sequence[Sequence[int]]
    ) -> None:
        self._tokenizer, self._prompts, self._rows = tokenizer, prompts, rows
        self._ids: list[list[int]] = [[] for _ in prompts]
        self._row, self._shown = 0, ""
        self._open()

    def _open(self) -> None:
        if len(self._prompts) > 1:
            print(f"{'' if self._row == 0 else chr(10)}--- {self._row + 1} of {len(self._prompts)}")
        print(self._prompts[self._row], end="", flush=True)
        self._shown = ""

    def add(self, tokens: Sequence[int | None]) -> None:
        """Take one step's tokens, None for a text that has ended, and print what can be shown."""
        for ids, token in zip(self._ids, tokens, strict=True):
            if token is not None:
                ids.append(token)
        while self._row < len(self._ids):
            ended = tokens[self._row] is None
            self._show(ended)
            if not ended:
                return
            print(flush=True)
            self._row += 1
            if self._row < len(self._ids):
                self._open()

    def close(self) -> None:
        """Print what is left."""
        self.add([None] * len(self._ids))

    def _show(self, finished: bool) -> None:
        from looped_lm.generation import continuation

        text = continuation(self._tokenizer, self._rows[self._row], self._ids[self._row])
        # The last character may still lack bytes.
        ready = text if finished else text.rstrip("\ufffd")
        if ready.startswith(self._shown):
            print(ready[len(self._shown) :], end="", flush=True)
            self._shown = ready


def report(decoder: Decoder, generated: Generated, seconds: float, shortcuts: bool, known: int) -> str:
    """What generation took: tokens, speed, recurrences, memory of the cache, and the drift of shortcuts."""
    from looped_lm.generation import CachedDecoder, drift

    used = [r for row in generated.recurrences for r in row]
    lines = [
        f"{len(used):,} tokens in {seconds:.1f} s ({len(used) / seconds:.1f} tokens/s)",
        f"recurrences: mean {sum(used) / len(used):.2f}, {min(used)} to {max(used)} of {decoder.num_recurrences}",
    ]
    if isinstance(decoder, CachedDecoder):
        cache = decoder.cache
        kept = f"entries of {cache.slots} of {decoder.num_recurrences} recurrences"
        lines.append(f"KV cache: {cache.bytes / 2**20:.2f} MiB, {kept}")
    if shortcuts:
        lines.append(f"drift from all recurrences and entries: {drift(decoder, generated, known)}")
    return "\n".join(lines)


def main(args: Sequence[str]) -> None:
    """Run the command."""
    given = parser().parse_args(args)
    from looped_lm import generation
    from looped_lm.sharing.load import load_model, load_tokenizer
    from looped_lm.training.devices import usable_device

    rule: ExitRule | None = None
    if given.exit_change is not None:
        rule = generation.RelativeChange(given.exit_change)
    elif given.exit_kl is not None:
        rule = generation.KLChange(given.exit_kl)
    exits = rule is not None or given.exit_probability is not None
    if given.no_cache and (exits or given.kv_budget is not None):
        raise UserError("--no-cache keeps nothing: leave out --kv-budget and the --exit options with it.")
    sampling = generation.Sampling(given.temperature, given.top_k, given.top_p, given.seed)
    prompts = read_prompts(given.prompt, given.prompt_file)
    device = usable_device(given.device)
    model = load_model(given.ckpt).to(device)
    if given.exit_probability is not None:
        rule = generation.ExitProbability(given.exit_probability, model.objective)
    tokenizer = load_tokenizer(given.ckpt, given.tokenizer)
    rows = generation.with_bos(tokenizer, prompts)
    new = given.max_new_tokens
    longest = max(map(len, rows)) + new
    if longest > model.seq_len:
        print(
            f"note: the text may grow to {longest} tokens; the model was trained on {model.seq_len} and is likely to "
            "get worse beyond that.",
            file=sys.stderr,
        )
    if given.no_cache:
        decoder: Decoder = generation.UncachedDecoder(model, rows, new, given.recurrences)
    else:
        decoder = generation.CachedDecoder(model, rows, new, given.recurrences, given.kv_budget, rule)
    known = generation.known_ids(model, tokenizer)
    stop = None if given.keep_going else tokenizer.bos_id
    printer, steps = Printer(tokenizer, prompts, rows), list[generation.Step]()
    start = time.perf_counter()
    for step in generation.stream(decoder, new, sampling, stop, known):
        # The beginning of a new document ends the text and is not part of it.
        printer.add([None if t == stop else t for t in step.tokens])
        steps.append(step)
    printer.close()
    generated = generation.Generated.collect(iter(steps))
    seconds = time.perf_counter() - start
    shortcuts = rule is not None or (given.kv_budget or decoder.num_recurrences) < decoder.num_recurrences
    print(report(decoder, generated, seconds, shortcuts, known), file=sys.stderr)
