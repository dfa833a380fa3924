"""Losses, with residuals and values that stay exact when they are e^{-1000}.

A loss returns the residual -dL/dZ as a matrix of ordinary size times exp(log_scale).
Cross-entropy (P1 eq. 1) is built from the *off-class gaps* g_k = z_k - z_y, k != y, of
each column. With s = log sum_k e^{g_k},

    loss = softplus(s),  p_k = exp(g_k - softplus(s)),  1 - p_y = exp(-softplus(-s)),

so nothing is ever subtracted from one, and the gaps are blind to a shift of all logits.
The squared error (P2 section 2) has the residual Y - Z itself.
"""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._types import Labels, Logits, RealScalar
from ..geometry import log_frobenius_norm, safe_scale


def log_softplus(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns log log(1 + e^x) to full relative accuracy for every x.

    Below x = -18 the inner logarithm is a series in y = e^x: log(log1p(y)/y) =
    -y/2 + 5y²/24 + O(y³), and y³ < 4e-24.
    """
    threshold = -18.0
    small = x < threshold
    y = jnp.exp(jnp.where(small, x, threshold))
    series = x - y * (0.5 - 5 / 24 * y)
    direct = jnp.log(jax.nn.softplus(jnp.where(small, threshold, x)))
    return jnp.where(small, series, direct)


class AbstractLoss(eqx.Module):
    """A loss summed over examples, L(Z) = sum over columns of loss(z, y)."""

    # Whether the loss has no finite minimiser, so that the norm grows for ever.
    norm_diverges: eqx.AbstractClassVar[bool]

    @abc.abstractmethod
    def residual(self, logits: Logits, labels: Labels) -> tuple[Logits, RealScalar]:
        """Returns (R, log_scale) with -dL/dZ = exp(log_scale)·R and max |R| near 1.

        **Arguments:** `logits` (K, N), one example a column; `labels` (N,), the class
        of each column.
        """

    @abc.abstractmethod
    def log_loss(self, logits: Logits, labels: Labels) -> RealScalar:
        """Returns the natural logarithm of the summed loss."""


class CrossEntropy(AbstractLoss):
    """Softmax cross-entropy, summed over examples (P1 eq. 1, P2 eq. 1).

    Exact at any margin: one example of four classes at margin 750 has log-loss
    log 3 - 750 = -748.90, though the loss itself is below the smallest double.
    """

    norm_diverges: ClassVar[bool] = True

    def residual(self, logits: Logits, labels: Labels) -> tuple[Logits, RealScalar]:
        """Returns (R, log_scale) with Y - P = exp(log_scale)·R (P1 eq. 37)."""
        own, gaps, log_odds = _off_class(logits, labels)
        log_own = -jax.nn.softplus(-log_odds)  # log(1 - p_y)
        log_scale = jnp.max(log_own)
        log_off = gaps - jax.nn.softplus(log_odds)[None, :]  # log p_k; -inf at k = y
        scaled = jnp.where(
            own,
            jnp.exp(log_own - log_scale)[None, :],
            -jnp.exp(log_off - log_scale),
        )
        return scaled, log_scale

    def log_loss(self, logits: Logits, labels: Labels) -> RealScalar:
        """Returns log of the sum over examples of log(1 + sum_k e^{z_k - z_y})."""
        _, _, log_odds = _off_class(logits, labels)
        return jax.nn.logsumexp(log_softplus(log_odds))


class MSE(AbstractLoss):
    """Half the squared error ‖Y - Z‖_F²/2, summed over examples (P2 section 2, eq. 4).

    The minimiser Z = Y is finite, so norms converge and `LogNorm` is refused.
    """

    norm_diverges: ClassVar[bool] = False

    def residual(self, logits: Logits, labels: Labels) -> tuple[Logits, RealScalar]:
        """Returns (R, log_scale) with Y - Z = exp(log_scale)·R; at Z = Y (0, -inf)."""
        error = _one_hot(logits, labels) - logits
        scale, at_rest = safe_scale(error), jnp.all(error == 0)
        return error / scale, jnp.where(at_rest, -jnp.inf, jnp.log(scale))

    def log_loss(self, logits: Logits, labels: Labels) -> RealScalar:
        """Returns log of ‖Y - Z‖_F²/2, -inf at the minimum."""
        error = _one_hot(logits, labels) - logits
        return 2 * log_frobenius_norm(error) - jnp.log(2.0).astype(logits.dtype)


def _one_hot(logits: Logits, labels: Labels) -> Logits:
    own = jnp.arange(logits.shape[0])[:, None] == labels[None, :]
    return own.astype(logits.dtype)


def _off_class(
    logits: Logits, labels: Labels
) -> tuple[Bool[Array, "classes examples"], Logits, Float[Array, " examples"]]:
    """Returns the mask of class entries, the gaps z_k - z_y (-inf there), their lse."""
    own = jnp.arange(logits.shape[0])[:, None] == labels[None, :]
    correct = jnp.take_along_axis(logits, labels[None, :], axis=0)
    gaps = jnp.where(own, -jnp.inf, logits - correct)
    return own, gaps, jax.nn.logsumexp(gaps, axis=0)
