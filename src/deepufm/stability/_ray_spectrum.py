"""What the exponents of an invariant ray are made of: a few integers.

On the ray of support S all living modes are mu = N/|S|, and the margins are mu·w with
w = Psi 1_S. In logarithms of the modes and per unit of s = log N, the Jacobian of the
reduced flow on the support, up to what is the same for all modes, is

    p·I - mu·G,   G = sum_w A_w e^{-mu w} / b,   b = sum_w beta_w e^{-mu w},

over the distinct positive margins w: A_w = Psi_Sw Psi_Sw^T from the columns j of margin
w, and beta_w the sum of Psi_ij over these, the same for every i of S. All A_w are
symmetric, positive semi-definite, and have 1_S, the ray itself, as an eigenvector; what
they do to its complement decides on stability. The A_w of all invariant rays of K <= 16
commute. In their common eigenvectors k

    exponent_k = p - h_k,   h_k = mu·sum_w alpha_kw e^{-mu w} / sum_w beta_w e^{-mu w},

with constants alpha >= 0, found once. Those of each k, and the beta, sum to K, since
Psi Psi^T = K(I + 1 1^T): h_k = mu + O(mu²), whatever the ray and k.

A dead mode i grows at b_i/b times the rate of living ones (but for a_i^p), with

    b_i/b - 1 = sum_w (c_iw - beta_w) e^{-mu w} / b,

c_iw the sum of Psi_ij over the margins w, zero included. These sum to K as well, and
sum_w c_iw w = K|S| = sum_w beta_w w - K, so that b_i/b - 1 = mu + O(mu²): it is summed
in differences e^{-mu w} - 1 where mu is small.

NumPy on the host for the constants, JAX for what is made of them.
"""

import functools

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Bool, Float, Int

from .._types import RealScalar
from ._rays import host_psi

# Entries of A_w are integers up to K², eigenvalues good to K² times rounding.
_ROUNDING = 1e-10
# NumPy arrays on the host, JAX's where a function of them is compiled.
_Real = Array | np.ndarray


class RaySpectrum(eqx.Module):
    """The constants of one invariant ray."""

    margins: Float[_Real, " margins"]  # the distinct positive ones of 1_S, rising
    counts: Float[_Real, " margins"]  # beta_w
    shares: Float[_Real, "branches margins"]  # alpha_kw of the distinct k
    branches: Int[_Real, " living"]  # which of these each of |S|-1 eigenvectors has
    dead_counts: Float[_Real, "dead margins+1"]  # c_iw of the dead modes, from w = 0 on
    modes: tuple[int, ...] = eqx.field(static=True)  # numbers i >= 1 of living modes
    dead_modes: tuple[int, ...] = eqx.field(static=True)

    @property
    def size(self) -> int:
        """|S|, the number of living modes."""
        return len(self.modes)

    @property
    def spans(self) -> bool:
        """Whether no margin is zero (where no mode is dead, none is)."""
        return not np.any(np.asarray(self.dead_counts)[:, 0])

    @property
    def falls(self) -> bool:
        """Whether some h_k vanishes at large norms, instead of growing like mu."""
        return bool(np.any(np.asarray(self.shares)[:, 0] == 0))

    def rates(self, mu: RealScalar) -> Float[Array, " branches"]:
        """Returns h_k(mu) of the distinct k."""
        return mu * branch_ratios(self.shares, self.counts, self.margins, mu)

    def log_rate_ratio(self, mu: RealScalar) -> Float[Array, " dead"]:
        """Returns log(b_i/b) of the dead modes."""
        margins = jnp.concatenate([jnp.zeros(1), self.margins]).astype(mu.dtype)
        counts = jnp.concatenate([jnp.zeros(1), self.counts]).astype(mu.dtype)
        dead_counts = jnp.asarray(self.dead_counts, mu.dtype)
        small = mu * margins[-1] <= 1
        terms = jnp.expm1(-jnp.where(small, mu, 0) * margins)
        excess = (
            (dead_counts - counts[None]) @ terms / (jnp.sum(counts) + counts @ terms)
        )
        # Each sum has its own least margin factored out.
        least = jnp.min(jnp.where(dead_counts > 0, margins[None], jnp.inf), axis=1)
        gaps = jnp.maximum(margins[None] - least[:, None], 0)
        sums = jnp.sum(dead_counts * jnp.exp(-mu * gaps), axis=1)
        own = counts[1:] @ jnp.exp(-mu * (margins[1:] - margins[1]))
        far = mu * (margins[1] - least) + jnp.log(sums) - jnp.log(own)
        return jnp.where(small, jnp.log1p(excess), far)


