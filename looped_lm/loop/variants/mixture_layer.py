"""A looped mixture of experts: each token chooses some of the block's MLPs at every recurrence.

Sources: looped mixtures (arXiv 2609.01343, 2605.09165); the balance loss is that of arXiv 2101.03961, taken row by row.
Left out: experts that all tokens share, noise in the router, limits of an expert's tokens, and routing by recurrence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.loop.blocks import MLP, PreNormLayer, count
from looped_lm.loop.component import ModelComponent
from looped_lm.loop.layer import KeyValueSlot, LayerSizes, LoopContext


class Experts(ModelComponent, nn.Module):
    """y = sum of w_e MLP_e(x) over the k experts e to which the router gives most; their weights w_e sum to 1.

    Tokens choose experts, since experts that choose tokens would let later tokens change earlier ones.
    """

    def __init__(self, d_model: int, num_experts: int, top_k: int, hidden: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(d_model, num_experts, bias=False)
        # A matrix for each expert: MuonH takes matrices only.
        self.experts = nn.ModuleList(MLP(d_model, hidden) for _ in range(num_experts))

    # How many tokens an expert gets is not known before; compiled, it would be a graph for each number.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output (B,T,d) for x (B,T,d); balance loss, a scalar of at least about 1; choices of each expert (E,)."""
        shares = self.router(x).to(torch.promote_types(x.dtype, torch.float32)).softmax(dim=-1)  # (B,T,E)
        weights, chosen = shares.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        choices = F.one_hot(chosen, shares.shape[-1]).sum(dim=-2)  # (B,T,E)
        # By row, and so the same for any number of processes or micro-batches.
        loads = choices.to(shares.dtype).mean(dim=1) / self.top_k
        balance = (len(self.experts) * loads * shares.mean(dim=1)).sum(dim=-1).mean()
        tokens, chosen, weights = (t.flatten(0, 1) for t in (x, chosen, weights))
        y = torch.zeros(tokens.shape, dtype=weights.dtype, device=x.device)
        for e, expert in enumerate(self.experts):
            # One without tokens still runs, on none: its gradients are zero, where DDP would miss them.
            rows, place = (chosen == e).nonzero(as_tuple=True)
            y = y.index_add(0, rows, expert(tokens[rows]).to(y.dtype) * weights[rows, place, None])
        # The sum is at least fp32; in a bf16 model the stream stays bf16.
        return y.view(x.shape).to(x.dtype), balance, choices.sum(dim=(0, 1))

    def flops_per_token(self) -> float:
        return 2 * (count(self.router) + self.top_k * count(self.experts[0]))

    def parameter_roles(self) -> dict[str, str]:
        return {"router.weight": "norm"}


class MixtureLayer(PreNormLayer):
    """The paper's layer with experts in the place of the MLP; they run uncompiled.

    The default has as many active parameters as the paper's layer, but for the router. Under truncated BPTT the balance
    of recurrences without gradients counts and trains nothing.

    Args:
        sizes: the model's.
        num_experts: experts E.
        top_k: experts k that a token chooses.
        hidden: hidden width of an expert; None: 4d / k.
        balance: weight of the balance loss E sum_e f_e P_e, with f_e the share of a row's choices and P_e the mean
            probability of expert e; averaged over recurrences, summed over layers.

    Raises:
        UserError: sizes that leave no choice, or a negative or infinite weight.
    """

    mlp: Experts

    def __init__(
        self,
        sizes: LayerSizes,
        num_experts: int = 8,
        top_k: int = 2,
        hidden: int | None = None,
        balance: float = 0.01,
    ) -> None:
        if not 1 <= top_k < num_experts:
            raise UserError(
                f"top_k is {top_k} of {num_experts} experts; it must be at least 1 and leave some out."
            )
        if hidden is not None and hidden < 1:
            raise UserError(
                f"hidden is {hidden}; an expert needs at least 1 channel, or null for 4d / top_k."
            )
        if not 0 <= balance < math.inf:
            raise UserError(
                f"balance is {balance}; it must be finite and not negative (0 leaves the router alone)."
            )
        self.shape = num_experts, top_k, -(-4 * sizes.d_model // top_k) if hidden is None else hidden
        super().__init__(sizes)
        self.balance = balance

    def feed_forward(self, sizes: LayerSizes) -> nn.Module:
        return Experts(sizes.d_model, *self.shape)

    def forward(
        self, x: Tensor, context: LoopContext, cache: KeyValueSlot | None = None
    ) -> Tensor | tuple[Tensor, Any]:
        x = self.residual_attn(x, self.attn(self.norm_attn(x), context, cache))
        y, balance, choices = self.mlp(self.norm_mlp(x))
        balance = balance / context.num_recurrences
        if context.memory is not None:
            balance, choices = context.memory[0] + balance, context.memory[1] + choices
        return self.residual_mlp(x, y), (balance, choices)

    def auxiliary(self, memory: Any) -> dict[str, Tensor]:
        return {"balance": self.balance * memory[0]}

    def active_parameters(self) -> int:
        idle = len(self.mlp.experts) - self.mlp.top_k
        return count(self) - idle * count(self.mlp.experts[0])
