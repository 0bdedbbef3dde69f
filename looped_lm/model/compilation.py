"""torch.compile of the layers, one at a time and in place.

A layer is compiled as a region of its own and its weights are inputs of the region, so that all layers, and every
recurrence of a looped one, run the same compiled code, whatever the number of recurrences. Compiling in place leaves
the names of parameters as they are.
"""

from __future__ import annotations

import torch

from looped_lm.model.transformer import LoopedTransformer


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def compiler_problem(device: torch.device) -> str | None:
    """Why nothing can be compiled for `device`, in a line; None if the compiler works.

    A compiler may be missing (C++ on CPUs, Triton on GPUs) or too old, which only a trial tells.
    """
    try:
        torch.compile(_double)(torch.ones(2, device=device))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def compile_in_place(model: LoopedTransformer, device: torch.device) -> str | None:
    """Compile every layer of the model, or leave all as they are and say why.

    Returns:
        The compiler's problem, if it has one.
    """
    problem = compiler_problem(device)
    if problem is None:
        # Under DDP the compiler would cut each layer into pieces, to send gradients between them; they are sent between
        # layers anyway.
        torch._dynamo.config.optimize_ddp = False
        for layer in model.layers():
            layer.compile()
    return problem
