"""A spec in words: one fact a line, all that its results depend on, to the last digit.

It is what `deepufm status` prints, and what `SweepStore.resume` compares: two specs
whose descriptions agree give the same numbers.
"""

import dataclasses
import enum
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._spec import AXES, SweepSpec

# Below it, whole floats are shown as integers: 100000, and not 100000.0.
_LARGEST_WHOLE = 1e15


def describe(spec: SweepSpec) -> str:
    """Returns a spec as text: a line a fact, names and values in two columns."""
    facts = dict(_spec_facts(spec))
    width = max(map(len, facts)) + 2
    return "\n".join(f"{name:{width}}{value}" for name, value in facts.items())


def differences(was: str, now: str) -> list[str]:
    """Returns the facts in which two descriptions differ, as `rtol: 1 then, 2 now`."""
    old, new = _read(was), _read(now)
    return [
        f"{name}: {old.get(name, 'absent')} then, {new.get(name, 'absent')} now"
        for name in old | new
        if old.get(name) != new.get(name)
    ]


def _read(description: str) -> dict[str, str]:
    # The columns are two blanks or more apart, and no name has two in a row.
    lines = (re.split(r" {2,}", line, maxsplit=1) for line in description.splitlines())
    return {name: "".join(value) for name, *value in lines}


def _spec_facts(spec: SweepSpec) -> Iterator[tuple[str, str]]:
    for axis in (*AXES, "seed"):
        unread = axis != "seed" and axis not in spec.family.axes
        note = " (means nothing here)" if unread else ""
        yield _words(axis), _sequence(spec.grid.values(axis)) + note
    for name in ("family", "stop", "clock"):
        yield from _facts(name, getattr(spec, name))
    for name in ("solver", "rtol"):
        value = getattr(spec, name)
        yield from _facts(name, "default" if value is None else value)
    yield from _facts("max steps", spec.max_steps)
    yield from _facts("saves", spec.saves)
    yield "precision", jnp.zeros(()).dtype.name


def _facts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields a value under its name, and what it is made of under longer ones."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield name, type(value).__qualname__
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            yield from _facts(f"{name} {_words(field.name)}", part)
    elif isinstance(value, Mapping):
        yield name, type(value).__qualname__
        for key, part in value.items():
            yield from _facts(f"{name} {key}", part)
    elif isinstance(value, (tuple, list)) and not all(map(_is_plain, value)):
        yield name, f"{len(value)} parts"
        for index, part in enumerate(value):
            yield from _facts(f"{name} {index}", part)
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, numbers.Real):
        return _number(value)
    if isinstance(value, (jax.Array, np.ndarray)):
        return _array(np.asarray(value))
    if isinstance(value, (tuple, list)):
        return _sequence(value)
    if isinstance(value, str):
        return value if value.isprintable() else repr(value)
    if callable(value) and hasattr(value, "__qualname__"):
        # Not the repr, whose address changes from process to process.
        return f"{value.__module__}.{value.__qualname__}"
    return " ".join(repr(value).split())


def _is_plain(value: Any) -> bool:
    return isinstance(value, (numbers.Real, np.bool_, str))


def _number(value: Any) -> str:
    """Returns the shortest text that reads back as the same number."""
    if isinstance(value, numbers.Integral):
        return str(int(value))
    # By way of `str`: 0.1 in float32 is 0.1, and not 0.10000000149.
    real = float(str(value))
    whole = real.is_integer() and abs(real) < _LARGEST_WHOLE
    return str(int(real)) if whole else repr(real)


def _array(array: np.ndarray) -> str:
    if array.ndim == 0:
        return _text(array[()])
    shape = "" if array.ndim == 1 else f" in shape {_sequence(array.shape)}"
    return _sequence(list(array.ravel())) + shape


def _sequence(values: Iterable[Any]) -> str:
    """Returns values in their order, four or more consecutive whole numbers as a range.

    `(1, 2, 3, 4, 8)` is `1 to 4 8`.
    """
    runs: list[list[Any]] = []
    for value in values:
        if runs and _follows(runs[-1][-1], value):
            runs[-1].append(value)
        else:
            runs.append([value])
    shown = [
        f"{_text(run[0])} to {_text(run[-1])}"
        if len(run) > 3
        else " ".join(map(_text, run))
        for run in runs
    ]
    return " ".join(shown) or "none"


def _follows(first: Any, second: Any) -> bool:
    def is_whole(value: Any) -> bool:
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return number and float(value).is_integer()

    return is_whole(first) and is_whole(second) and first + 1 == second


def _words(name: str) -> str:
    return name.strip("_").replace("_", " ")
