"""The route to the limit of the full flow.

Late in training the examples of a class agree and the layers are balanced. The class
means Zbar then move by themselves (P1 D.3: n examples a class change the unit of time
alone), as those of a balanced linear network do,

    dZ/dt = sum_{l=0}^{L} (Z Z^T)^{l/(L+1)} G (Z^T Z)^{(L-l)/(L+1)},   G = Y - P

(Arora, Cohen & Hazan 2018), here in the time s = log ‖Zbar‖_F, so that the scale of G
drops out. As for the reduced flow the norm in G is held from 1e4 on, where all that is
left to happen is that singular values die. Their growth exponents,

    d log sigma_i/ds ~ sigma_i^p u_i^T G v_i,   p = (L-1)/(L+1),

1 for those that live, tell how many do; cut to these, `polish` brings Zbar to the
stationary point nearby.
"""

import math
import operator
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis import MatrixKKT, Verdict, matrix_kkt, polish
from ..dynamics import FinalTime, GradientFlow
from ..ensemble import ensemble
from ..models import CrossEntropy, DeepUFM
from ._approach import KKT, AbstractRoute
from ._integrate import Counted

# A state whose least margin is below this is followed by its own flow to t = 2.5e30.
_LATE = 50.0
# Below this least gap probabilities are nearly equal, and nothing here holds.
_LEAST_GAP = 1.0
_LATE_LOG_TIME = 70.0
_LATE_MAX_STEPS = 200_000
_HELD_FROM = 1e4
# Further readings of log ‖Zbar‖_F, and the norm held up to them. Near weak saddles they
# take this long: of 25 members of P1 Fig. 2's setting six were undecided at 80, one at
# 1024. When only such motion is left the norm may be held higher, which makes ties
# sharper; a least gap is but a twentieth of the norm at rank 3.
_HELD = {
    2.0: 1e4, 4.0: 1e4, 8.0: 1e4, 16.0: 1e4, 32.0: 1e5, 64.0: 1e5, 128.0: 1e5,
    256.0: 1e6, 1024.0: 1e6,
}  # fmt: skip
_TARGETS = np.log(_HELD_FROM) + np.asarray([0.0, *_HELD])
# Relative to the norm, and a hundredth where gaps are in exponentials. It decides which
# values die, not the digits of the limit.
_RTOL = 1e-6
_GAP_ERROR = 0.01
_MAX_CALLS = 100_000
# Singular values below this part of the largest with a growth exponent below the next
# are dead.
_DEAD = 1e-3
_DYING = 0.3
# One that a limit lacks has a growth exponent below this.
_INVADING_GROWTH = 0.9
# Growth exponents between dying and living.
_LIVING = (0.5, 0.7, 0.3, 0.9)


