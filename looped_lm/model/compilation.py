"""torch.compile of the layers, one at a time and in place, so that parameters keep their names.

A layer's weights are inputs to its compiled code, so all layers and all recurrences run the same code.
"""

from __future__ import annotations

import torch

from looped_lm.model.transformer import LoopedTransformer


def compiler_problem(device: torch.device) -> str | None:
    """Why a trial compilation for `device` fails, in one line; None if the compiler works."""
    try:
        torch.compile(lambda x: x * 2)(torch.ones(2, device=device))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def compile_in_place(model: LoopedTransformer, device: torch.device) -> str | None:
    """Compile every layer of the model, or none and return the compiler's problem."""
    problem = compiler_problem(device)
    if problem is None:
        # Under DDP the compiler would split layers, to send gradients before a whole layer is done.
        torch._dynamo.config.optimize_ddp = False
        for layer in model.layers():
            layer.compile()
    return problem
