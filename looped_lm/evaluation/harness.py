"""A looped model behind lm-eval's interface (extra `eval`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from looped_lm.evaluation.scoring import Encoded, Encoder, Score, Scorer
from looped_lm.generation import CachedDecoder, Sampling, continuation, known_ids, stream


class HarnessLM(LM):
    """A looped model that lm-eval can query; `seed` is for tasks that sample.

    Long prompts lose tokens on their left, after BOS, as with lm-eval's own models. At most a quarter of the context
    is kept free for new tokens.
    """

    def __init__(self, scorer: Scorer, encoder: Encoder, num_recurrences: int, seed: int = 0) -> None:
        super().__init__()
        self.scorer, self.encoder, self.num_recurrences, self.seed = scorer, encoder, num_recurrences, seed
        self._device = scorer.model.head.weight.device
        self._known: dict[tuple[str, str], tuple[Score, bool]] = {}

    def scores(self, pairs: Sequence[tuple[str, str]], title: str) -> list[tuple[Score, bool]]:
        """Score of every (prompt, continuation), computed once, and whether its prompt was cut."""
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        rows = [self.encoder.cut(self.encoder.pair(*pair)) for pair in new]
        found = self.scorer.score(rows, self.num_recurrences, title)
        self._known.update(zip(new, zip(found, (row.cut for row in rows), strict=True), strict=True))
        return [self._known[pair] for pair in pairs]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """(log p in nats, whether greedy decoding gives it) for every (context, continuation)."""
        pairs = [(str(context), str(continuation)) for context, continuation in (r.args for r in requests)]
        return [(-score.nats, score.greedy) for score, _ in self.scores(pairs, "log-likelihoods")]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """log p in nats of whole texts, each read in windows of the context."""
        # A window holds one token more than it predicts.
        bos, length = self.encoder.tokenizer.bos_id, self.encoder.context - 1
        windows: list[list[Encoded]] = []
        for request in requests:
            pieces = get_rolling_token_windows(list(self.encoder.ids(request.args[0])), bos, length, 1)
            windows.append([Encoded(tuple(a), tuple(b)) for a, b in map(make_disjoint_window, pieces)])
        flat = [row for rows in windows for row in rows]
        scores = iter(self.scorer.score(flat, self.num_recurrences, "whole texts"))
        return [-sum(next(scores).nats for _ in rows) for rows in windows]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """A continuation of every context up to a stop text, greedy unless the task samples."""
        texts: dict[int, str] = {}
        rows = [self._request(request.args[0], request.args[1]) for request in requests]
        alike: dict[Any, list[int]] = {}
        for i in sorted(range(len(rows)), key=lambda i: len(rows[i][0]), reverse=True):
            alike.setdefault(rows[i][1:], []).append(i)
        with tqdm(total=len(rows), desc="texts", leave=False) as bar:
            for (new_tokens, until, sampling), members in alike.items():
                for start in range(0, len(members), self.scorer.batch_size):
                    chosen = members[start : start + self.scorer.batch_size]
                    found = self._generate([rows[i][0] for i in chosen], new_tokens, until, sampling)
                    texts.update(zip(chosen, found, strict=True))
                    bar.update(len(chosen))
        return [texts[i] for i in range(len(rows))]

    def _request(
        self, context: str, options: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], int, tuple[str, ...], Sampling]:
        """Ids of the prompt, limit on new tokens, stop texts, and how tokens are chosen."""
        until = options.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        # 256 is lm-eval's own limit for tasks that have none.
        asked = int(options.get("max_gen_toks", options.get("max_new_tokens", 256)))
        new_tokens = max(1, min(asked, self.encoder.context // 4))
        ids = (self.encoder.tokenizer.bos_id, *self.encoder.ids(context))
        temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
        # Without a temperature nothing is drawn, and neither has an effect.
        top_k, top_p = (options.get("top_k"), options.get("top_p")) if temperature else (None, None)
        sampling = Sampling(temperature, top_k, top_p, self.seed)
        return self.encoder.cut(Encoded(ids, ()), new_tokens).prompt, new_tokens, until, sampling

    def _generate(
        self, prompts: list[tuple[int, ...]], new_tokens: int, until: tuple[str, ...], sampling: Sampling
    ) -> list[str]:
        model, tokenizer = self.scorer.model, self.encoder.tokenizer
        decoder = CachedDecoder(model, prompts, new_tokens, self.num_recurrences)
        known = known_ids(model, tokenizer)
        ids: list[list[int]] = [[] for _ in prompts]
        texts, done = [""] * len(prompts), [False] * len(prompts)
        with self.scorer.forward_context():
            for step in stream(decoder, new_tokens, sampling, tokenizer.bos_id, known):
                for row, token in enumerate(step.tokens):
                    # The beginning of a new document ends the answer, too.
                    done[row] = done[row] or token is None or token == tokenizer.bos_id
                    if not done[row]:
                        ids[row].append(int(token or 0))
                        texts[row] = continuation(tokenizer, prompts[row], ids[row])
                        ends = [at for at in (texts[row].find(stop) for stop in until if stop) if at >= 0]
                        if ends:
                            texts[row], done[row] = texts[row][: min(ends)], True
                if all(done):
                    break
        return texts