def branch_ratios(shares, counts, margins, mu) -> Float[Array, "*branches"]:
    """Returns h_k(mu)/mu = sum_w alpha_kw e^{-mu w}/sum_w beta_w e^{-mu w}, 1 at 0."""
    constants = (shares, counts, margins)
    shares, counts, margins = (jnp.asarray(x, mu.dtype) for x in constants)
    decay = jnp.exp(-mu * (margins - margins[0]))
    return shares @ decay / (counts @ decay)


def ray_spectrum(support: Bool[np.ndarray, " modes"]) -> RaySpectrum:
    """Returns the constants of the invariant ray with this support.

    **Raises:** `ValueError` where the A_w do not commute, so that no such constants
    exist: none of K <= 16, some of K = 64.
    """
    return _ray_spectrum(support.tobytes())


@functools.lru_cache(maxsize=256)
def _ray_spectrum(support_bytes: bytes) -> RaySpectrum:
    support = np.frombuffer(support_bytes, bool)
    psi = host_psi(len(support) + 1).astype(float)
    all_margins = psi @ support
    margins = np.unique(all_margins[all_margins > 0])
    levels = np.concatenate([[0], margins])
    counts = psi @ (all_margins[:, None] == levels)
    shares, branches = _shares(psi[support], all_margins, margins)
    numbers = np.arange(1, len(support) + 1)
    return RaySpectrum(
        margins, counts[support][0, 1:], shares, branches, counts[~support],
        tuple(numbers[support].tolist()), tuple(numbers[~support].tolist()),
    )  # fmt: skip


def _shares(rows, all_margins, margins) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct rows alpha_k on the complement of 1_S, and each k's row."""
    size, num_classes = len(rows), len(all_margins) + 1
    if size == 1:
        return np.zeros((0, len(margins))), np.zeros(0, int)
    if len(margins) == 1:
        return np.full((1, 1), float(num_classes)), np.zeros(size - 1, int)
    columns = [rows[:, all_margins == margin] for margin in margins]
    complement = scipy.linalg.null_space(np.ones((1, size)))
    blocks = np.stack([complement.T @ c @ c.T @ complement for c in columns])
    # Eigenvectors of one combination in general position are those of all that commute.
    position = np.sqrt(1 + np.arange(len(blocks)))
    _, vectors = np.linalg.eigh(np.tensordot(position, blocks, 1))
    turned = vectors.T @ blocks @ vectors
    shares = np.diagonal(turned, axis1=1, axis2=2).T
    rest = turned - shares.T[:, :, None] * np.eye(size - 1)
    if np.max(np.abs(rest)) > _ROUNDING * num_classes**2:
        raise ValueError(
            f"The exponents of this ray, with {size} modes of {num_classes - 1}, have "
            "no closed form: no eigenvectors serve all norms. Take the spectrum of the "
            "flow's Jacobian at each norm instead."
        )
    # Eigenvalues of integer matrices: an alpha of 1e-14 for 0 would grow with mu.
    whole = np.round(shares)
    exact = np.abs(shares - whole) < _ROUNDING * num_classes**2
    shares = np.where(exact, whole, shares) + 0.0  # no -0
    _, first, branches = np.unique(
        np.round(shares, 6), axis=0, return_index=True, return_inverse=True
    )
    return shares[first], np.sort(branches)
