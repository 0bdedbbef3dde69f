"""Closed-form parameter counts and training FLOPs per token.

A layout is (prelude layers, recurrent layers, coda layers). Letters: d model width, r recurrences, K lanes,
V_pad padded vocabulary, T sequence length, k_full / k_fwd recurrences with / without gradients.
"""

from dataclasses import dataclass

Layout = tuple[int, int, int]

PAPER_VOCAB_PADDED = 32_064
PAPER_SEQUENCE_LENGTH = 2_048


def padded_vocab(vocab_size: int) -> int:
    """Vocabulary rounded up to a multiple of 64."""
    return -(-vocab_size // 64) * 64


def model_width(size: int, head_dim: int = 128) -> int:
    """d = 64·size, rounded up to a whole number of heads."""
    return -(-64 * size // head_dim) * head_dim


def paper_layout(r: int) -> Layout:
    """The effective-depth-20 layouts: 0-20-0 at r = 1, otherwise 2-(16/r)-2."""
    if r == 1:
        return (0, 20, 0)
    if r < 1 or 16 % r != 0:
        raise ValueError(f"16 layers cannot be shared out over r={r} recurrences")
    return (2, 16 // r, 2)


def paper_injection(r: int) -> str:
    return "passthrough" if r == 1 else "linear"


def layer_parameters(d: int, n_heads: int = 1, n_kv_heads: int | None = None) -> int:
    """n_b: q, out (d² each), k, v (d² each, less with GQA), two MLP matrices (4d² each), two norm scales.

    Only the ratio of the head counts matters; without GQA the sum is 12d² + 2d.
    """
    kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    kv_width = d * kv_heads // n_heads
    return d * d + d * d + kv_width * d + kv_width * d + 4 * d * d + 4 * d * d + d + d


def injection_parameters(d: int, injection: str) -> int:
    """W of shape (d, 2d) for the linear injection; the other two learn nothing."""
    return {"linear": 2 * d * d, "additive": 0, "passthrough": 0}[injection]


def lane_parameters(r: int, lanes: int) -> int:
    """alpha (K), M (K²) and beta (K) for each recurrence; a single state has none."""
    return 0 if lanes == 1 else r * (lanes + lanes * lanes + lanes)


@dataclass(frozen=True)
class Parameters:
    """Parameter counts by section; layer norms are counted inside their section."""

    embedding: int
    prelude: int
    block: int
    injection: int
    lanes: int
    coda: int
    model_norms: int
    head: int
    num_recurrences: int

    @property
    def once(self) -> int:
        """N_once: what is used once per token, without embedding and head."""
        return self.prelude + self.coda + self.model_norms

    @property
    def recurrent(self) -> int:
        """N_rec: the block, the injection, and the lane scalars of all recurrences."""
        return self.block + self.injection + self.lanes

    @property
    def unique(self) -> int:
        """N = N_once + N_rec."""
        return self.once + self.recurrent

    @property
    def unrolled(self) -> int:
        """N_once + r·N_rec, but lane scalars, each of which acts in one recurrence only, are not repeated."""
        return self.once + self.num_recurrences * (self.block + self.injection) + self.lanes

    @property
    def total(self) -> int:
        """Every stored parameter, embedding and head included."""
        return self.unique + self.embedding + self.head


def parameters(
    d: int,
    r: int,
    layout: Layout,
    injection: str,
    lanes: int = 1,
    vocab_padded: int = PAPER_VOCAB_PADDED,
    n_heads: int = 1,
    n_kv_heads: int | None = None,
) -> Parameters:
    l_prelude, l_recur, l_coda = layout
    n_b = layer_parameters(d, n_heads, n_kv_heads)
    return Parameters(
        embedding=vocab_padded * d,
        prelude=l_prelude * n_b,
        block=l_recur * n_b,
        injection=injection_parameters(d, injection),
        lanes=lane_parameters(r, lanes),
        coda=l_coda * n_b,
        model_norms=3 * d,
        head=vocab_padded * d,
        num_recurrences=r,
    )


def paper_split(d: int, r: int) -> tuple[int, int]:
    """(N_once, N_rec) as the paper hands them to its fits: at r = 1 the 20 layers are split as 2-16-2."""
    n_b = 12 * d * d + 2 * d
    if r == 1:
        return 4 * n_b + 3 * d, 16 * n_b
    return 4 * n_b + 3 * d, (16 // r) * n_b + 2 * d * d


def flops_per_token(
    d: int,
    r: int,
    layout: Layout,
    injection: str,
    lanes: int = 1,
    window: int | None = None,
    vocab_padded: int = PAPER_VOCAB_PADDED,
    sequence_length: int = PAPER_SEQUENCE_LENGTH,
    convention: str = "paper",
    n_heads: int = 1,
    n_kv_heads: int | None = None,
) -> int:
    """Training FLOPs per token; window = number of last recurrences that keep gradients, None for all.

    6 = 2 (multiply, add) × 3 (forward, and backward at twice the price). Scores and the weighted sum of
    values cost 2·d·T each per layer in the forward pass: 12·d·T with the backward pass, 4·d·T without.
    The `causal` convention halves what attention costs beyond its projections.
    """
    l_prelude, l_recur, l_coda = layout
    k_full = r if window is None else min(window, r)
    if k_full < 1:
        raise ValueError(f"at least one recurrence must keep gradients, got window={window}")
    k_fwd = r - k_full

    n_b = layer_parameters(d, n_heads, n_kv_heads)
    n_inject = injection_parameters(d, injection)
    if lanes > 1:
        n_inject += (lanes * lanes + 2 * lanes) * d

    matmul_once = 6 * (l_prelude * n_b + l_coda * n_b + vocab_padded * d)
    matmul_loop = (6 * k_full + 2 * k_fwd) * (l_recur * n_b + n_inject)
    attention = (12 * (l_prelude + l_coda) + (12 * k_full + 4 * k_fwd) * l_recur) * d * sequence_length
    if convention == "causal":
        attention //= 2  # always even: it is a multiple of 4
    elif convention != "paper":
        raise ValueError(f"unknown convention {convention!r}: use 'paper' or 'causal'")
    return matmul_once + matmul_loop + attention
