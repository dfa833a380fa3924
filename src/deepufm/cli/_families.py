"""From the words of `Model` to families, and from a family to one member."""

from dataclasses import fields
from typing import TYPE_CHECKING

from ._options import FIGURE_11_STD, Model, Solve

if TYPE_CHECKING:
    from ..dynamics import AbstractFlow
    from ..sweep import Family

_MATRIX_STARTS = ("gaussian", "orthogonal", "partner")
_STRUCTURES = ("simplex-etf", "cross-polytope", "polygon")

# Which options of `Model` each flow reads, besides `flow` and `loss`.
_READ = {
    "full": {
        "activation", "negative_slope", "weight_decay", "decay_until", "class_sizes",
        "bottleneck", "init", "perturbation", "plain_std",
    },
    "reduced": {"uniform"},
    "layerwise": {"uniform"},
    "logits": {"class_sizes"},
    "reduced-logits": {"uniform"},
}  # fmt: skip
_LOSSES = {
    "full": ("cross-entropy", "mse"),
    "reduced": ("cross-entropy", "mse", "linearised"),
    "layerwise": ("cross-entropy", "mse"),
    "logits": ("cross-entropy", "mse"),
    "reduced-logits": ("cross-entropy",),
}


def make_family(model: Model, *, plain_std: bool | None = None) -> "Family":
    """Returns the family that the options describe.

    **Arguments:** `plain_std` in place of the option's, where a default asks for it.
    """
    check_model(model)
    from .. import sweep

    plain_std = model.plain_std if plain_std is None else plain_std
    squared = model.loss == "mse"
    if model.flow == "reduced":
        if squared:
            return sweep.MSEModesFamily(*model.uniform)
        linearised = model.loss == "linearised"
        return sweep.UniformModesFamily(*model.uniform, linearised=linearised)
    if model.flow == "layerwise":
        return sweep.LayerwiseFamily(*model.uniform, squared_error=squared)
    if model.flow == "reduced-logits":
        return sweep.LogitModesFamily(*model.uniform)
    from ..models import MSE, CrossEntropy, ReLU, Structure

    loss, relu = MSE() if squared else CrossEntropy(), model.activation == "relu"
    if model.flow == "logits":
        return sweep.LogitMatrixFamily(loss=loss, class_sizes=model.class_sizes)
    common = {
        "loss": loss,
        "activation": ReLU(model.negative_slope) if relu else None,
        "weight_decay": model.weight_decay,
        "decay_until": model.decay_until,
        "class_sizes": model.class_sizes,
        "bottleneck": model.bottleneck,
    }
    if model.init == "gaussian":
        return sweep.GaussianFamily(plain_std=plain_std, **common)
    if model.init == "partner":
        return sweep.PartnerFamily(plain_std=plain_std, **common)
    if model.init == "orthogonal":
        return sweep.OrthogonalFamily(**common)
    return sweep.StructureFamily(
        structure=Structure(model.init), perturbation=model.perturbation, **common
    )


def check_model(model: Model) -> None:
    """Refuses options that mean nothing together."""
    if model.loss not in _LOSSES[model.flow]:
        raise ValueError(
            f"--loss {model.loss} means nothing with --flow {model.flow}, which has "
            + " and ".join(_LOSSES[model.flow])
            + "."
        )
    read = _READ[model.flow]
    for field in fields(Model):
        if field.name in ("flow", "loss") or field.name in read:
            continue
        if getattr(model, field.name) != field.default:
            option = "--" + field.name.replace("_", "-")
            raise ValueError(f"{option} means nothing with --flow {model.flow}.")
    if model.negative_slope and model.activation != "relu":
        raise ValueError("--negative-slope means nothing without --activation relu.")
    if model.perturbation and model.init not in _STRUCTURES:
        raise ValueError(f"--perturbation means nothing with --init {model.init}.")
    if model.plain_std and model.init not in ("gaussian", "partner"):
        raise ValueError(f"--plain-std means nothing with --init {model.init}.")
    decay = model.weight_decay
    if not 0 <= decay < float("inf"):
        raise ValueError(
            f"--weight-decay must be finite and at least 0, but is {decay}."
        )
    if model.decay_until is not None and not model.weight_decay > 0:
        raise ValueError("--decay-until needs a positive --weight-decay.")
    linear = model.init in ("partner", *_STRUCTURES)
    if model.activation != "none" and linear:
        raise ValueError(
            f"--init {model.init} builds the logits of linear layers: it means nothing "
            f"with --activation {model.activation}."
        )


def check_axes(command, family: "Family") -> None:
    """Refuses axes that the family does not read."""
    for name in ("width", "per_class", "depth"):
        if name in family.axes or getattr(command, name) == _default(command, name):
            continue
        option = "--" + name.replace("_", "-")
        sizes = " with --class-sizes" if command.model.class_sizes else ""
        raise ValueError(
            f"{option} means nothing with --flow {command.model.flow}{sizes}."
        )


def _default(command, name: str):
    return next(f.default for f in fields(type(command)) if f.name == name)


def default_time(model: Model, otherwise: float) -> float | None:
    """Returns when to stop unasked; `None` for flows that come to rest on the way.

    How long they take depends on the start, and going on from there is costly.
    """
    for_ever = model.weight_decay and model.decay_until is None
    rests = model.loss in ("mse", "linearised") or for_ever
    return None if rests else otherwise


