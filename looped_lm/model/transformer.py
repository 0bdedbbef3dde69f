"""The looped transformer: embed, prelude, loop, coda, head. The only file with the loop.

B batch rows, T sequence length, d = d_model, V vocabulary, r recurrences. Source: arXiv 2604.21106, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from looped_lm.common.errors import UserError
from looped_lm.loop.blocks import PreNormLayer, Rotary, rms_norm
from looped_lm.loop.bptt import BPTTStrategy
from looped_lm.loop.component import Component, PerRecurrence
from looped_lm.loop.injection import Injection, LinearInjection
from looped_lm.loop.lanes import Lanes, SingleLane, State
from looped_lm.loop.layer import KeyValueSlot, Layer, LayerSizes, LoopContext
from looped_lm.loop.objective import FinalCrossEntropy, Objective
from looped_lm.loop.residual import PlainResidual, Residual
from looped_lm.loop.trainability import refuse_untrainable
from looped_lm.model.loss import softcapped_cross_entropy
from looped_lm.seams import SEAMS, components, specs

#: What every layer of the block handed to the next recurrence.
Memory: TypeAlias = tuple[Any, ...]
WIDTH_UNIT = 64
VOCAB_UNIT = 64


def round_up(n: int, unit: int) -> int:
    """Smallest multiple of `unit` that is at least `n`."""
    return -(-n // unit) * unit


class Exit(Protocol):
    """Decides in generation when rows leave the loop early."""

    #: State (B,T,d) that the coda reads: for each row, the state after that row's last recurrence.
    output: Tensor

    def settled(self, i: int, state: Tensor, logits: Callable[[Tensor], Tensor]) -> bool:
        """Take in the state after recurrence `i`; whether all rows have left. `logits` runs coda and head."""


class Cache(Protocol):
    """What earlier tokens left behind, as the loop reads it; `looped_lm.generation.cache` implements it."""

    #: Positions (B,T) of this pass's tokens, and one more than the largest so far.
    positions: Tensor
    filled: int

    @property
    def exit(self) -> Exit | None:
        """The early exit; None in a pass that runs all recurrences."""

    @property
    def once(self) -> KeyValueSlot:
        """The slot that prelude and coda read and write."""

    def recurrence(self, i: int) -> KeyValueSlot:
        """The slot that the block's layers read and write at recurrence `i`."""

    def separate(self, begins: Tensor) -> None:
        """Keep attention of this pass within documents; bool (B,T): which of its tokens begin one."""


