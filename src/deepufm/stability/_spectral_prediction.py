"""How well a Hadamard start predicts the random start whose singular values it has.

P2 (section 6, E.2) puts beside a small Gaussian start its spectral partner: a Hadamard
start with the K-1 largest singular values of the random logits, so that only the
singular vectors differ. The partner follows the reduced flow (P1 eq. 6, P2 eq. 9), in
K-1 numbers; the random start needs the full one. How far apart their spectra get,

    distance(t) = sum_i |σ_i/sum(σ) - a_i/sum(a)|,    both sorted, 0 <= distance <= 2,

is 0 at t = 0, and is the error of that model of a random start. A partner that belongs
to another seed gives the scale: a prediction no nearer than that one has told nothing
about this start.

The spectrum of the random logits is their K-1 largest singular values, those of all
examples (`metrics` has those of class means; once features have collapsed they are the
same). Times are the full flow's own, in natural logarithm; `scale_map` brings
the partner to them.
"""

from dataclasses import dataclass

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._types import RealScalar, State
from ..analysis import effective_rank, kl_from_uniform, singular_values
from ..dynamics import (
    AbstractFlow,
    FinalTime,
    GradientFlow,
    HadamardFlow,
    LogTime,
    Outcome,
    Path,
    scale_map,
)
from ..ensemble import ensemble
from ..models import CrossEntropy, small_gaussian


@dataclass(frozen=True)
class SpectralPrediction:
    """Spectra of random starts and of their partners at common times.

    - `log_time`, (saves,): log t of the full flow; -inf first.
    - `random`, `partner`, (seeds, saves, K-1): singular values over their sum, largest
        first.
    - `random_log_norm`, `partner_log_norm`, (seeds, saves): log of that sum.
    - `random_kl`, `partner_kl`, (seeds, saves): KL(uniform‖spectrum), nats (P2 Thm 3).
        In that of the random logits values below K roundings of the largest count as
        that.
    - `random_rank`, `partner_rank`, (seeds, saves): effective ranks (P1 eq. 60).
    - `reached`, (seeds,): whether both got to the end; other rows end in NaN.
    - `outcome`, (seeds,): how the random starts' solves ended.
    """

    log_time: np.ndarray
    random: np.ndarray
    partner: np.ndarray
    random_log_norm: np.ndarray
    partner_log_norm: np.ndarray
    random_kl: np.ndarray
    partner_kl: np.ndarray
    random_rank: np.ndarray
    partner_rank: np.ndarray
    reached: np.ndarray
    outcome: Outcome

    @property
    def distance(self) -> np.ndarray:
        """L1 distance of each spectrum from its partner's, (seeds, saves), 0 to 2."""
        return np.sum(np.abs(self.random - self.partner), axis=-1)

    @property
    def mismatched(self) -> np.ndarray:
        """Mean distance from the partners of all other seeds, (seeds, saves)."""
        seeds = len(self.random)
        gaps = np.abs(self.random[:, None] - self.partner[None])
        return np.sum(gaps, axis=(1, 3)) / (seeds - 1) - self.distance / (seeds - 1)

    @property
    def sup(self) -> np.ndarray:
        """The largest distance along each orbit, (seeds,)."""
        return np.max(self.distance, axis=1)

    @property
    def final(self) -> np.ndarray:
        """The distance at the last time, (seeds,)."""
        return self.distance[:, -1]