def one_member(command: Solve) -> "tuple[AbstractFlow, object, str]":
    """Returns the flow, the start, and a line that says what they are."""
    import jax
    import jax.numpy as jnp

    from ..sweep import Shape

    model = command.model
    figure_11 = model.init == "gaussian" and command.scale is None
    plain = True if model.flow == "full" and figure_11 else None
    family = make_family(model, plain_std=plain)
    check_axes(command, family)
    classes = _num_classes(command)
    depth = command.depth
    if depth is None:
        depth = 3.0 if model.flow == "full" else 2.0
    if "depth" not in family.axes:
        depth = 1.0
    width = command.width if "width" in family.axes else 1
    family.check(classes, width, depth)
    per_class = command.per_class if "per_class" in family.axes else 1
    sized = "depth" in (*family.padded, *family.exact)
    shape = Shape(classes, per_class, width, int(depth) if sized else 1)
    scale = _scale(command, plain is True)
    key = jax.random.key(command.seed)
    sizes = (jnp.asarray(float(depth)), jnp.asarray(float(width)), jnp.asarray(scale))
    flow, start = family.member(shape, key, *sizes)
    what = _what(command, family, shape, depth)
    given = _given_modes(command, classes)
    if given is not None:
        return (
            flow,
            _given_start(command, key, shape, depth, given),
            (f"{what}, given start"),
        )
    return (
        flow,
        start,
        f"{what}, {_size(model, plain is True)} {scale:g}, " + (f"seed {command.seed}"),
    )


def _num_classes(command: Solve) -> int:
    """Returns K from whichever options say it."""
    model = command.model
    said: dict[str, int] = {}
    if command.num_classes is not None:
        said["--num-classes"] = command.num_classes
    if command.start:
        squared = model.loss == "mse"
        said["--start"] = len(command.start) + (not squared)
    if model.class_sizes:
        said["--class-sizes"] = len(model.class_sizes)
    if len(set(said.values())) > 1:
        shown = " and ".join(f"{option} says {k}" for option, k in said.items())
        raise ValueError(f"The number of classes is not one: {shown}.")
    if said:
        return next(iter(said.values()))
    needs_power = model.flow not in ("full", "logits") or model.init == "partner"
    return 16 if needs_power else 10


def _scale(command: Solve, plain: bool) -> float:
    given = command.start or command.alternating is not None
    if given and command.scale is not None:
        raise ValueError("Give either --start or --scale: a start has its own size.")
    scale = command.scale
    if scale is None:
        modes = command.model.flow not in ("full", "logits")
        scale = FIGURE_11_STD if plain else 1e-3 if modes else 1.0
    if not 0 < scale < float("inf"):
        raise ValueError(f"--scale must be positive and finite, but is {scale}.")
    return scale


def _given_modes(command: Solve, classes: int):
    """Returns the singular values of --start or --alternating, if either is given."""
    import jax.numpy as jnp

    from ..models import alternating_modes

    if command.alternating is None:
        return jnp.asarray(command.start, float) if command.start else None
    if command.start:
        raise ValueError("Give either --start or --alternating, not both.")
    return alternating_modes(classes, *command.alternating)


def _given_start(command: Solve, key, shape, depth, given):
    """Returns the state whose logit singular values are the given ones."""
    from ..dynamics import log_modes
    from ..models import hadamard, layer_modes

    model = command.model
    if model.flow == "reduced":
        return log_modes(given)
    if model.flow == "reduced-logits":
        return given
    if model.flow == "layerwise":
        return layer_modes(given, int(depth))
    other = model.class_sizes or model.init != "gaussian" or model.activation != "none"
    if model.flow == "logits" or other:
        raise ValueError(
            "--start gives the singular values of a Hadamard start: of the full flow "
            "with linear layers, classes of one size and no other --init, or of the "
            "flows of modes."
        )
    return hadamard(
        key, given, per_class=shape.per_class, width=shape.width, depth=shape.depth
    )


def _size(model: Model, plain: bool) -> str:
    """Names what the scale is the size of."""
    if model.flow == "logits" or (model.flow == "full" and model.init in _STRUCTURES):
        return "Z(0) of size"
    if model.flow != "full":
        return "‖a(0)‖₁ ="
    return "std" if plain or model.plain_std else "scale"


def describe_model(model: Model) -> str:
    """Says what is trained where it is not the default, for titles."""
    parts = [f"{model.flow} flow"]
    if model.loss != "cross-entropy":
        parts[0] += f" ({model.loss})"
    if model.class_sizes:
        parts.append(f"sizes {' '.join(map(str, model.class_sizes))}")
    if model.activation != "none":
        slope = f" ({model.negative_slope:g})" if model.negative_slope else ""
        parts.append(model.activation + slope)
    if model.weight_decay:
        until = "" if model.decay_until is None else f" to t = {model.decay_until:g}"
        parts.append(f"λ = {model.weight_decay:g}{until}")
    if model.init != "gaussian":
        noise = f" + {model.perturbation:g}" if model.perturbation else ""
        parts.append(model.init + noise)
    if model.uniform != (0.0, 1.0):
        parts.append("U[{:g}, {:g}]".format(*model.uniform))
    return ", ".join(parts)


def _what(command: Solve, family: "Family", shape, depth) -> str:
    """Says what is solved, for the title and the store."""
    parts = [describe_model(command.model), f"K = {shape.num_classes}"]
    if "per_class" in family.axes:
        parts.append(f"n = {shape.per_class}")
    if "width" in family.axes:
        parts.append(f"d = {shape.width}")
    if "depth" in family.axes:
        parts.append(f"L = {depth:g}")
    return ", ".join(parts)
