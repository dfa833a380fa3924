"""What can be asked on the command line. Attribute docstrings are the help texts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

Clock = Literal["log-time", "physical-time", "arc-length", "log-norm"]
Values = Annotated[tuple[str, ...], tyro.conf.arg(metavar="VALUE [VALUE ...]")]
# The help texts say what stands in for a value; "(default: None)" would not.
_REAL = tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")
_WHOLE = tyro.conf.arg(metavar="INT", help_behavior_hint="")
MaybeReal = Annotated[float | None, _REAL]
MaybeWhole = Annotated[int | None, _WHOLE]
MaybePath = Annotated[
    Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")
]
Reals = Annotated[tuple[float, ...], tyro.conf.arg(help_behavior_hint="")]
Wholes = Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="")]
Solver = Literal["auto", "tsit5", "dopri5", "dopri8", "kvaerno3", "kvaerno5"]
Flow = Literal["full", "reduced", "layerwise", "logits", "reduced-logits"]
Loss = Literal["cross-entropy", "mse", "linearised"]
Init = Literal[
    "gaussian", "orthogonal", "partner", "simplex-etf", "cross-polytope", "polygon"
]


# P1 App. E.4: entries of the random start that Figure 11 shows.
FIGURE_11_STD = 0.03


@dataclass(frozen=True)
class Integration:
    """How members are integrated, and when they are done."""

    final_time: MaybeReal = None
    """Stop at this time t of the flow. [without any stop: 1e8 (sweep), 1e10 (solve);
    flows that come to rest have no default]"""
    log_final_time: MaybeReal = None
    """Stop at this natural logarithm of t, for times no float holds (2303: 1e1000)."""
    final_norm: MaybeReal = None
    """Stop at this norm: Frobenius, of all parameters (full, layerwise) or of the
    logits, or the sum of the modes (reduced)."""
    log_loss: MaybeReal = None
    """Stop when the natural logarithm of the loss has fallen to this."""
    clock: Clock = "log-time"
    """What steps are taken in. log-time: to t of about 1e1000; log-norm: beyond that,
    towards the limit."""
    solver: Solver = "auto"
    """ODE solver; auto takes the one that the benchmarks found best for the clock."""
    rtol: MaybeReal = None
    """Relative error allowed in a step. [default: 1e-7 (full), 1e-6 (full with relu),
    1e-8 (others); 1e-5 in float32]"""
    max_steps: int = 100_000
    """Steps after which a member is given up (outcome step_budget)."""
    save_every: MaybeReal = None
    """Save at this step of the clock, where its end is not known in advance: any stop
    but a time on log-time and physical-time, or a norm on log-norm (reduced flow)."""
    dtype: Literal["float64", "float32"] = "float64"
    """Precision. float32 is for GPUs and quick looks."""


@dataclass(frozen=True)
class Model:
    """What is trained, on which loss, and from where."""

    flow: Flow = "full"
    """full: all matrices. reduced: K-1 singular values under Hadamard initialisation.
    layerwise: those of every layer, unbalanced. logits: the logit matrix itself.
    reduced-logits: its singular values."""
    loss: Loss = "cross-entropy"
    """mse: half the squared error (reduced: its independent modes). linearised: near
    the origin, where modes are independent (reduced)."""
    activation: Literal["none", "relu"] = "none"
    """What stands between the layers (full flow)."""
    negative_slope: float = 0.0
    """Slope of the relu below zero (leaky)."""
    weight_decay: float = 0.0
    """Add -lambda*theta to the flow (full)."""
    decay_until: MaybeReal = None
    """Switch the weight decay off at this time of the flow."""
    class_sizes: Wholes = ()
    """The K class sizes, where they are not all n (full, logits)."""
    bottleneck: bool = False
    """Allow widths d < K (full)."""
    init: Init = "gaussian"
    """Start of the full flow. gaussian: entries scale*N(0, 1/d). orthogonal: all
    singular values of every layer are scale. partner: Hadamard, with the singular
    values of the gaussian one. Or near a structure; its logits have Frobenius norm
    scale."""
    perturbation: float = 0.0
    """Gaussian noise in every layer of a structure, relative to the layer."""
    plain_std: bool = False
    """Take the scale as the standard deviation of every Gaussian entry itself."""
    uniform: tuple[float, float] = (0.0, 1.0)
    """Interval that singular values are drawn from, then scaled to a sum of scale
    (reduced, layerwise, reduced-logits)."""


@dataclass(frozen=True)
class Sweep:
    """Run a grid of deep unconstrained features models to the end, and plot the result.

    Without options: Figure 2 of "The Implicit Bias of Depth" at full size. K = 10
    classes, n = 5 examples each, width 100, depths 1 to 10, five seeds, entries
    N(0, 1/d), gradient flow to t = 1e8; takes about half a minute on two cores.

    Every axis takes several values, and whole numbers also ranges (1:10 is 1 to 10,
    1:9:2 the odd ones). All combinations are run, and written to one Zarr store that
    xarray.open_zarr reads, with a PNG beside it.

    For instance:
      deepufm sweep

      deepufm sweep --depth 1:8 --width 50 100 200 --seeds 10 --out widths.zarr

      deepufm sweep --flow reduced --num-classes 16 --depth 1:8 --scale 1e-3 --seeds 100

      deepufm sweep --depth 3 --scale 0.1 0.3 1 --log-final-time 700

      deepufm sweep --activation relu --class-sizes 9 5 3 1 --width 20
    """

    num_classes: Values = ("10",)
    """Numbers of classes K. The reduced flow needs powers of two."""
    per_class: Values = ("5",)
    """Examples per class n (not for reduced flows of cross-entropy)."""
    width: Values = ("100",)
    """Widths d >= K of every layer (full flow)."""
    depth: Values = ("1:10",)
    """Depths L (not for logits); the reduced flow takes real ones >= 1."""
    scale: Values = ("1",)
    """Scales of the start: entries are scale*N(0, 1/d) (full), the 1-norm of a(0)
    (reduced, layerwise), entries scale*N(0, 1) (logits)."""
    seeds: int = 5
    """Number of seeds per grid point."""
    first_seed: int = 0
    """The first of them; the others follow."""
    model: Annotated[Model, tyro.conf.arg(name="")] = field(default_factory=Model)
    integration: Annotated[Integration, tyro.conf.arg(name="")] = field(
        default_factory=Integration
    )
    saves: int = 25
    """Points saved along every orbit, equal steps of the clock, start and end included
    (with --save-every: at most this many)."""
    out: Path = Path("deepufm-sweep.zarr")
    """Where to write; the picture goes beside it, with the suffix .png."""
    overwrite: bool = False
    """Replace an existing output."""
    resume: bool = False
    """Go on with the store that an interrupted run of the same options left: finished
    grid points are not computed again."""
    workers: MaybeWhole = None
    """Batches of grid points run at once. [default: one per core]"""
    compilation_cache: MaybePath = None
    """Keep compiled programs in this folder: the same sweep, or one that differs only
    in seeds, depths and scales, then starts sooner. It grows without bound, serves one
    version of JAX and one kind of processor, and is best deleted after an update."""


@dataclass(frozen=True)
class Solve:
    """Integrate one model, and plot singular values, norm and KL against log t.

    Without options: the setting of Figure 11 of "The Implicit Bias of Depth" (K = 10,
    n = 5, d = 100, L = 3, entries of standard deviation 0.03) to t = 1e10. With
    --flow reduced, that of Figure 4 (K = 16, L = 2, ‖a(0)‖_1 = 1e-3).

    For instance:
      deepufm solve

      deepufm solve --flow reduced

      deepufm solve --flow reduced --depth 1 --start 1 1 1 1 .001 .001 .001

      deepufm solve --flow reduced --clock log-norm --final-norm 1e6

      deepufm solve --width 10 --depth 10 --scale 1 --weight-decay .05 --decay-until 320

      deepufm solve --flow logits --loss mse --final-time 20
    """

    num_classes: MaybeWhole = None
    """Classes K. [default: 10 (full, logits), 16 (others)]"""
    per_class: int = 5
    """Examples per class n (not for reduced flows of cross-entropy)."""
    width: int = 100
    """Width d >= K (full flow)."""
    depth: MaybeReal = None
    """Depth L. [default: 3 (full), 2 (reduced, layerwise)]"""
    scale: MaybeReal = None
    """Size of the start, as --init and --uniform say. [default: 1e-3; for a Gaussian
    start entries of standard deviation 0.03; 1 for other matrices]"""
    start: Reals = ()
    """The initial singular values themselves instead of random ones: a(0) of the
    reduced flows, or the logit singular values of a balanced Hadamard start (full,
    layerwise)."""
    alternating: Annotated[
        tuple[float, float] | None, tyro.conf.arg(metavar="G D", help_behavior_hint="")
    ] = None
    """The start (G, D, G, ..., D, G) instead, between collapse (G = D) and the
    cross-polytope (D = 0): eq. 49 of the paper."""
    seed: int = 0
    """Seed of the random start."""
    descent_step: MaybeReal = None
    """Also run plain gradient descent with this step on the summed loss to the same
    --final-time, and print how far from the flow it is (full flow)."""
    model: Annotated[Model, tyro.conf.arg(name="")] = field(default_factory=Model)
    integration: Annotated[Integration, tyro.conf.arg(name="")] = field(
        default_factory=Integration
    )
    saves: int = 200
    """Points saved, equal steps of the clock (with --save-every: at most this many)."""
    out: Path = Path("deepufm-solve.zarr")
    """Where to write the orbit; the picture goes beside it, with the suffix .png."""
    overwrite: bool = False
    """Replace an existing output."""


@dataclass(frozen=True)
class Status:
    """Say how far a sweep has come: what it is, what is done, and how members ended.

    For instance:
      deepufm status deepufm-sweep.zarr
    """

    store: Annotated[Path, tyro.conf.Positional]
    """A store that `deepufm sweep` writes, or wrote."""


@dataclass(frozen=True)
class Show:
    """Print the table of a sweep, finished or not, and draw its picture again.

    For instance:
      deepufm show widths.zarr
    """

    store: Annotated[Path, tyro.conf.Positional]
    """A store that `deepufm sweep` wrote."""
    picture: Path | None = None
    """Where to draw; None is beside the store, with the suffix .png."""