class LoopedTransformer(Component, nn.Module):
    """Decoder-only transformer that runs a shared block of layers `num_recurrences` times.

    Args:
        vocab_size: number of tokens V; tables are padded to a multiple of 64, logits are cut back to V.
        seq_len: tokens of context T in training.
        size: width in units of 64, whole numbers in the paper: d_model = 64·size, rounded up to a multiple of
            `head_dim`.
        head_dim: size of one attention head (128 in the paper).
        n_kv_heads: key/value heads for grouped-query attention; None means as many as query heads.
        prelude_layers: layers that run once before the loop.
        recurrent_layers: layers of the shared block.
        coda_layers: layers that run once after the loop.
        num_recurrences: how many times r the shared block runs.
        injection: factory `d_model -> Injection`, or class_path and init_args.
        lanes: factory `(d_model, num_recurrences) -> Lanes`, likewise.
        residual: factory `(d_model, num_recurrences) -> Residual` of the block's branches, likewise.
        layer: factory `LayerSizes -> Layer` of the layers, likewise.
        layer_in_block_only: whether prelude and coda keep the paper's layer whatever `layer` is.
        bptt: which recurrences keep gradients; None: all.
        objective: factory `(d_model, num_recurrences) -> Objective` that training minimises, likewise.
        logit_softcap: logits are capped as c·tanh(logits/c).
        document_start: id of the token that begins a document, 0 to V - 1: attention then stays within documents, in
            all recurrences alike. None: a row is one context. FLOPs count whole rows either way.
        rope_bf16: round the rotary tables to bfloat16, as checkpoints of the paper's public code expect.
        recompute: run each recurrence again in the backward pass: less memory for about a third more time. Same
            gradients, unless a component draws random numbers.

    Raises:
        UserError: sizes that do not make a model, or components that cannot train together.
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        size: int | float = 2,
        head_dim: int = 128,
        n_kv_heads: int | None = None,
        prelude_layers: int = 2,
        recurrent_layers: int = 4,
        coda_layers: int = 2,
        num_recurrences: int = 4,
        injection: Callable[[int], Injection] = LinearInjection,
        lanes: Callable[[int, int], Lanes] = SingleLane,
        residual: Callable[[int, int], Residual] = PlainResidual,
        layer: Callable[[LayerSizes], Layer] = PreNormLayer,
        layer_in_block_only: bool = False,
        bptt: BPTTStrategy | None = None,
        objective: Callable[[int, int], Objective] = FinalCrossEntropy,
        logit_softcap: float = 15.0,
        document_start: int | None = None,
        rope_bf16: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes(locals())
        d_model = round_up(math.ceil(WIDTH_UNIT * size), head_dim)
        n_heads = d_model // head_dim
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if not 1 <= n_kv_heads <= n_heads or n_heads % n_kv_heads:
            raise UserError(f"n_kv_heads is {n_kv_heads}; it must divide the {n_heads} query heads.")
        self.vocab_size, self.seq_len, self.d_model = vocab_size, seq_len, d_model
        self.head_dim, self.n_heads, self.n_kv_heads = head_dim, n_heads, n_kv_heads
        self.num_recurrences, self.logit_softcap, self.recompute = num_recurrences, logit_softcap, recompute
        self.document_start = document_start

        sizes = {"d_model": d_model, "num_recurrences": num_recurrences}

        def layers(n: int, r: int = 1, join: Any = PlainResidual, layer: Any = layer) -> nn.ModuleList:
            about = LayerSizes(
                d_model, head_dim, n_kv_heads, r, partial(SEAMS["residual"].build, join, sizes)
            )
            return nn.ModuleList(SEAMS["layer"].build(layer, {"sizes": about}) for _ in range(n))

        once = partial(layers, layer=PreNormLayer if layer_in_block_only else layer)
        padded = round_up(vocab_size, VOCAB_UNIT)
        self.embedding = nn.Embedding(padded, d_model)
        self.prelude = once(prelude_layers)
        self.block = layers(recurrent_layers, num_recurrences, residual)
        self.coda = once(coda_layers)
        found = [m for m in self.block.modules() if isinstance(m, Residual)]
        # In a list, so that one which no layer uses is not a module of the model.
        self._residual = found[:1] or [SEAMS["residual"].build(residual, sizes)]
        self.injection: Injection = SEAMS["injection"].build(injection, sizes)
        self.lanes: Lanes = SEAMS["lanes"].build(lanes, sizes)
        self.bptt: BPTTStrategy = SEAMS["bptt"].build(bptt, sizes)
        self.objective: Objective = SEAMS["objective"].build(objective, sizes)
        self.norm_emb, self.norm_recur, self.norm_final = (rms_norm(d_model) for _ in range(3))
        self.head = nn.Linear(d_model, padded, bias=False)
        self.rotary = Rotary(head_dim, seq_len, rope_bf16)
        nn.init.normal_(self.embedding.weight)
        nn.init.normal_(self.head.weight, std=0.001)
        self.refuse_untrainable()
        #: Called as `observer(i, state)` after each recurrence; for telemetry only.
        self.observer: Callable[[int, State], None] | None = None

    def architecture(self) -> dict[str, Any]:
        """Arguments that build a model like this one, as plain data."""
        return {**self._arguments, **specs(self)}

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, num_recurrences: int | None = None
    ) -> Tensor:
        """Soft-capped fp32 logits (B,T,V) of int64 tokens (B,T); with targets (B,T) the total of the objective.

        No loss ever holds the logits of all tokens at once. `num_recurrences` is as in `hidden`.
        """
        if targets is None:
            return self.logits(self.hidden(tokens, num_recurrences))
        return self.losses(tokens, targets, num_recurrences)[0]

    def losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        num_recurrences: int | None = None,
        rows: Sequence[int] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective's total and named terms, all scalars; arguments as in `forward`, and raises what `hidden` does.

        `rows` numbers the B rows among all that training sees, for initial states that are drawn at random.

        Raises:
            UserError: the objective cannot read this count, or returns no scalar tensors.
        """
        r = self.num_recurrences if num_recurrences is None else num_recurrences
        self.check_recurrences(r)
        _, context = self._start(tokens, None)
        *early, last = self.objective.readings(r)
        kept = dict.fromkeys(early, tokens)  # Each place is filled by the loop.
        kept[last], memory = self._loop(self._prelude(tokens, context, None), context, r, None, kept, rows)
        auxiliary: dict[str, Tensor] = {}
        for layer, own in zip(self.block, memory, strict=True):
            for name, value in layer.auxiliary(own).items():  # type: ignore[operator]
                auxiliary[name] = auxiliary[name] + value if name in auxiliary else value

        def read(state: Tensor, weights: Tensor | None) -> Tensor:
            return self._cross_entropy(self._coda(state, context, None), targets, weights)

        return self.objective.checked(kept, read, auxiliary)

    def cross_entropy(self, tokens: Tensor, targets: Tensor, num_recurrences: int | None = None) -> Tensor:
        """Mean cross entropy after the last recurrence, in nats per token, whatever the objective."""
        return self._cross_entropy(self.hidden(tokens, num_recurrences), targets)

    def _cross_entropy(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        flat = None if weights is None else weights.flatten()
        return softcapped_cross_entropy(
            hidden.flatten(0, 1),
            self.head.weight,
            targets.flatten(),
            self.vocab_size,
            self.logit_softcap,
            flat,
        )

    @property
    def residual(self) -> Residual:
        """One of the residuals of the recurrent block, which are all built alike."""
        return self._residual[0]

    @property
    def layer(self) -> Layer:
        """The first layer of the recurrent block, whose layers are all built alike."""
        return self.block[0]  # type: ignore[return-value]

    def hidden(
        self, tokens: Tensor, num_recurrences: int | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Normalised output (B,T,d) of the coda, which the head reads, for int64 tokens (B,T).

        `num_recurrences` None means the model's own count.

        Raises:
            UserError: a count that the components do not allow.
        """
        r = self.num_recurrences if num_recurrences is None else num_recurrences
        self.check_recurrences(r)
        once, context = self._start(tokens, cache)
        x = self._prelude(tokens, context, once)
        return self._coda(self._loop(x, context, r, cache)[0], context, once)

    def states(self, tokens: Tensor, num_recurrences: int | None = None) -> list[Tensor]:
        """What the coda would read (B,T,d) after each recurrence, for int64 tokens (B,T). `read_out` reads them.

        `num_recurrences` is as in `hidden`.
        """
        r = self.num_recurrences if num_recurrences is None else num_recurrences
        self.check_recurrences(r)
        _, context = self._start(tokens, None)
        kept: dict[int, Tensor] = dict.fromkeys(range(r), tokens)
        self._loop(self._prelude(tokens, context, None), context, r, None, kept)
        return list(kept.values())

    def read_out(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Normalised output (B,T,d) of the coda, which `logits` reads, from a state that `states` gave for `tokens`."""
        return self._coda(state, self._start(tokens, None)[1], None)

    def _start(self, tokens: Tensor, cache: Cache | None) -> tuple[KeyValueSlot | None, LoopContext]:
        begins = None if self.document_start is None else tokens == self.document_start
        if cache is None:
            mask = None
            if begins is not None:
                document = begins.cumsum(dim=1)
                mask = (document[:, :, None] == document[:, None]).tril()[:, None]
            cos, sin = self.rotary(tokens.shape[1])
            return None, LoopContext(cos, sin, mask=mask)
        if begins is not None:
            cache.separate(begins)
        return cache.once, LoopContext(*self.rotary.at(cache.positions, cache.filled))

    def _prelude(self, tokens: Tensor, context: LoopContext, cache: KeyValueSlot | None) -> Tensor:
        # The table may be bf16; from here on the residual stream has the norms' precision.
        x = self.norm_emb(self.embedding(tokens).to(self.norm_emb.weight.dtype))
        return _through(self.prelude, x, context, cache)[0]

    def _coda(self, x: Tensor, context: LoopContext, cache: KeyValueSlot | None) -> Tensor:
        return self.norm_final(_through(self.coda, x, context, cache)[0])

    def _loop(
        self,
        e: Tensor,
        context: LoopContext,
        num_recurrences: int,
        cache: Cache | None,
        kept: dict[int, Tensor] | None = None,
        rows: Sequence[int] | None = None,
    ) -> tuple[Tensor, Memory]:
        """What the coda reads (B,T,d) in the end, and the layers' last memory.

        `kept` is given what the coda would read after each recurrence that it names.
        """
        early, once, positions = (
            (None, None, None) if cache is None else (cache.exit, cache.once, cache.positions)
        )

        def logits(x: Tensor) -> Tensor:
            return self.logits(self._coda(x, context, once))

        state = self.lanes.expand(self.injection.start(e, positions, rows))
        memory: Memory = (None,) * len(self.block)
        for i in range(num_recurrences):
            about = replace(context, i=i, num_recurrences=num_recurrences, e=e)
            keeps = self.bptt.keeps_grad(i, num_recurrences)
            with torch.set_grad_enabled(keeps and torch.is_grad_enabled()):
                if self.recompute and torch.is_grad_enabled():
                    state, memory = checkpoint(
                        self.recurrence, state, memory, about, use_reentrant=False, preserve_rng_state=False
                    )
                else:
                    slot = None if cache is None else cache.recurrence(i)
                    state, memory = self.recurrence(state, memory, about, slot)
            if self.observer is not None:
                self.observer(i, state)
            if kept is not None and i in kept:
                kept[i] = self.lanes.reduce(state)
            if early is not None and early.settled(i, self.lanes.reduce(state), logits):
                break
        return self.lanes.reduce(state) if early is None else early.output, memory

    def recurrence(
        self, state: State, memory: Memory, context: LoopContext, cache: KeyValueSlot | None = None
    ) -> tuple[State, Memory]:
        """Lane state and memory after a recurrence, from those before it.

        `context` holds the recurrence i and the prelude's output e (B,T,d). The memory has an entry for each layer of
        the block: what the layer returned at the recurrence before, or None.
        """
        assert context.e is not None
        u = self.injection(context.e, self.lanes.read(state, context.i), context.i)
        u, memory = _through(self.block, u, context, cache, memory)
        return self.lanes.write(state, self.norm_recur(u), context.i), memory

    @classmethod
    def from_pretrained(cls, folder: str | Path, **overrides: Any) -> LoopedTransformer:
        """The model in a folder of `python -m looped_lm export`; see `looped_lm.sharing.load.load_pretrained`.

        Raises:
            UserError: no such folder, unknown components, or weights of another architecture.
        """
        from looped_lm.sharing.load import load_pretrained

        return load_pretrained(folder, **overrides)

    def layers(self) -> Iterator[nn.Module]:
        """Every layer once, in the order in which they first run."""
        yield from (*self.prelude, *self.block, *self.coda)

    def step_specific(self) -> dict[str, PerRecurrence]:
        """Components with separate parameters for every recurrence, by the key of their axis."""
        found = {key: c for key, c in components(self).items() if isinstance(c, PerRecurrence)}
        return {key: c for key, c in found.items() if c.step_specific}

    def refuse_untrainable(self, drawn: Iterable[int] = ()) -> None:
        """Refuse (UserError) components that cannot train with the `drawn` counts; without any, with r."""
        specific = {type(c).__name__: SEAMS[key].default.__name__ for key, c in self.step_specific().items()}
        refuse_untrainable(
            self.injection, self.bptt, self.layer, self.objective, specific, self.num_recurrences, drawn
        )

    def check_recurrences(self, num_recurrences: int) -> None:
        """Refuse (UserError) a count below 1, or beyond what a step-specific component has a rule for."""
        if num_recurrences < 1:
            raise UserError(f"num_recurrences is {num_recurrences}; it must be at least 1.")
        for component in self.step_specific().values():
            for i in range(self.num_recurrences, num_recurrences):
                component.beyond_trained(i, self.num_recurrences)

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped fp32 logits (B,T,V) from the output of `hidden`."""
        logits = self.head(hidden)[..., : self.vocab_size]
        # At least fp32; a float64 model keeps its precision.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self.logit_softcap * torch.tanh(logits / self.logit_softcap)


def _through(
    layers: nn.ModuleList, x: Tensor, context: LoopContext, cache: KeyValueSlot | None, memory: Memory = ()
) -> tuple[Tensor, Memory]:
    """The stream x (B,T,d) after all layers, and what each returns for its next use; UserError for another stream."""
    after = []
    for layer, own in zip_longest(layers, memory):
        out = layer(x, context if own is None else replace(context, memory=own), cache)
        out, own = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
        if not isinstance(out, Tensor) or out.shape != x.shape:
            kind = f"tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise UserError(
                f"{type(layer).__name__}.forward returns a {kind} for a stream of shape {tuple(x.shape)}: it must "
                "return a tensor of that shape, alone or in a pair with its memory."
            )
        x = out
        after.append(own)
    return x, tuple(after)


def size_of(d_model: int) -> int | float:
    """The `size` that gives a width; an int if it is whole."""
    size = d_model / WIDTH_UNIT
    return int(size) if size.is_integer() else size


def _check_sizes(values: Mapping[str, Any]) -> None:
    if not 0 < values["size"] < math.inf:
        raise UserError(f"size is {values['size']}; it must be positive.")
    if not values["logit_softcap"] > 0:
        raise UserError(f"logit_softcap is {values['logit_softcap']}; it must be positive.")
    smallest = dict.fromkeys(("vocab_size", "seq_len", "head_dim", "recurrent_layers", "num_recurrences"), 1)
    for name, least in {**smallest, "prelude_layers": 0, "coda_layers": 0}.items():
        if values[name] < least:
            raise UserError(f"{name} is {values[name]}; it must be at least {least}.")
    start = values["document_start"]
    if start is not None and not 0 <= start < values["vocab_size"]:
        raise UserError(
            f"document_start is {start}; it is a token's id, from 0 to {values['vocab_size'] - 1}, or null."
        )
    if values["head_dim"] % 2:
        raise UserError(
            f"head_dim is {values['head_dim']}; it must be even, since the rotary embedding turns pairs."
        )
