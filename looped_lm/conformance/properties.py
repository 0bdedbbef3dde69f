"""What must hold for a component outside training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from looped_lm.common.errors import UserError
from looped_lm.conformance.candidate import VOCAB, Candidate, batch, expect, expect_close
from looped_lm.loop.blocks import count
from looped_lm.loop.layer import LoopContext
from looped_lm.model import accounting
from looped_lm.model.transformer import LoopedTransformer


def every_parameter_learns(candidate: Candidate) -> None:
    """A finite, non-zero gradient for every parameter, in every recurrence of step-specific ones."""
    lm = candidate.lm()
    lm.loss(batch()).backward()
    for name, p in lm.model.named_parameters():
        expect(p.grad is not None, f"{name} gets no gradient: it is not part of the forward pass.")
        assert p.grad is not None
        expect(bool(p.grad.isfinite().all()), f"The gradient of {name} is not finite.")
        expect(bool((p.grad != 0).any()), f"The gradient of {name} is zero: it could never train.")
    r = lm.model.num_recurrences
    for component in lm.model.step_specific().values():
        assert isinstance(component, nn.Module)
        for name, p in component.named_parameters():
            if p.dim() > 0 and len(p) == r:
                assert p.grad is not None
                idle = [i for i in range(r) if not bool((p.grad[i] != 0).any())]
                owner = type(component).__name__
                expect(not idle, f"{owner}.{name} does not train in recurrences {idle} of {r}.")


def counts_and_roles_are_whole(candidate: Candidate) -> None:
    """Every parameter is in one section, has one role, and is once in the optimizer, which accepts it."""
    lm = candidate.lm(torch.float32, moved=False)
    everything = sum(p.numel() for p in lm.model.parameters())
    sections = lm.sections.as_dict()
    expect(
        sum(sections.values()) == everything,
        f"The sections {sections} sum to {sum(sections.values())}, but there are {everything} parameters: some are "
        "shared between sections or outside all of them.",
    )
    expect(
        sum(accounting.count_roles(lm.model).values()) == everything,
        "The roles do not cover every parameter.",
    )
    try:
        optimizer = lm.configure_optimizers()["optimizer"]
    except ValueError as error:
        expect(False, f"The optimizer refuses the component: {error}")
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    expect(
        sorted(grouped) == sorted(id(p) for p in lm.model.parameters()),
        "The optimizer's groups do not hold every parameter exactly once.",
    )
    roles = accounting.parameter_roles(lm.model)
    wrong = [n for n, p in lm.model.named_parameters() if roles[n] == "matrix" and p.dim() != 2]
    expect(
        not wrong, f"{wrong} have the role 'matrix' but are not matrices; name another in parameter_roles()."
    )


class _ElementwiseCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        counted = {torch.Tag.pointwise: out, torch.Tag.reduction: args}
        for tag, tensors in counted.items():
            if tag in func.tags:
                self.total += sum(t.numel() for t in tree_leaves(tensors) if isinstance(t, Tensor))
        return out


def _measure(run: Callable[[], Any], tokens: int) -> tuple[float, float]:
    """FLOPs per token: of matrix products, and of elementwise operations and sums."""
    with FlopCounterMode(display=False) as products:
        run()
    with _ElementwiseCounter() as elementwise:
        run()
    return products.get_total_flops() / tokens, elementwise.total / tokens


def _measured(model: LoopedTransformer, rows: int, seq_len: int) -> dict[str, tuple[float, float]]:
    tokens, every = rows * seq_len, range(model.num_recurrences)
    x = torch.zeros(rows, seq_len, model.d_model, device=model.head.weight.device)
    injection, lanes, state = model.injection, model.lanes, model.lanes.expand(x)
    return {
        "injection": _measure(lambda: [injection(x, x, i) for i in every], len(every) * tokens),
        "lanes": _measure(
            lambda: [(lanes.read(state, i), lanes.write(state, x, i)) for i in every], len(every) * tokens
        ),
        "residual": _measure(lambda: model.residual(x, x), tokens),
    }


def _countable(
    build: Callable[[], LoopedTransformer], rows: int, seq_len: int
) -> tuple[LoopedTransformer, Tensor]:
    """The model and tokens (rows,T) on the meta device, or on the CPU if its shapes depend on what it computes."""
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = build()
            tokens = torch.randint(model.vocab_size, (rows, seq_len))
        try:
            model.hidden(tokens)
        except NotImplementedError:
            continue
        break
    return model, tokens


def flops_agree_with_the_counter(candidate: Candidate) -> None:
    """Declared FLOPs are between torch's count of matrix products and that plus every elementwise operation.

    The whole training step agrees within 1%, without norm scales and what is declared beyond matrix products.
    """
    rows, seq_len = 2, 64
    sizes = {"size": 4, "head_dim": 64, "seq_len": seq_len, "batch_tokens": rows * seq_len}
    model, tokens = _countable(lambda: candidate.lm(torch.float32, moved=False, **sizes).model, rows, seq_len)
    beyond: dict[str, float] = {}
    for seam, (products, elementwise) in _measured(model, rows, seq_len).items():
        component = getattr(model, seam)
        declared = component.flops_per_token()
        beyond[seam] = declared - products
        expect(
            0.99 * products <= declared <= 1.01 * (products + elementwise),
            f"{type(component).__name__}.flops_per_token() is {declared:,}, but one use does {products:,.0f} "
            f"FLOPs per token in matrix products, and {elementwise:,.0f} elementwise.",
        )

    def step() -> None:
        model(tokens, tokens).backward()

    def scales(layers: nn.Module) -> int:
        return sum(count(m) for m in layers.modules() if isinstance(m, nn.RMSNorm))

    r = model.num_recurrences
    passes = sum(
        accounting.TRAINED if model.bptt.keeps_grad(i, r) else accounting.FORWARD_ONLY for i in range(r)
    )
    residuals = 2 * len(model.block) * beyond["residual"]
    uncounted: float = accounting.TRAINED * 2 * (scales(model.prelude) + scales(model.coda))
    uncounted += passes * (2 * scales(model.block) + beyond["injection"] + beyond["lanes"] + residuals)
    expected = accounting.flops_per_token(model, seq_len) - uncounted
    with sdpa_kernel(SDPBackend.MATH):
        counted, _ = _measure(step, tokens.numel())
    expect(
        abs(counted - expected) <= 0.01 * expected,
        f"A training step does {counted:,.0f} FLOPs per token in matrix products; the accounting says {expected:,.0f}.",
    )


def one_recurrence_is_one_application(candidate: Candidate) -> None:
    """At r = 1 the model is embedding, prelude, one recurrence and coda, even if it is called again."""
    try:
        model = candidate.lm(num_recurrences=1).model
    except UserError:
        return  # A component may need more than one recurrence, and says so.
    inputs, _ = batch()
    first, second = model.hidden(inputs), model.hidden(inputs)
    context = LoopContext(*model.rotary(inputs.shape[1]))

    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            out = layer(x, context)
            x = out[0] if isinstance(out, tuple) else out
        return x

    e = run(model.prelude, model.norm_emb(model.embedding(inputs)))
    state = model.lanes.expand(model.injection.start(e, None, None))
    state, _ = model.recurrence(state, (None,) * len(model.block), replace(context, e=e))
    expected = model.norm_final(run(model.coda, model.lanes.reduce(state)))
    expect_close(first, expected, "At r = 1 the model is not one application of its parts")
    expect_close(second, first, "The same tokens give something else the second time")


def _untouched(name: str, run: Callable[..., Any], *inputs: Any) -> Any:
    before = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, inputs)
    out = run(*inputs)
    pairs = zip(tree_leaves(before), tree_leaves(inputs), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
    expect(same, f"{name} changes its input in place; gradients and telemetry need it as it was.")
    return out


def inputs_stay_as_they_are(candidate: Candidate) -> None:
    """No method of a component writes into what it is given."""
    model = candidate.lm().model
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        e, y = (torch.randn(2, 5, model.d_model, generator=generator, dtype=torch.float64) for _ in range(2))
        injection, lanes, residual = model.injection, model.lanes, model.residual
        name, injects = type(lanes).__name__, type(injection).__name__
        state = _untouched(f"{name}.expand", lanes.expand, injection.start(e, None, None))
        for i in range(model.num_recurrences):
            s = _untouched(f"{name}.read", lambda x, i=i: lanes.read(x, i), state)
            _untouched(f"{injects}.forward", lambda a, b, i=i: injection(a, b, i), e, s)
            state = _untouched(f"{name}.write", lambda a, b, i=i: lanes.write(a, b, i), state, y)
        cos, sin = model.rotary(e.shape[1])
        context = LoopContext(cos, sin, num_recurrences=model.num_recurrences, e=e)
        memory, sizes, who = None, [], type(model.layer).__name__
        for i in range(model.num_recurrences):
            about = replace(context, i=i)
            out = _untouched(
                f"{who}.forward", lambda x, m, a=about: model.layer(x, replace(a, memory=m)), y, memory
            )
            memory = out[1] if isinstance(out, tuple) else None
            sizes.append([t.shape for t in tree_leaves(memory) if isinstance(t, Tensor)])
        expect(
            sizes[1:] == sizes[:-1],
            f"The memory of {who} changes its sizes from one recurrence to the next: {sizes}.",
        )
        _untouched(f"{name}.reduce", lanes.reduce, state)
        _untouched(f"{injects}.initial_state", lambda x: injection.start(x, None, None), e)
        _untouched(f"{type(residual).__name__}.forward", residual, e, y)


def telemetry_sees_the_mixing(candidate: Candidate) -> None:
    """The matrices that lanes show are those that they mix with, if lanes are the state's first dimension."""
    model = candidate.lm().model
    lanes, matrices = model.lanes, model.lanes.mixing_matrices()
    if matrices is None:
        return
    with torch.no_grad():
        state = lanes.expand(torch.zeros(2, 3, model.d_model, dtype=torch.float64))
        if not isinstance(state, Tensor) or len(state) != matrices.shape[-1]:
            return
        state = torch.randn(state.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        name = f"{type(lanes).__name__}.mixing_matrices"
        for i, matrix in enumerate(matrices):
            mixed, expected = (
                lanes.write(state, torch.zeros_like(state[0]), i),
                torch.tensordot(matrix, state, 1),
            )
            expect_close(mixed, expected, f"{name} shows another matrix than recurrence {i} mixes with")


def tokens_see_their_own_past_alone(candidate: Candidate) -> None:
    """Logits at a position depend on that row's tokens up to there, and on nothing else."""
    model = candidate.lm().model
    inputs, _ = batch()
    position = inputs.shape[1] // 2
    changed = inputs.clone()
    changed[0, position] = (changed[0, position] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    expect_close(after[0, :position], before[0, :position], "A token changes logits before it: not causal")
    expect_close(after[1:], before[1:], "A token changes logits of other rows")
    expect(not torch.equal(after[0, position:], before[0, position:]), "A token changes no logit after it.")


def more_recurrences_run_or_are_refused(candidate: Candidate) -> None:
    """Twice the recurrences run under the component's rule, or are refused with a message."""
    model = candidate.lm().model
    inputs, _ = batch()
    r = model.num_recurrences
    with torch.no_grad():
        try:
            more = model(inputs, num_recurrences=2 * r)
        except UserError as error:
            expect(bool(str(error)), "Evaluation with more recurrences is refused without a message.")
            return
        except Exception as error:
            expect(
                False,
                f"Evaluation with {2 * r} recurrences ends in {type(error).__name__}: {error}. Set `step_specific` if "
                "parameters belong to one recurrence each, and define `beyond_trained` if there is a rule.",
            )
        expect(bool(more.isfinite().all()), f"With {2 * r} recurrences the logits are not finite.")
        trained = model(inputs, num_recurrences=r)
        expect_close(trained, model(inputs), "The trained number of recurrences is not the default")
