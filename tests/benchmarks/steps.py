"""What the benchmarks of training steps share: models of the shipped configs, a plain step, rounds, GEMM rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looped_lm import LoopContext, LoopedTransformer, MuonH
from looped_lm.model.accounting import flops_per_token, parameter_roles
from looped_lm.model.compilation import compile_in_place
from tests.support.shipped import shipped


def model_of(config: str, **overrides: Any) -> LoopedTransformer:
    """The architecture of a shipped config, in the sizes given."""
    return LoopedTransformer(**{**shipped(f"{config}.yaml"), **overrides})


def batch_of(rows: int, seq_len: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random inputs and targets (rows, seq_len)."""
    row = torch.randint(vocab_size, (rows, seq_len + 1), device=device)
    return row[:, :-1].contiguous(), row[:, 1:].contiguous()


def plain_loss(model: LoopedTransformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """The same loss, computed plainly: uncompiled layers, all logits at once, the graph of every recurrence kept.

    Detaching the state cuts off recurrences without gradients. Calling `forward` directly avoids the compiled call.
    """
    context = LoopContext(*model.rotary(tokens.shape[1]))

    def through(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
        for layer in layers:
            x = layer.forward(x, context)
        return x

    e = through(model.prelude, model.norm_emb(model.embedding(tokens)))
    state = model.lanes.expand(model.injection.initial_state(e))
    graphs = []
    for i in range(model.num_recurrences):
        u = through(model.block, model.injection(e, model.lanes.read(state, i), i))
        state = model.lanes.write(state, model.norm_recur(u), i)
        graphs.append(state)
        if not model.bptt.keeps_grad(i, model.num_recurrences):
            state = state.detach()
    hidden = model.norm_final(through(model.coda, model.lanes.reduce(state)))
    logits = model.head(hidden)[..., : model.vocab_size].float()
    capped = model.logit_softcap * torch.tanh(logits / model.logit_softcap)
    return F.cross_entropy(capped.flatten(0, 1), targets.flatten())


class Gemms:
    """Every matrix product of one layer's training step, forward and backward, at the model's own shapes."""

    def __init__(self, model: LoopedTransformer, tokens: int, dtype: torch.dtype) -> None:
        device = model.head.weight.device
        self.products: list[tuple[Tensor, Tensor]] = []
        self.flops = 0
        for module in next(model.layers()).modules():
            if not isinstance(module, nn.Linear):
                continue
            n, k = module.weight.shape
            x, w, g = (
                torch.randn(shape, device=device, dtype=dtype) for shape in ((tokens, k), (n, k), (tokens, n))
            )
            self.products += [(x, w.T), (g, w), (g.T, x)]
            self.flops += 3 * 2 * tokens * n * k

    def __call__(self) -> None:
        for a, b in self.products:
            torch.mm(a, b)


def clock(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `work` takes, including the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def ratio(a: list[float], b: list[float]) -> float:
    """Median over rounds of a/b within the round."""
    return median(x / y for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models under test, and of a micro-batch."""

    size: int
    head_dim: int
    seq_len: int
    vocab: int
    rows: int
    step_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.seq_len


class Subject:
    """One architecture under test and the seconds of its rounds: ours, plain, gemm, optimizer.

    Args:
        name: shipped config.
        sizes: sizes of the model and of a micro-batch.
        device: where it runs.
        dtype: type of the matrix products; autocast is used for types other than fp32.
        compiled: compile the layers.
        overrides: further arguments of the model.

    Raises:
        RuntimeError: the layers cannot be compiled here.
    """

    def __init__(
        self,
        name: str,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        compiled: bool = True,
        **overrides: Any,
    ) -> None:
        torch.manual_seed(0)
        self.name, self.sizes, self.device, self.dtype = name, sizes, device, dtype
        self.model = model_of(
            name,
            vocab_size=sizes.vocab,
            seq_len=sizes.seq_len,
            size=sizes.size,
            head_dim=sizes.head_dim,
            **overrides,
        ).to(device)
        problem = compile_in_place(self.model, device) if compiled else None
        if problem:
            raise RuntimeError(f"nothing can be compiled here: {problem}")
        self.batch = batch_of(sizes.rows, sizes.seq_len, sizes.vocab, device)
        self.flops = flops_per_token(self.model, sizes.seq_len) * sizes.tokens
        self.gemms = Gemms(self.model, sizes.tokens, dtype)
        self.optimizer = _optimizer(self.model)
        self.rounds: list[dict[str, float]] = []

    def _autocast(self) -> AbstractContextManager:
        return nullcontext() if self.dtype is torch.float32 else torch.autocast(self.device.type, self.dtype)

    def ours(self) -> None:
        """Forward and backward of a micro-batch."""
        with self._autocast():
            loss = self.model(*self.batch)
        loss.backward()

    def plain(self) -> None:
        """Forward and backward of a micro-batch, plain and eager."""
        with self._autocast():
            loss = plain_loss(self.model, *self.batch)
        loss.backward()

    def measure(self, index: int, plain: bool = True) -> None:
        """One round. The two versions take turns to go first."""
        works = {"ours": self.ours, "plain": self.plain} if plain else {"ours": self.ours}
        seconds = {"gemm": clock(self.gemms, self.device)}
        for name in list(works) if index % 2 else list(works)[::-1]:
            self.model.zero_grad()
            seconds[name] = clock(works[name], self.device)
        seconds["gemm"] = (seconds["gemm"] + clock(self.gemms, self.device)) / 2
        seconds["optimizer"] = clock(self.optimizer.step, self.device)
        self.rounds.append(seconds)

    def seconds(self, name: str) -> list[float]:
        """Seconds of every round."""
        return [seconds[name] for seconds in self.rounds]

    def rates(self, name: str) -> list[float]:
        """Counted FLOPs per second of every round."""
        flops = self.gemms.flops if name == "gemm" else self.flops
        return [flops / seconds for seconds in self.seconds(name)]

    def step_seconds(self) -> list[float]:
        """Seconds of a whole step of `step_tokens` tokens, including the optimizer."""
        micro_batches = self.sizes.step_tokens / self.sizes.tokens
        return [s["ours"] * micro_batches + s["optimizer"] for s in self.rounds]


def _optimizer(model: LoopedTransformer) -> MuonH:
    roles, named = parameter_roles(model), list(model.named_parameters())
    return MuonH(
        [
            {"params": [(n, p) for n, p in named if roles[n] == role], "role": role, "lr": 1e-4}
            for role in sorted(set(roles.values()))
        ]
    )
