"""What a solve returns: where the flow went, how it ended, and at what cost."""

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._types import RealScalar, State, Tracer


class Outcome(eqx.Enumeration):
    """How a solve ended. Only `reached` means that the stop was met."""

    reached = "The stop was reached."
    step_budget = (
        "The step budget ran out before the stop. Raise `max_steps`, loosen `rtol`, or "
        "use `LogTime` (long times) or `LogNorm` with an implicit solver (the limit). "
        "A flow that has come to rest (MSE, weight decay) is stiff: stop it earlier."
    )
    non_finite = (
        "Every step gave NaN or inf, or an implicit solver could not solve its stages. "
        "Check the start, the stop and the state at `path.final`; in float32 an "
        "implicit solver may need float64."
    )
    step_underflow = (
        "The step shrank until it no longer moved the clock. From starts so small that "
        "their escape is sharper than `LogTime` resolves use `LogNorm` or `ArcLength`; "
        "otherwise float64 or a looser `rtol`."
    )
    not_met = (
        "The clock ran to its horizon and the stop was never met: it lies beyond what "
        "this flow reaches, or the flow is at rest."
    )


class SolveStats(eqx.Module):
    """The cost of a solve. A step of an s-stage method is about s right-hand sides."""

    num_steps: Int[Array, "*batch"]  # tried
    num_accepted: Int[Array, "*batch"]
    num_rejected: Int[Array, "*batch"]


class Path(eqx.Module):
    """An orbit: saved points in order of time, and the state where the solve ended.

    Row 0 is the start. Rows from `num_saved` on were not reached and hold NaN. A
    plateau is no convergence: `outcome` only says whether the stop was met.
    """

    reading: Float[Array, "*batch saves"]  # clock readings s
    log_time: Float[Array, "*batch saves"]  # log of the flow's own time, -inf at start
    state: State | None  # leading axis `saves`, where states were kept
    observables: dict[str, Array]  # leading axis `saves`; integers as floats, for NaN
    num_saved: Int[Array, "*batch"]
    final: State  # the last state reached, whatever the outcome
    final_log_time: RealScalar
    final_reading: RealScalar
    final_observables: dict[str, PyTree]
    outcome: Outcome
    stats: SolveStats

    @property
    def log10_time(self) -> Float[Array, "*batch saves"]:
        """Decimal logarithm of the flow's own time at the saved points."""
        return self.log_time / np.log(10.0)

    def __str__(self) -> str:
        """One line for a path, or for a batch; the fields under `jit`."""
        if isinstance(self.num_saved, Tracer):
            return repr(self)
        counts = {
            name: int(np.sum(np.asarray(self.outcome == getattr(Outcome, name))))
            for name in _OUTCOMES
        }
        names = [name for name, count in counts.items() if count]
        if self.num_saved.ndim:
            shown = ", ".join(f"{counts[name]} {name}" for name in names)
            steps = np.asarray(self.stats.num_steps)
            return (
                f"{self.num_saved.size} paths: {shown}; {np.mean(steps):.6g} steps on "
                f"average, {np.max(steps)} at most"
            )
        time = float(self.final_log_time) / np.log(10.0)
        return (
            f"{names[0]}: log10 t = {time:.6g}, {int(self.stats.num_steps)} steps "
            f"({int(self.stats.num_rejected)} rejected), {int(self.num_saved)} saved"
        )


_OUTCOMES = ("reached", "step_budget", "non_finite", "step_underflow", "not_met")
