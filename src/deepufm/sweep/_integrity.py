"""Chunks as files, and which cells of a store are whole.

A chunk is one file, `NAME/c.i.j.k.l.m.0...`: little-endian numbers and then their
CRC-32C (Zarr's codecs `bytes` and `crc32c`). No chunk of a cell that was written is
left out, not even one of NaN, so a file that is missing, cut short or altered is told
from data. Chunks are written and checked as files: through Zarr each takes 1 to 2 ms,
ten times as long and more.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import google_crc32c
import numpy as np
import zarr
from zarr.codecs import Crc32cCodec

from ._files import check_is_sweep, read_attributes
from ._spec import AXES

# The first one had no checksums.
FORMAT = "deepufm-sweep-2"

Index = tuple[int, ...]

# How arrays are stored: one file a chunk, in one folder, as the six nested ones that
# are Zarr's default cost more than the numbers; not compressed, as the digits of
# floats hardly can be.
CHUNKS: Any = {
    "chunk_key_encoding": {"name": "default", "separator": "."},
    "compressors": (Crc32cCodec(),),
}
_CHECKSUM_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Fault:
    """A cell whose members are done, by their outcome, and whose data are not whole.

    Or an array that all cells need, such as a coordinate: `index` is then empty.
    """

    index: Index  # along `AXES`
    array: str
    reason: str  # "missing", "damaged", or "unreadable" as a whole


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What is done and whole in a store, and what is not."""

    done: frozenset[Index]  # cells that are whole and all of whose outcomes are known
    faults: tuple[Fault, ...]  # the first of each damaged cell
    codes: dict[Index, np.ndarray]  # outcomes of cells that are whole, or known in part
    attributes: dict[str, Any]  # of the store


def inspect_sweep(path: str | os.PathLike) -> Inspection:
    """Reads all of a store, and says what is done and what is damaged.

    **Raises:** `ValueError` where there is no sweep of ours at `path`, or an earlier
    version wrote it, without checksums.
    """
    path = FilePath(path)
    check_is_sweep(path)
    attributes = read_attributes(path)
    if attributes["format"] != FORMAT:
        raise ValueError(
            f"The sweep at {path} was written by an earlier deepufm, which kept no "
            "checksums. Only `deepufm show` reads it."
        )
    found = inspect_arrays(path)
    shared = tuple(
        Fault((), name, "unreadable")
        for name in (*AXES, "seed", "outcome")
        if not is_sound(path, name)
    )
    return dataclasses.replace(found, faults=shared + found.faults)


def locate(path: str | os.PathLike, fault: Fault) -> str:
    """Returns a fault in words: `depth=2: array kl is missing`."""
    path = FilePath(path)
    places = []
    for axis, place in zip(AXES, fault.index):  # none for what all cells share
        if not is_sound(path, axis):
            places.append(f"{axis} number {place}")
            continue
        array = zarr.open_array(path / axis, mode="r")
        assert isinstance(array, zarr.Array)
        values = np.asarray(array[...])
        if values.size > 1:
            places.append(f"{axis}={values[place]:g}")
    where = f"{', '.join(places)}: " if places else ""
    return f"{where}array {fault.array} is {fault.reason}"


def inspect_arrays(
    path: FilePath, *, trusted: frozenset[Index] = frozenset()
) -> Inspection:
    """Reads every chunk of the cells that are done, those `trusted` apart."""
    attributes = read_attributes(path)
    ranks = {name: array_rank(path, name) for name in attributes["arrays"]}
    done, faults, codes = set(), [], {}
    for index in sorted(written_cells(path)):
        outcome = read_chunk(chunk_file(path, "outcome", index, len(AXES) + 1))
        if outcome is None:  # a writer is just replacing the cell
            continue
        if not outcome:
            faults.append(Fault(index, "outcome", "damaged"))
            continue
        codes[index] = np.frombuffer(outcome, np.int8)
        if not codes[index].all():
            continue
        fault = None if index in trusted else _first_fault(path, ranks, index)
        if fault is None:
            done.add(index)
        else:
            faults.append(fault)
            del codes[index]
    return Inspection(frozenset(done), tuple(faults), codes, attributes)


def _first_fault(
    path: FilePath, ranks: dict[str, int | None], index: Index
) -> Fault | None:
    for name, rank in ranks.items():
        if rank is None:
            return Fault(index, name, "unreadable")
        chunk = read_chunk(chunk_file(path, name, index, rank))
        if not chunk:
            return Fault(index, name, "missing" if chunk is None else "damaged")
    return None


def written_cells(path: FilePath) -> Iterator[Index]:
    """Yields the cells that have an outcome, sound or not, in any order."""
    if array_rank(path, "outcome") is None:
        return
    for name in os.listdir(path / "outcome"):
        first, *places = name.split(".")
        # Others: zarr.json, and what a killed process was just writing (*.partial).
        if first == "c" and len(places) == len(AXES) + 1 and places[-1] == "0":
            yield tuple(map(int, places[:-1]))


def chunk_file(path: FilePath, name: str, index: Index, rank: int) -> str:
    """Returns the file of a cell's chunk in an array of `rank` dimensions."""
    places = [*map(str, index), *["0"] * (rank - len(index))]
    # Joined by hand: a path object costs as much as reading the file.
    return f"{path}/{name}/c.{'.'.join(places)}"


def read_chunk(file: str) -> bytes | None:
    """Returns a chunk's bytes, empty where they are not as written; None without."""
    try:
        with open(file, "rb", buffering=0) as stream:
            content = stream.read()
    except FileNotFoundError:
        return None
    except OSError:  # a bad block, say
        return b""
    data, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    sound = google_crc32c.value(data) == int.from_bytes(checksum, "little")
    return data if sound else b""


def write_chunk(file: str, values: np.ndarray) -> None:
    """Writes a chunk, under another name first: no reader sees a part of it."""
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    checksum = google_crc32c.value(data).to_bytes(_CHECKSUM_BYTES, "little")
    partial = f"{file}.partial"
    try:
        with open(partial, "wb") as stream:
            stream.write(data + checksum)
        os.replace(partial, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def array_rank(path: FilePath, name: str) -> int | None:
    """Returns how many dimensions an array has; None where it cannot be opened."""
    try:
        return len(json.loads((path / name / "zarr.json").read_text())["shape"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_sound(path: FilePath, name: str) -> bool:
    """Whether a coordinate, one chunk, can be read, or the array of outcomes opened."""
    if array_rank(path, name) is None:
        return False
    return name == "outcome" or bool(read_chunk(chunk_file(path, name, (), 1)))