class FullRoute(AbstractRoute):
    """Members of `GradientFlow`, as late class means."""

    targets = tuple(float(target) for target in _TARGETS)
    held_norms = dict(zip(targets[1:], _HELD.values(), strict=True))
    # At a held norm the direction settles where its ties are sharp to 1/norm.
    resolution = 10 / _HELD_FROM

    def __init__(self, means: np.ndarray, depth: int, per_class: int, width: int):
        """Takes late class means, (members, K, K), of columns that sum to 0."""
        self.means = means.copy()
        self.depth = depth
        self.num_classes = means.shape[1]
        self.per_class = per_class
        self.shape = (self.num_classes, self.num_classes)
        self.held = np.zeros(len(means))
        self.width = min(width, self.num_classes - 1)
        self.ranks = [self.width] * len(means)

    def directions(self) -> np.ndarray:
        """Returns class means of Frobenius norm 1, (members, K²)."""
        flat = self.means.reshape(len(self.means), -1)
        norms = np.linalg.norm(flat, axis=1, keepdims=True)
        return flat / np.where(norms > 0, norms, 1)

    def log_norms(self) -> np.ndarray:
        """Returns log ‖Zbar‖_F, (members,), counted on where it is held."""
        norms = np.linalg.norm(self.means, axis=(1, 2))
        return np.log(np.maximum(norms, np.finfo(float).tiny)) + self.held

    def advance(self, target: float, busy: np.ndarray) -> np.ndarray:
        """Integrates the class means of the busy members, one by one."""
        arrived = np.zeros(len(busy), bool)
        is_held = target in self.held_norms
        reached = self.log_norms()
        for i in np.flatnonzero(busy).tolist():
            self.ranks[i] = self._rank_left(i)
            start = self.means[i]
            if is_held:
                start = start * (self.held_norms[target] / np.linalg.norm(start))
            rate = Counted(BalancedRate(self.depth, self.ranks[i], is_held), _MAX_CALLS)
            norm = float(np.linalg.norm(start))
            rtol = min(_RTOL, _GAP_ERROR / norm)
            length = target - reached[i]
            end = rate.integrate(start.ravel(), length, rtol, rtol * norm)
            if end is None:
                continue
            arrived[i] = True
            self.means[i] = end.reshape(self.shape)
            if is_held:
                self.held[i] = target - np.log(np.linalg.norm(self.means[i]))
        return arrived

    def propose(self, member: int) -> KKT | None:
        """Returns the first strict minimum that `polish` finds, of the likely ranks.

        If there is none, the first saddle.
        """
        saddle = None
        for rank in self._ranks(self.means[member]):
            point = polish(self.means[member], self.depth, rank).point
            if self.width < self.num_classes - 1:
                point = matrix_kkt(point.logits, self.depth, width=self.width)
            if point.verdict is Verdict.MINIMUM:
                return point
            if point.verdict is Verdict.SADDLE and saddle is None:
                saddle = point
        return saddle

    def is_invaded(self, member: int, point: KKT) -> bool:
        """Returns whether a singular value beyond the point's rank grows, or nearly."""
        growth = singular_growth(self.means[member], self.depth)
        beyond = growth[point.rank : self.ranks[member]]
        # So that a growth that is not known (NaN) counts as one.
        return not np.all(beyond <= _INVADING_GROWTH)

    def is_late(self) -> np.ndarray:
        """Returns which members have a least gap of `_LATE`."""
        return least_gaps(self.means) >= _LATE

    def can_start(self) -> np.ndarray:
        """Returns which members classify every class, by more than rounding."""
        return least_gaps(self.means) > _LEAST_GAP

    def unit(self, point: KKT) -> np.ndarray:
        """Returns a point's class means, of norm 1, (K²,)."""
        return np.ravel(self.direction(point))

    def direction(self, point: KKT) -> np.ndarray:
        """Returns a point's class means, of norm 1, (K, K)."""
        logits = self.logits(point)
        return logits / np.linalg.norm(logits)

    def logits(self, point: KKT) -> np.ndarray:
        """Returns a point's class means, (K, K)."""
        assert isinstance(point, MatrixKKT)
        return point.logits

    def objective(self, point: KKT, member: int) -> float:
        """Returns the sum of sigma_i^q."""
        del member
        return point.objective

    def depth_of(self, member: int) -> float:
        """Returns L."""
        del member
        return float(self.depth)

    def _rank_left(self, member: int) -> int:
        """Returns how many singular values are still worth following.

        All at L = 1, where the dead come back beside a saddle.
        """
        if self.depth == 1:
            return self.ranks[member]
        values = np.linalg.svd(self.means[member], compute_uv=False)
        growth = singular_growth(self.means[member], self.depth)
        worth = (values > _DEAD * values[0]) | (growth > _DYING)
        return min(int(np.sum(worth)), self.ranks[member])

    def _ranks(self, means: np.ndarray) -> Iterator[int]:
        """Yields how many singular values may live, the likeliest number first."""
        seen = set()
        growth = singular_growth(means, self.depth)
        for living in _LIVING:
            rank = int(np.sum(growth > living))
            if rank and rank not in seen:
                seen.add(rank)
                yield rank


class BalancedRate:
    """d Zbar/ds of balanced layers, s = log ‖Zbar‖_F, on the matrices of one rank.

    Tangent to them, so that what rounding adds beyond the rank stays rounding: with the
    powers 2/(L+1) of its singular values it would move deep models. If held, without
    its radial part.
    """

    def __init__(self, depth: int, rank: int, is_held: bool):
        self.depth, self.rank, self.is_held = depth, rank, is_held

    def __call__(self, flat: np.ndarray) -> np.ndarray:
        size = math.isqrt(len(flat))
        means = flat.reshape(size, size)
        left, values, right = np.linalg.svd(means)
        roots = (values / values[0]) ** (2 / (self.depth + 1))
        roots[self.rank :] = 0
        powers = roots[:, None] ** np.arange(self.depth + 1)  # 0^0 = 1
        pull = left.T @ scaled_residual(means) @ right.T
        move = (left @ (powers @ powers[:, ::-1].T * pull) @ right).ravel()
        rate = move * (flat @ flat) / (flat @ move)
        return rate - flat if self.is_held else rate


def scaled_residual(means: np.ndarray) -> np.ndarray:
    """Returns Y - P up to a factor, (K, K): its entries off the class are -p.

    The entry of the class is the sum of the others, with no cancellation.
    """
    log_odds = means - np.diag(means)
    # Not far below all the others, but nothing: exp(-inf) is 0.
    np.fill_diagonal(log_odds, -np.inf)
    highest = np.max(log_odds)
    # Columns that are fitted better have the smaller weight; P's own denominator is 1
    # to e^{-margin}.
    odds = np.exp(log_odds - highest)
    return np.diag(np.sum(odds, axis=0)) - odds


def singular_growth(means: np.ndarray, depth: int) -> np.ndarray:
    """Returns d log sigma_i/d log ‖Zbar‖_* of balanced layers, largest sigma first."""
    left, values, right = np.linalg.svd(means)
    share = values / values[0]
    pull = np.einsum("ki,kc,ic->i", left, scaled_residual(means), right)
    rates = np.where(share > 0, pull * share ** ((depth - 1) / (depth + 1)), 0)
    return rates * np.sum(share) / np.sum(share * rates)


