"""Logits of a fixed rank: their norm, their gaps, and the slopes of both.

Class-mean logits Z (K, K) of rank r cost f(Z) = sum_i sigma_i^q, q = 2/(L+1) (P1 eq. 24
over L+1), and have K(K-1) gaps Z_cc - Z_kc (column c is class c). In the basis of
Z = U S V^T and of the complements U', V', logits near Z of the same rank are

    [ S + P          D          ]      P (r, r),   C (K-r, r),   D (r, K-r),
    [   C     C (S + P)^-1 D    ]

2Kr - r^2 coordinates with none to spare. To second order the singular values are those
of S + P + (S^-1 C^T C + D D^T S^-1)/2, and so, with f' = q S^{q-1},

    f = f(S + P) + (1/2) sum_i q s_i^{q-2} (|C_i|^2 + |D_i|^2).

Coordinates here are in units that make this last matrix, and that of the skew part of
P, the identity: a step of length sqrt(q f) doubles Z. In them the second derivatives
are of order one, whatever the spread of the singular values.

Why none of this is left to automatic differentiation: singular values coincide at all
structures of interest, and dying ones have slopes that grow without bound.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FixedRank:
    """Logits as U diag(s) V^T, with bases of the complements.

    - `left`, `right`: (K, K), orthogonal; U and V are their first r columns.
    - `values`, (r,): s, positive, falling.
    - `power`: q.
    """

    left: np.ndarray
    values: np.ndarray
    right: np.ndarray
    power: float

    @classmethod
    def nearest(cls, logits: np.ndarray, rank: int, power: float) -> "FixedRank":
        """Returns the nearest matrix of a rank, in the Frobenius norm."""
        left, values, right = np.linalg.svd(logits)
        return cls(left, values[:rank], right.T, power)

    @property
    def rank(self) -> int:
        """The number of singular values."""
        return len(self.values)

    @property
    def logits(self) -> np.ndarray:
        """Z, (K, K)."""
        rank = self.rank
        return (self.left[:, :rank] * self.values) @ self.right[:, :rank].T

    @property
    def objective(self) -> float:
        """The sum of s^q."""
        return float(np.sum(self.values**self.power))

    @property
    def prices(self) -> np.ndarray:
        """What it costs to raise each singular value: q s^{q-1}, (r,)."""
        return self.power * self.values ** (self.power - 1)

    def scaled(self) -> "FixedRank":
        """Returns the same direction with a least gap of 1, where that is positive."""
        least = least_gap(self.logits)
        return FixedRank(self.left, self.values / least, self.right, self.power)

    def slopes(self) -> np.ndarray:
        """Returns df, one entry a coordinate: P by rows, then C, then D."""
        core = np.diag(np.sqrt(self.power * self.values**self.power))
        rest = 2 * (len(self.left) - self.rank) * self.rank
        return np.concatenate([core.ravel(), np.zeros(rest)])

    def pulled_back(self, matrices: np.ndarray) -> np.ndarray:
        """Returns the slopes of <M, Z> for M (..., K, K), one row each."""
        rank = self.rank
        blocks = self.left.T @ matrices @ self.right
        side = self._sides()
        core = blocks[..., :rank, :rank] / np.sqrt(self._weights())
        below = blocks[..., rank:, :rank] * side
        beside = blocks[..., :rank, rank:] * side[:, None]
        shape = (*matrices.shape[:-2], -1)
        return np.concatenate(
            [core.reshape(shape), below.reshape(shape), beside.reshape(shape)], axis=-1
        )

    def hessian(self, matrix: np.ndarray) -> np.ndarray:
        """Returns the second derivatives of f(Z) - <M, Z>, M (K, K).

        They mean something where the slopes of f and <M, Z> agree, and do not depend
        on the coordinates there.
        """
        rank, classes = self.rank, len(self.left)
        rest = classes - rank
        core, side = rank * rank, rest * rank
        out = np.eye(core + 2 * side)
        # Divided differences of f' on the symmetric part of P over those on the skew
        # part, which are the unit: -(1-q) where the two values meet, never below -1.
        # No difference of close numbers is taken.
        apart = np.maximum(np.abs(self._half_log_ratios()), 1e-30)
        symmetric = -np.tanh((1 - self.power) * apart) / np.tanh(apart)
        index = np.arange(core).reshape(rank, rank)
        out[index, index] = (1 + symmetric) / 2
        out[index, index.T] += (symmetric - 1) / 2
        # What is of second order in Z, C S^-1 D, is priced by M.
        beyond = self.left[:, rank:].T @ matrix @ self.right[:, rank:]
        for i, price in enumerate(self.prices):
            below = core + np.arange(rest) * rank + i
            beside = core + side + i * rest + np.arange(rest)
            out[np.ix_(below, beside)] = -beyond / price
            out[np.ix_(beside, below)] = -beyond.T / price
        return out

    def moved(self, step: np.ndarray) -> "FixedRank":
        """Returns logits of the same rank, a step away; exact to first order."""
        rank, rest = self.rank, len(self.left) - self.rank
        core, below, beside = np.split(step, [rank * rank, (rank + rest) * rank])
        side = self._sides()
        core = core.reshape(rank, rank) / np.sqrt(self._weights())
        below = below.reshape(rest, rank) * (side / self.values)
        beside = beside.reshape(rank, rest) * (side / self.values)[:, None]
        tall = self.left @ np.vstack([np.eye(rank), below])
        wide = np.hstack([np.eye(rank), beside]) @ self.right.T
        middle = np.diag(self.values) + core
        return FixedRank.nearest(tall @ middle @ wide, rank, self.power)

    def core_change(self, step: np.ndarray) -> float:
        """Returns |S^-1/2 P S^-1/2|: where it is below 1, the rank stays."""
        core = step[: self.rank**2].reshape(self.rank, self.rank)
        means = np.sqrt(self.values[:, None] * self.values[None, :])
        return float(np.linalg.norm(core / (np.sqrt(self._weights()) * means), 2))

    def _sides(self) -> np.ndarray:
        """Returns the units of C and D: s^{1-q/2}/sqrt(q), (r,)."""
        return self.values ** (1 - self.power / 2) / np.sqrt(self.power)

    def _half_log_ratios(self) -> np.ndarray:
        logs = np.log(self.values)
        return (logs[:, None] - logs[None, :]) / 2

    def _weights(self) -> np.ndarray:
        """Returns (f'_i + f'_j)/(s_i + s_j), (r, r)."""
        apart = self._half_log_ratios()
        means = np.sqrt(self.values[:, None] * self.values[None, :])
        ratio = np.cosh((1 - self.power) * apart) / np.cosh(apart)
        return self.power * means ** (self.power - 2) * ratio


def gaps_of(logits: np.ndarray) -> np.ndarray:
    """Returns Z_cc - Z_kc at row k of column c, (K, K), zero on the diagonal."""
    return np.diag(logits)[None, :] - logits


def least_gap(logits: np.ndarray) -> float:
    """Returns the smallest gap."""
    return float(np.min(gaps_of(logits)[~np.eye(len(logits), dtype=bool)]))


def gap_matrices(others: np.ndarray, classes: np.ndarray, size: int) -> np.ndarray:
    """Returns (e_c - e_k) e_c^T for pairs of k and c, (pairs, K, K)."""
    out = np.zeros((len(classes), size, size))
    pairs = np.arange(len(classes))
    out[pairs, classes, classes] = 1
    out[pairs, others, classes] = -1
    return out


def pooled(duals: np.ndarray) -> np.ndarray:
    """Returns M = sum of lambda_kc (e_c - e_k) e_c^T, (K, K), from lambda (K, K)."""
    return np.diag(np.sum(duals, axis=0)) - duals
