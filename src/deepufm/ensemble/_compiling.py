"""How programs of many members are compiled."""

import functools
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
from jaxtyping import PyTree

# What a CPU is asked for. Vectors of 512 bits: XLA prefers 256 even where there are
# longer ones, and half of a reduced flow's time are exponentials. And kernels one after
# the other: they take microseconds, and handing one to another core costs more than it
# (part `ablation` of benchmarks/bench_ensemble.py). In jaxlib 0.8 and later.
_CPU_OPTIONS = {
    "xla_cpu_prefer_vector_width": "512",
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}


def compiler_options(platform: str) -> dict[str, Any] | None:
    """Returns what the compiler is told on a platform, for `jax.jit`."""
    return _CPU_OPTIONS if platform == "cpu" else None


def _call(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    return function(*args)


# Equinox hands on what it does not know to `jax.jit`.
_on_cpu = cast(Any, eqx.filter_jit)(_call, compiler_options=_CPU_OPTIONS)
_elsewhere = eqx.filter_jit(_call)


def compiled(function: Callable[..., PyTree], platform: str) -> Callable[..., PyTree]:
    """Returns `function`, an `equinox.Module` or a plain one, jitted for a platform.

    Not for use under `jit`, where options of the compiler are the outermost's.
    """
    return functools.partial(_on_cpu if platform == "cpu" else _elsewhere, function)
