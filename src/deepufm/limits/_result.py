"""What `limit` returns: directions at t = infinity and how far they are proved."""

import enum
from collections import Counter
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import scipy.stats


class LimitStatus(enum.Enum):
    """Whether a limit is certified, and if not, why not."""

    CERTIFIED = "A strict local minimum, stationary, that the flow approached."
    SADDLE = (
        "The flow approached a stationary point that is no local minimum. Unless the "
        "start lies on the boundary of basins, as symmetric ones do, it leaves later."
    )
    UNSETTLED = (
        "At the largest norm followed, no stationary point was approached: modes were "
        "still dying, or margins still meeting. The point given is what the last "
        "reading suggests."
    )
    EARLY = (
        "The flow approached a strict local minimum, but from a state too early for "
        "layers and examples to agree, as was assumed: give one of a later time."
    )
    NOT_FOLLOWED = (
        "The integration to large norms failed, or the state misclassifies a class. "
        "Solve it to a later time first."
    )
    UNCHECKED = (
        "The state given is past the largest norm that is followed, so that nothing "
        "tells whether the flow approaches the point. Give an earlier state."
    )


@dataclass(frozen=True)
class Share:
    """One kind of limit among many members.

    - `structure`, `rank`, `objective`, `depth` L: what they have in common; rank 0 and
        depth NaN for all that are not certified.
    - `count`: how many members end there; `fraction` of all.
    - `low`, `high`: Wilson's 95 % confidence interval of that fraction.
    """

    structure: str
    rank: int
    objective: float
    depth: float
    count: int
    fraction: float
    low: float
    high: float


class _Kind(NamedTuple):
    structure: str
    rank: int  # 0 if not certified
    objective: float
    depth: float  # NaN would not be equal to itself


@dataclass(frozen=True)
class Limit:
    """The directions that members of a flow tend to, one row a member.

    Of one member the arrays have no leading axis. Where nothing stationary was found
    the numbers are NaN, `rank` 0 and `structure` empty.

    - `direction`: reduced flow: a, (members, K-1), of sum 1; full flow: the class means
        of the logits, (members, K, K), of Frobenius norm 1.
    - `duals`: the multipliers of the margins, at a smallest margin of 1: (members, K-1)
        or, for the gap of class c over class k, at [k, c] of (members, K, K).
    - `depth`: L.
    - `rank`: of the logits.
    - `objective`: sum of sigma_i^q, q = 2/(L+1), of the class means of the logits
        scaled to a smallest gap of 1 (P1 eq. 24 over L+1).
    - `logit_margin`: the smallest gap of the class means over their Frobenius norm.
    - `parameter_margin`: smallest gap over ‖θ‖^{L+1} of balanced layers.
    - `kkt_residual`: relative; feasibility, stationarity and complementarity.
    - `verdict`: a `Verdict`: second-order and, at L = 1, transverse.
    - `structure`: its name.
    - `start_angle`: between the state given and the limit, radians.
    - `angle`: the same at the end of the continuation.
    - `log_norm`: log ‖a‖_1, or log ‖Zbar‖_F, there, as if it had not been held.
    - `passed_saddle`: a saddle was within 0.1 rad on the way, and left.
    - `status`: a `LimitStatus`.
    """

    direction: np.ndarray
    duals: np.ndarray
    depth: np.ndarray
    rank: np.ndarray
    objective: np.ndarray
    logit_margin: np.ndarray
    parameter_margin: np.ndarray
    kkt_residual: np.ndarray
    verdict: np.ndarray
    structure: np.ndarray
    start_angle: np.ndarray
    angle: np.ndarray
    log_norm: np.ndarray
    passed_saddle: np.ndarray
    status: np.ndarray

    @property
    def certified(self) -> np.ndarray:
        """Whether each limit is certified."""
        return np.asarray(self.status == LimitStatus.CERTIFIED)

    def __getitem__(self, index) -> "Limit":
        """Returns some members of a batch."""
        if self.status.ndim == 0:
            raise IndexError("The limit of one member has no members to choose from.")
        return Limit(*(np.asarray(getattr(self, f.name)[index]) for f in fields(self)))

    def shares(self, confidence: float = 0.95) -> list[Share]:
        """Returns which limits are certified, and how often, the commonest first.

        Limits are alike whose structure, rank, depth and objective (to 1e-8) are.
        Fractions are of all members; what is not certified comes last, by its status.
        """
        flat = self if self.status.ndim else _in_a_batch(self)
        total = len(flat.status)
        kinds = Counter(flat._kind(i) for i in range(total))
        found = []
        for kind, count in sorted(kinds.items(), key=lambda x: (x[0].rank == 0, -x[1])):
            low, high = wilson(count, total, confidence)
            found.append(
                Share(
                    kind.structure,
                    kind.rank,
                    kind.objective,
                    kind.depth if kind.rank else np.nan,
                    count,
                    count / total,
                    low,
                    high,
                )  # fmt: skip
            )
        return found

    def _kind(self, member: int) -> "_Kind":
        if not self.certified[member]:
            status = self.status[member].name.lower()
            return _Kind(f"not certified ({status})", 0, 0.0, 0.0)
        objective = float(f"{self.objective[member]:.8g}")
        depth = float(self.depth[member])
        return _Kind(
            str(self.structure[member]), int(self.rank[member]), objective, depth
        )

    def __str__(self) -> str:
        """Says how many are certified and what they are."""
        if self.status.ndim == 0:
            known = f"{self.structure}, rank {self.rank}, " if self.rank else ""
            return (
                f"{known}{self.status.item().name.lower()}: {self.status.item().value}"
            )
        several = len(set(self.depth.tolist())) > 1
        lines = [f"{int(np.sum(self.certified))} of {len(self.status)} certified"]
        for share in self.shares():
            lines.append(
                f"  {share.count:5d}  {share.fraction:6.1%} "
                f"({share.low:.1%} to {share.high:.1%})  {share.structure}"
                + (f", rank {share.rank}, " if share.rank else "")
                + (f"objective {share.objective:.6g}" if share.rank else "")
                + (f", L = {share.depth:g}" if share.rank and several else "")
            )
        return "\n".join(lines)


def wilson(count: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Returns Wilson's confidence interval of a share of `count` in `total`."""
    interval = scipy.stats.binomtest(count, total).proportion_ci(
        confidence, method="wilson"
    )
    return float(interval.low), float(interval.high)


def _in_a_batch(one: Limit) -> Limit:
    return Limit(*(np.asarray(getattr(one, f.name))[None] for f in fields(one)))


def object_array(items: list) -> np.ndarray:
    """Returns a one-dimensional array of objects, whatever they are."""
    array = np.empty(len(items), object)
    array[:] = items
    return array
