"""From words to objects: options become specs, flows, starts, clocks and stops."""

from typing import TYPE_CHECKING

from ._options import FIGURE_11_STD, Clock, Integration, Solve, Solver, Sweep

if TYPE_CHECKING:
    from ..dynamics import SaveEvery
    from ..sweep import SweepSpec


def sweep_spec(command: Sweep) -> "SweepSpec":
    from ..sweep import GaussianFamily, Grid, SweepSpec, UniformModesFamily

    reduced = command.flow == "reduced"
    options = command.integration
    _check_used(command, reduced)
    if command.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, but is {command.seeds}.")
    first = command.first_seed
    grid = Grid(
        num_classes=whole_numbers("num-classes", command.num_classes),
        # The reduced flow has no width, and n is absorbed in its units.
        per_class=(1,) if reduced else whole_numbers("per-class", command.per_class),
        width=(1,) if reduced else whole_numbers("width", command.width),
        depth=read_numbers("depth", command.depth),
        scale=read_numbers("scale", command.scale),
        seed=tuple(range(first, first + command.seeds)),
    )
    uniform = UniformModesFamily(*command.uniform)
    return SweepSpec(
        grid=grid,
        family=uniform if reduced else GaussianFamily(plain_std=command.plain_std),
        stop=make_stop(options, default_time=1e8),
        clock=make_clock(options.clock),
        solver=make_solver(options.solver),
        rtol=options.rtol,
        max_steps=options.max_steps,
        saves=make_saves(options, command.saves),
    )


def _check_used(command: Sweep, reduced: bool) -> None:
    """Refuses options that the chosen flow has no use for."""
    unused = ("width", "per_class", "plain_std") if reduced else ("uniform",)
    for name in unused:
        if getattr(command, name) != getattr(Sweep(), name):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} means nothing with --flow {command.flow}.")


def make_stop(options: Integration, default_time: float):
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
    return FinalTime(default_time if options.final_time is None else options.final_time)


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
            raise ValueError(f"--{name} takes whole numbers, but got {number:g}.")
    return tuple(int(number) for number in numbers)


def read_numbers(name: str, words: tuple[str, ...]) -> tuple[float, ...]:
    """Reads numbers and inclusive ranges first:last[:step] of whole numbers."""
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


def one_member(command: Solve, classes: int):
    """Returns the flow, the start, and a line that says what they are."""
    import jax
    import jax.numpy as jnp

    from ..dynamics import GradientFlow, HadamardFlow, log_modes
    from ..models import CrossEntropy, gaussian, hadamard
    from ..sweep import Shape, UniformModesFamily

    if command.flow == "reduced":
        for name in ("width", "per_class"):
            if getattr(command, name) != getattr(Solve(), name):
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} means nothing with --flow reduced.")
    if command.start and command.scale is not None:
        raise ValueError("Give either --start or --scale: a start has its own size.")
    if command.start and command.num_classes not in (None, classes):
        raise ValueError(
            f"--start has K-1 values: {len(command.start)} of them say K = {classes}, "
            f"not --num-classes {command.num_classes}."
        )
    key = jax.random.key(command.seed)
    given = jnp.asarray(command.start, float) if command.start else None
    if command.flow == "reduced":
        depth = 2.0 if command.depth is None else command.depth
        flow = HadamardFlow(classes, depth)
        what = f"reduced flow, K = {classes}, L = {depth:g}"
        if given is not None:
            return flow, log_modes(given), f"{what}, given start"
        scale = 1e-3 if command.scale is None else command.scale
        if not 0 < scale < float("inf"):
            raise ValueError(f"--scale must be positive and finite, but is {scale}.")
        shape = Shape(classes, 1, 1, 1)
        sizes = (jnp.asarray(depth), jnp.asarray(1.0), jnp.asarray(scale))
        _, start = UniformModesFamily().member(shape, key, *sizes)
        return flow, start, f"{what}, ‖a(0)‖₁ = {scale:g}, seed {command.seed}"
    depth = 3 if command.depth is None else command.depth
    if not float(depth).is_integer():
        raise ValueError(
            f"--depth must be a whole number for the full flow, but is {depth}. Only "
            "--flow reduced has real depths."
        )
    depth, n, width = int(depth), command.per_class, command.width
    what = f"full flow, K = {classes}, n = {n}, d = {width}, L = {depth}"
    flow = GradientFlow(CrossEntropy(), n)
    if given is not None:
        model = hadamard(key, given, per_class=n, width=width, depth=depth)
        return flow, model, f"{what}, Hadamard start"
    scale, plain = command.scale, command.scale is None
    model = gaussian(
        key,
        num_classes=classes,
        per_class=n,
        width=width,
        depth=depth,
        scale=1.0 if scale is None else scale,
        std=FIGURE_11_STD if plain else None,
    )
    shown = f"std {FIGURE_11_STD:g}" if plain else f"scale {scale:g}"
    return flow, model, f"{what}, {shown}, seed {command.seed}"
