"""What a model costs: parameters by section and role, FLOPs per token, read off the modules and the BPTT predicate.

Source: arXiv 2604.21106, section 3 and the FLOPs appendix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import nn

from looped_lm.common.errors import UserError
from looped_lm.loop.blocks import count
from looped_lm.loop.component import ModelComponent
from looped_lm.loop.injection import LinearInjection, PassthroughInjection
from looped_lm.model.transformer import LoopedTransformer

#: Share of the full attention matrix that each convention counts.
CONVENTIONS = {"paper": 1.0, "causal": 0.5}
ROLES = ("matrix", "embedding", "head", "norm", "lanes")
#: Training FLOPs over forward FLOPs: one forward and two backward products, or the forward alone.
TRAINED, FORWARD_ONLY = 3, 1


@dataclass(frozen=True)
class Sections:
    """Parameters by section. Norm scales inside a layer belong to its section; `norms` are the model's own three.

    `block` includes components other than injection and lanes that run in every recurrence, and `norms` the parameters
    of the objective, which runs outside the loop.
    """

    embedding: int
    prelude: int
    block: int
    injection: int
    lanes: int
    coda: int
    norms: int
    head: int

    @property
    def n_once(self) -> int:
        """Parameters used outside the loop: prelude, coda, the model-level norms and the objective."""
        return self.prelude + self.coda + self.norms

    @property
    def n_rec(self) -> int:
        """Parameters used in every recurrence: the block, the injection and the lanes."""
        return self.block + self.injection + self.lanes

    @property
    def n(self) -> int:
        """N of the paper: all parameters but embedding and head."""
        return self.n_once + self.n_rec

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def count_parameters(model: LoopedTransformer) -> Sections:
    """Parameters of every section of the model."""
    own = (model.injection, model.lanes, model.objective)
    others = [m for m in model.children() if isinstance(m, ModelComponent) and m not in own]
    return Sections(
        embedding=count(model.embedding),
        prelude=count(model.prelude),
        block=count(model.block) + sum(count(component) for component in others),
        injection=count(model.injection),
        lanes=count(model.lanes),
        coda=count(model.coda),
        norms=sum(map(count, (model.norm_emb, model.norm_recur, model.norm_final, model.objective))),
        head=count(model.head),
    )


def active_parameters(model: LoopedTransformer) -> tuple[int, int]:
    """(N_once, N_rec) of the parameters that one token uses: fewer than all where tokens choose among experts."""
    sections = count_parameters(model)

    def idle(layers: nn.ModuleList) -> int:
        return sum(count(layer) - layer.active_parameters() for layer in layers)  # type: ignore[operator]

    return sections.n_once - idle(model.prelude) - idle(model.coda), sections.n_rec - idle(model.block)


def parameter_roles(model: LoopedTransformer) -> dict[str, str]:
    """Optimizer role of every parameter, by its name in the model.

    A component's own `parameter_roles` wins; other two-dimensional parameters are `matrix`, and the rest `norm`.

    Raises:
        UserError: a component names a role or a parameter that does not exist.
    """
    roles = {name: "matrix" if p.dim() == 2 else "norm" for name, p in model.named_parameters()}
    roles["embedding.weight"] = "embedding"
    roles["head.weight"] = "head"
    for prefix, component in model.named_modules():
        if not isinstance(component, ModelComponent):
            continue
        for name, role in component.parameter_roles().items():
            owner = type(component).__name__
            if role not in ROLES:
                raise UserError(f"{owner} gives {name!r} the role {role!r}; roles are {ROLES}.")
            if f"{prefix}.{name}" not in roles:
                raise UserError(f"{owner}.parameter_roles names {name!r}, but {owner} has no such parameter.")
            roles[f"{prefix}.{name}"] = role
    return roles


def count_roles(model: LoopedTransformer) -> dict[str, int]:
    """Parameters of every role."""
    totals = dict.fromkeys(ROLES, 0)
    roles = parameter_roles(model)
    for name, parameter in model.named_parameters():
        totals[roles[name]] += parameter.numel()
    return totals


def flops_per_token(
    model: LoopedTransformer, seq_len: int, convention: str = "paper", num_recurrences: int | None = None
) -> float:
    """Training FLOPs per token at context length `seq_len`, with the model's own or another r.

    A product with a weight matrix costs 2 FLOPs per parameter forward and 4 backward. Recurrences without gradients
    cost only their forward. Each state that the objective reads costs a pass of coda and head. The convention `paper`
    counts the full attention matrix, `causal` half of it.

    Raises:
        UserError: an unknown convention, or an objective that cannot read this count of recurrences.
    """
    if convention not in CONVENTIONS:
        raise UserError(f"FLOPs convention {convention!r} is unknown; there are {', '.join(CONVENTIONS)}.")
    keys = CONVENTIONS[convention] * seq_len

    def forward(layers: nn.ModuleList, i: int = 0) -> float:
        return sum(layer.flops_per_token(keys, i) for layer in layers)  # type: ignore[operator]

    # Components inside the layers are counted with them.
    around = [m for m in model.children() if isinstance(m, ModelComponent) and m is not model.objective]
    around_block = sum(m.flops_per_token() for m in around)
    r = model.num_recurrences if num_recurrences is None else num_recurrences
    loop = 0.0
    for i in range(r):
        passes = TRAINED if model.bptt.keeps_grad(i, r) else FORWARD_ONLY
        loop += passes * (forward(model.block, i) + around_block)
    reading = forward(model.coda) + 2 * count(model.head) + model.objective.flops_per_token()
    once = forward(model.prelude) + len(model.objective.readings(r)) * reading
    return TRAINED * once + loop


def mean_flops_per_token(
    model: LoopedTransformer, seq_len: int, drawn: Mapping[int, int], convention: str = "paper"
) -> float:
    """Mean of `flops_per_token` over training steps; `drawn` says how many steps run each count."""
    total = sum(steps * flops_per_token(model, seq_len, convention, r) for r, steps in drawn.items())
    return total / sum(drawn.values())


def reference_tokens(num_recurrences: int) -> float:
    """D_ref of the HyperP transfer: 10 tokens per parameter of the size-10 model, counted as N_once + r·N_rec.

    As in the published runs, N_once and N_rec are those of a 0-20-0 model with passthrough injection if r = 1, else of
    a 2-4-2 model with linear injection, whatever the layout of the run; r is the run's own.
    """
    looped = num_recurrences > 1
    with torch.device("meta"):
        model = LoopedTransformer(
            vocab_size=1,
            seq_len=1,
            size=10,
            prelude_layers=2 if looped else 0,
            recurrent_layers=4 if looped else 20,
            coda_layers=2 if looped else 0,
            num_recurrences=num_recurrences,
            injection=LinearInjection if looped else PassthroughInjection,
        )
    sections = count_parameters(model)
    return 10.0 * (sections.n_once + num_recurrences * sections.n_rec)
