"""From words to objects: options become specs, flows, starts, clocks and stops."""

from typing import TYPE_CHECKING

from ._families import check_axes, default_time, make_family
from ._options import Clock, Integration, Solve, Solver, Sweep

if TYPE_CHECKING:
    import pandas as pd

    from ..dynamics import SaveEvery
    from ..sweep import SweepSpec

# Of `--descent-step`: an hour of a small model.
_MOST_UPDATES = 1e8


def sweep_spec(command: Sweep) -> "SweepSpec":
    from ..sweep import Grid, SweepSpec

    options, model = command.integration, command.model
    family = make_family(model)
    check_axes(command, family)
    if command.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, but is {command.seeds}.")
    first = command.first_seed

    def axis(name: str, read):
        """The values of an axis that the family reads; one that means nothing else."""
        return read(name, getattr(command, name)) if name in family.axes else (1,)

    sizes, words = model.class_sizes, command.num_classes
    if sizes and words == Sweep().num_classes:
        words = (str(len(sizes)),)  # class sizes say K
    grid = Grid(
        num_classes=whole_numbers("num_classes", words),
        per_class=axis("per_class", whole_numbers),
        width=axis("width", whole_numbers),
        depth=axis("depth", read_numbers),
        scale=read_numbers("scale", command.scale),
        seed=tuple(range(first, first + command.seeds)),
    )
    return SweepSpec(
        grid=grid,
        family=family,
        stop=make_stop(options, default_time(model, 1e8)),
        clock=make_clock(options.clock),
        solver=make_solver(options.solver),
        rtol=options.rtol,
        max_steps=options.max_steps,
        saves=make_saves(options, command.saves),
    )


def make_stop(options: Integration, default_time: float | None):
    from ..dynamics import FinalNorm, FinalTime, LogLossBelow

    given = [
        name
        for name in ("final_time", "log_final_time", "final_norm", "log_loss")
        if getattr(options, name) is not None
    ]
    if len(given) > 1:
        shown = " and ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"Give one stop, not {shown}.")
    if options.log_final_time is not None:
        return FinalTime(log=options.log_final_time)
    if options.final_norm is not None:
        return FinalNorm(options.final_norm)
    if options.log_loss is not None:
        return LogLossBelow(options.log_loss)
    if options.final_time is not None:
        return FinalTime(options.final_time)
    if default_time is None:
        raise ValueError(
            "This flow comes to rest (mse, linearised, weight decay for ever), after a "
            "time that depends on the start: say when to stop, with --final-time."
        )
    return FinalTime(default_time)


def make_clock(name: Clock):
    from .. import dynamics

    return {
        "log-time": dynamics.LogTime,
        "physical-time": dynamics.PhysicalTime,
        "arc-length": dynamics.ArcLength,
        "log-norm": dynamics.LogNorm,
    }[name]()


def make_solver(name: Solver):
    if name == "auto":
        return None
    import diffrax

    return getattr(diffrax, name.capitalize())()


def make_saves(options: Integration, count: int) -> "int | SaveEvery":
    from ..dynamics import SaveEvery

    if options.save_every is None:
        return count
    return SaveEvery(options.save_every, count)


def whole_numbers(name: str, words: tuple[str, ...]) -> tuple[int, ...]:
    numbers = read_numbers(name, words)
    for number in numbers:
        if not float(number).is_integer():
            option = name.replace("_", "-")
            raise ValueError(f"--{option} takes whole numbers, but got {number:g}.")
    return tuple(int(number) for number in numbers)


def read_numbers(name: str, words: tuple[str, ...]) -> tuple[float, ...]:
    """Reads numbers and inclusive ranges first:last[:step] of whole numbers."""
    name = name.replace("_", "-")
    numbers: list[float] = []
    for word in words:
        parts = word.split(":")
        try:
            if len(parts) == 1:
                value = float(word)
                numbers.append(int(value) if value.is_integer() else value)
            else:
                first, last, *step = map(int, parts)
                (step,) = step or [1]
                if not (values := range(first, last + (1 if step > 0 else -1), step)):
                    raise ValueError(word)
                numbers += values
        except (ValueError, OverflowError):
            raise ValueError(
                f"--{name} takes numbers and ranges such as 1:10 or 10:1:-3, but got "
                f"{word!r}."
            ) from None
    return tuple(numbers)


def check_comparison(command: Solve, flow) -> None:
    """Raises `ValueError` where --descent-step compares nothing, or without end."""
    step, time = command.descent_step, command.integration.final_time
    if step is None:
        return
    from ..dynamics import GradientFlow

    if not isinstance(flow, GradientFlow) or flow.weight_decay is not None:
        raise ValueError("--descent-step compares the full flow without weight decay.")
    if time is None or not 0 < step <= time <= _MOST_UPDATES * step:
        raise ValueError(
            "--descent-step needs a --final-time of at least one step and at most "
            f"{_MOST_UPDATES:g} steps."
        )


def compare(command: Solve, flow, start) -> "pd.DataFrame":
    """Returns how far --descent-step's descent is from the flow, a row a doubling."""
    import numpy as np
    import pandas as pd

    from ..dynamics import compare_with_flow

    step, time = command.descent_step, command.integration.final_time
    assert step is not None
    assert time is not None
    gap = compare_with_flow(
        start,
        flow.loss,
        step,
        round(time / step),
        per_class=flow.per_class,
        activation=flow.activation,
    )
    return pd.DataFrame(
        {
            "update": np.asarray(gap.step),
            "time": step * np.asarray(gap.step),
            "parameters off": np.asarray(gap.parameter_distance),
            "logits off": np.asarray(gap.logit_distance),
        }
    )