def least_gaps(means: np.ndarray) -> np.ndarray:
    """Returns the smallest Z_cc - Z_kc over pairs of classes, (members,)."""
    own = np.diagonal(means, axis1=1, axis2=2)
    gaps = own[:, None, :] - means
    return np.min(gaps[:, ~np.eye(means.shape[1], dtype=bool)], axis=1)


def late_means(flow: GradientFlow, models: DeepUFM) -> np.ndarray:
    """Returns class means of the logits, (members, K, K), at margins that are late.

    Members that are early are followed by their own flow; meanwhile the others rest.
    """
    assert isinstance(flow.per_class, int)
    means = centred(mean_logits(models, flow.per_class))
    early = ~(least_gaps(means) >= _LATE)
    if not np.any(early):
        return means
    resting = jax.tree.map(lambda x: jnp.where(_along(early, x), x, 0), models)
    path = ensemble(
        flow, None, resting, stop=FinalTime(log=_LATE_LOG_TIME),
        max_steps=_LATE_MAX_STEPS,
    )  # fmt: skip
    late = centred(mean_logits(path.final, flow.per_class))
    return np.where(_along(early, late), late, means)


def centred(means: np.ndarray) -> np.ndarray:
    """Returns columns of mean 0: what is added to a column changes no gap."""
    return means - np.mean(means, axis=1, keepdims=True)


def mean_logits(models: DeepUFM, per_class: int) -> np.ndarray:
    """Returns the class means of linear models' logits, (members, K, K).

    On the host: `DeepUFM.logits` and `class_means` would be compiled for every shape.
    Padding, of identities and zeros, changes nothing.
    """
    left = np.asarray(models.head)
    hidden = np.asarray(models.hidden)
    for layer in range(hidden.shape[1])[::-1]:
        left = left @ hidden[:, layer]
    logits = left @ np.asarray(models.features)
    shape = (*logits.shape[:2], -1, per_class)
    return np.mean(logits.reshape(shape), axis=-1)


def _along(chosen: np.ndarray, like) -> np.ndarray:
    return chosen.reshape((-1,) + (1,) * (like.ndim - 1))


def is_plain(flow: GradientFlow) -> bool:
    """Returns whether `limit` knows the flow: linear, cross-entropy, classes of a size.

    Others come to rest, or have limits of other kinds.
    """
    return (
        isinstance(flow.loss, CrossEntropy)
        and flow.weight_decay is None
        and flow.activation is None
        and isinstance(flow.per_class, int)
    )


def check_flow(flow: GradientFlow) -> None:
    """Raises `ValueError` for a flow that is not plain."""
    if not is_plain(flow):
        raise ValueError(
            "`limit` knows the linear `GradientFlow` of cross-entropy, with no weight "
            "decay and one number of examples for all classes; others come to rest, or "
            "have limits of other kinds."
        )


def checked_models(flow: GradientFlow, state) -> tuple[DeepUFM, bool]:
    """Returns models with a leading member axis, and whether they came as a batch.

    **Raises:** `ValueError` for models that do not fit the flow, or are padded.
    """
    if not isinstance(state, DeepUFM) or state.head.ndim not in (2, 3):
        raise ValueError(
            "The state of `GradientFlow` must be a `DeepUFM`, or class means of the "
            "logits, (K, K); or a batch of them with a leading axis."
        )
    if flow.depth is not None:
        raise ValueError(
            "`limit` takes models without padding, and their flow without `depth`; or "
            "class means of the logits, with it."
        )
    is_batch = state.head.ndim == 3
    models = state if is_batch else jax.tree.map(lambda x: x[None], state)
    for i in range(models.head.shape[0]):
        flow.check(jax.tree.map(operator.itemgetter(i), models))
    return models, is_batch


def checked_means(
    flow: GradientFlow, state: np.ndarray
) -> tuple[np.ndarray, int, bool]:
    """Returns class means with a leading member axis, L, and whether it was there.

    **Raises:** `ValueError` unless they are finite (K, K) matrices that classify every
    class, and the flow's depth is one whole number.
    """
    depth = np.asarray(np.nan if flow.depth is None else flow.depth)
    if depth.ndim or not (depth >= 1 and depth == np.round(depth)):
        raise ValueError(
            "With class means the flow must know its depth, one whole number: "
            "GradientFlow(loss, per_class, depth=L)."
        )
    means = np.asarray(state, float)
    is_batch = means.ndim == 3
    means = means if is_batch else means[None]
    square = means.ndim == 3 and means.shape[1] == means.shape[2] >= 2
    if not square or not len(means):
        raise ValueError(
            "Class means of the logits must have the shape (K, K) or (members, K, K), "
            f"K >= 2 and a member or more, but this has {np.shape(state)}."
        )
    right = np.all(np.isfinite(means), axis=(1, 2)) & (least_gaps(means) > 0)
    if not np.all(right):
        raise ValueError(
            "Class means must be finite and classify every class, but those of member "
            f"{int(np.argmin(right))} do not. Take a later state."
        )
    return centred(means), int(depth), is_batch
