"""Polar factors of stacks of matrices by Polar Express (arXiv 2505.16932)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
#: Bytes that one batched iteration works on: they fit a CPU's cache, or fill a GPU.
CPU_WORKING_SET = 4 * 2**20
WORKING_SET = 512 * 2**20


def orthogonalisation_dtype(device: torch.device) -> torch.dtype:
    """bf16 on GPUs that support it, else fp32: on CPUs bf16 products can be 90 times slower."""
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def orthogonalisation_flops(rows: int, cols: int) -> int:
    """FLOPs of the matrix products for one (rows,cols) matrix."""
    small, large = min(rows, cols), max(rows, cols)
    return len(POLAR_EXPRESS) * (4 * small**2 * large + 2 * small**3)


def orthogonalise(matrices: Sequence[Tensor] | Tensor, out: Tensor | None = None) -> Tensor:
    """Polar factors (n,rows,cols) of n matrices of one shape or of a stack, by five iterations on the smaller side.

    They are written to `out`, if given, and have `orthogonalisation_dtype`.
    """
    device, (rows, cols) = matrices[0].device, matrices[0].shape
    dtype = orthogonalisation_dtype(device)
    if out is None:
        out = torch.empty(len(matrices), rows, cols, dtype=dtype, device=device)
    limit = CPU_WORKING_SET if device.type == "cpu" else WORKING_SET
    small = min(rows, cols)
    batch = max(1, limit // (dtype.itemsize * 2 * (rows * cols + small * small)))
    for start in range(0, len(matrices), batch):
        part = matrices[start : start + batch]
        stack = part if isinstance(part, Tensor) else torch.stack(list(part))
        _polar_express(stack, out[start : start + batch])
    return out


def _polar_express(g: Tensor, out: Tensor) -> None:
    norm = torch.linalg.vector_norm(
        g, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(g.dtype, torch.float32)
    )
    x = (g / (1.02 * norm + 1e-6)).to(out.dtype)
    tall = x.shape[-2] > x.shape[-1]
    side = min(x.shape[-2:])
    gram, poly = x.new_empty(2, len(x), side, side)
    other = torch.empty_like(x)
    for i, (a, b, c) in enumerate(POLAR_EXPRESS):
        last = i == len(POLAR_EXPRESS) - 1
        into = out if last else other
        # Tall matrices multiply from the right, which saves a transposed copy.
        torch.bmm(*((x.mT, x) if tall else (x, x.mT)), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
        torch.baddbmm(x, *((x, poly) if tall else (poly, x)), beta=a, out=into)
        x, other = into, x
