"""One step of MuonH and one of AdamW for a single array, numpy float64, straight from the formulas."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MOMENTUM = 0.95
SMALLEST_NORM = 1e-10

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def frobenius(x: Array) -> float:
    return float(np.sqrt(np.sum(x * x)))


def orthogonalise(g: Array) -> Array:
    """Five Polar Express iterations: singular values are driven towards 1, singular vectors are kept."""
    x = g / (1.02 * frobenius(g) + 1e-6)
    tall = x.shape[0] > x.shape[1]
    for a, b, c in POLAR_EXPRESS:
        if tall:
            gram = x.T @ x
            x = a * x + x @ (b * gram + c * (gram @ gram))
        else:
            gram = x @ x.T
            x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def muonh_step(
    weight: Array, grad: Array, momentum_buffer: Array, lr: float, initial_norm: float
) -> tuple[Array, Array]:
    """Returns the new weight and the new momentum buffer; the arguments are left alone.

    initial_norm is the Frobenius norm of the matrix at initialisation, the radius of the sphere it lives on.
    """
    if not initial_norm > 0:
        raise ValueError("the initial matrix has norm 0: it has no sphere to live on")
    buffer = MOMENTUM * momentum_buffer + (1 - MOMENTUM) * grad
    nesterov = (1 - MOMENTUM) * grad + MOMENTUM * buffer
    update = orthogonalise(nesterov)
    update = update * (initial_norm / max(frobenius(update), SMALLEST_NORM))
    moved = weight - lr * update
    return moved * (initial_norm / max(frobenius(moved), SMALLEST_NORM)), buffer


def adamw_step(
    param: Array,
    grad: Array,
    first_moment: Array,
    second_moment: Array,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.8, 0.95),
    eps: float = 1e-10,
    weight_decay: float = 0.0,
) -> tuple[Array, Array, Array]:
    """Returns the new parameter and both new moments; step counts from 1."""
    beta1, beta2 = betas
    m = beta1 * first_moment + (1 - beta1) * grad
    v = beta2 * second_moment + (1 - beta2) * grad * grad
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    decayed = param * (1 - lr * weight_decay)
    return decayed - lr * m_hat / (np.sqrt(v_hat) + eps), m, v
