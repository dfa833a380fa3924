"""What stands in a store: quantities, their dimensions and meanings, and outcomes."""

import numpy as np

from .._types import State
from ..dynamics import AbstractFlow, GradientFlow, HadamardFlow, Outcome, Path
from ..limits import is_plain, mean_logits
from ..models import DeepUFM

# Codes of `outcome` in a store; 0 is what a chunk that was never written reads as.
OUTCOMES = (
    "missing", "reached", "step_budget", "non_finite", "step_underflow", "not_met",
)  # fmt: skip

# Units and meanings, for axes of plots and for readers without the source.
_LONG_NAMES = {
    "log_time": "natural logarithm of the flow's time",
    "effective_rank": "effective rank of the logits (P1 eq. 60)",
    "mean_effective_rank": "effective rank of the class-mean logits (P1 eq. 60)",
    "kl": "KL divergence from collapse (P1 eq. 52)",
    "log_loss": "natural logarithm of the loss",
    "log_norm": "natural logarithm of the norm",
    "logit_margin": "smallest margin of Z/‖Z‖ (P1 Fig. 3)",
    "nuclear_norm": "sum of the logit singular values",
    "singular_values": "logit singular values",
    "uniform_distance": "M of P2 eq. 12",
    "etf_distance": "M of P1 eq. 61",
    "log_modes": "natural logarithms of the modes a",
    "class_means": "class means of the logits",
}
# Inner dimensions of states; other quantities are numbers, or singular values.
_STATES = {"final_log_modes": ["mode"], "final_class_means": ["logit", "class"]}


def outcome_code(outcome: Outcome) -> np.ndarray:
    """Returns the store's code of an outcome, an int8."""
    code = 0
    for index, name in enumerate(OUTCOMES[1:], start=1):
        code = np.where(np.asarray(outcome == getattr(Outcome, name)), index, code)
    return np.asarray(code, np.int8)


def quantities(path: Path) -> dict[str, np.ndarray]:
    """Returns what a store keeps of a path: rows over saves, finals, outcome, cost."""
    kept = {"log_time": path.log_time, **path.observables}
    kept |= {f"final_{name}": value for name, value in path.final_observables.items()}
    kept |= {
        "final_log_time": path.final_log_time,
        "num_saved": path.num_saved,
        "num_steps": path.stats.num_steps,
        "num_rejected": path.stats.num_rejected,
        "outcome": outcome_code(path.outcome),
    }
    return {name: np.asarray(value) for name, value in kept.items()}


def late_states(flow: AbstractFlow, state: State) -> dict[str, np.ndarray]:
    """Returns what `limit` needs to follow members on, members first, if it can be.

    Of the reduced flow log a, (members, K-1); of the linear full flow of cross-entropy
    with classes of one size the class means of the logits, (members, K, K).
    """
    if isinstance(flow, HadamardFlow):
        return {"final_log_modes": np.asarray(state)}
    if not (isinstance(flow, GradientFlow) and is_plain(flow)):
        return {}
    assert isinstance(state, DeepUFM)
    assert isinstance(flow.per_class, int)
    return {"final_class_means": mean_logits(state, flow.per_class)}


def attributes(name: str) -> dict:
    """Returns the meaning of a variable; CF flags for the outcome."""
    base = name.removeprefix("final_")
    meaning: dict = {"long_name": _LONG_NAMES.get(base, base.replace("_", " "))}
    if name == "outcome":
        meaning["flag_values"] = list(range(len(OUTCOMES)))
        meaning["flag_meanings"] = " ".join(OUTCOMES)
    return meaning


def inner_dimensions(name: str, count: int) -> list[str]:
    """Names the dimensions after `seed`."""
    if name in _STATES:
        return _STATES[name]
    mode = ["mode"] if name.endswith("singular_values") else []
    save = [] if count == len(mode) else ["save"]
    return save + mode