def spectral_prediction(
    num_classes: int,
    depth: int = 1,
    *,
    width: int | None = None,
    per_class: int = 1,
    delta: float = 6.0,
    seeds: int = 10,
    seed: int = 0,
    log_time: float | None = None,
    saves: int = 100,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float | None = None,
    max_steps: int = 100_000,
) -> SpectralPrediction:
    """Follows random starts and their spectral partners, P2 Figs 2, 4 and 5.

    **Arguments:**

    - `num_classes`: K, a power of two; `depth` L.
    - `width`: d >= K, K if `None`; `per_class` n.
    - `delta`: entries of the random start are e^-delta·N(0, 1/K) (`small_gaussian`).
    - `seeds`: how many starts, at least 2; `seed` of all of them.
    - `log_time`: natural log of the last t. If `None`, that of 1e4 times the time a
        start takes to leave the origin, (√K·e^delta)^(L-1).
    - `saves`: times to compare at, equal steps of log(1 + t), the start included.
    - `solver`, of the random starts, `rtol`, `max_steps`: as in `ensemble`. From L = 3
        on random starts rest at saddles of low rank, whose stiffness asks for an
        implicit solver such as `diffrax.Kvaerno5()`.

    **Returns:** a `SpectralPrediction`.

    **Raises:** `ValueError` for K no power of two, d < K, and seeds, saves or times out
    of range.

    !!! example
        study = ufm.spectral_prediction(8, seeds=10)
        print(study.final.mean(), study.final.std(ddof=1), study.mismatched[:, -1])
    """
    if seeds < 2 or saves < 2:
        raise ValueError(
            "Arguments `seeds` and `saves` must be at least 2, but are "
            f"{seeds} and {saves}."
        )
    # Refuses K and L that the partner cannot have, before anything is compiled.
    reduced = HadamardFlow(num_classes, depth)
    if log_time is None:
        escape = (depth - 1) * (0.5 * np.log(num_classes) + delta)
        log_time = float(np.log(1e4) + escape)
    base = jax.random.key(seed)
    keys = [jax.random.fold_in(base, index) for index in range(seeds)]
    models = [
        small_gaussian(
            key, num_classes=num_classes, width=width, per_class=per_class,
            depth=depth, delta=delta,
        )
        for key in keys
    ]  # fmt: skip
    models = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    flow = GradientFlow(CrossEntropy(), per_class)
    full = ensemble(
        flow, None, models, stop=FinalTime(log=log_time), saves=saves,
        observe=_spectrum, keep_states=False, solver=solver, rtol=rtol,
        max_steps=max_steps,
    )  # fmt: skip
    values = full.observables["values"]
    units = scale_map(num_classes, per_class, depth)
    # t'/t0 of this clock is t of the full flow's: equal readings are equal times.
    partner = ensemble(
        reduced, None, jnp.log(values[:, 0]) + units.log_a_factor,
        stop=FinalTime(log=log_time + units.log_time_factor),
        clock=LogTime(jnp.exp(units.log_time_factor)), saves=saves, rtol=rtol,
    )  # fmt: skip
    return _compared(full, partner, values, float(units.log_a_factor))


def _compared(full: Path, partner: Path, values, log_a_factor: float):
    """Returns the study of both ensembles."""
    assert partner.state is not None
    log_a = jnp.flip(jnp.sort(partner.state, axis=-1), axis=-1)
    floor = (values.shape[-1] + 1) * jnp.finfo(values.dtype).eps * values[..., :1]
    log_values = jnp.log(jnp.maximum(values, floor))
    reached = (full.outcome == Outcome.reached) & (partner.outcome == Outcome.reached)
    log_time = np.asarray(full.log_time)
    return SpectralPrediction(
        log_time=log_time[int(np.argmax(np.asarray(full.num_saved)))],
        random=np.asarray(values / jnp.sum(values, axis=-1, keepdims=True)),
        partner=np.asarray(jax.nn.softmax(log_a, axis=-1)),
        random_log_norm=np.asarray(jnp.log(jnp.sum(values, axis=-1))),
        partner_log_norm=np.asarray(jax.nn.logsumexp(log_a, axis=-1)) - log_a_factor,
        random_kl=np.asarray(kl_from_uniform(log_values)),
        partner_kl=np.asarray(kl_from_uniform(log_a)),
        random_rank=np.asarray(effective_rank(values)),
        partner_rank=np.asarray(effective_rank(jax.nn.softmax(log_a, axis=-1))),
        reached=np.asarray(reached),
        outcome=full.outcome,
    )


def _spectrum(
    flow: AbstractFlow, log_time: RealScalar, model: State
) -> dict[str, Array]:
    """Returns the K-1 largest singular values of the logits."""
    del log_time
    assert isinstance(flow, GradientFlow)
    return {"values": singular_values(flow.logits(model))[:-1]}
