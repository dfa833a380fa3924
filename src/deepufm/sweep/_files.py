"""Folders that are, or become, stores: which may be written, and who wrote them."""

import json
import os
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path as FilePath

import jax
import zarr


def check_output(path: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Raises `ValueError` where nothing may be written to `path`, in one line."""
    path = FilePath(path)
    if path.exists():
        if not overwrite:
            raise ValueError(
                f"Output {path} exists already. Choose another with --out, or replace "
                "it with --overwrite."
            )
        picture = path.suffix == ".png" and path.is_file()
        if not picture and not is_store(path):
            raise ValueError(
                f"Output {path} is something that deepufm did not write, and is not "
                "overwritten. Choose another with --out."
            )
    try:
        # Permission bits do not tell for every user and file system; writing does.
        with tempfile.TemporaryFile(dir=_nearest_folder(path.absolute().parent)):
            pass
    except OSError as error:
        raise ValueError(
            f"Output {path} cannot be written ({error.strerror}). Choose another with "
            "--out."
        ) from None


def _nearest_folder(path: FilePath) -> FilePath:
    """Returns the deepest part of a path that exists: where the rest would be made."""
    while not path.exists():
        path = path.parent
    return path


def is_store(path: FilePath, kind: str = "deepufm") -> bool:
    """Whether `path` is a store of ours, of a kind: `deepufm-sweep`, `deepufm-path`."""
    return str(read_attributes(path).get("format", "")).startswith(kind + "-")


def check_is_sweep(path: FilePath) -> None:
    """Raises `ValueError` where there is no sweep of ours at `path`."""
    if is_store(path, "deepufm-path"):
        raise ValueError(
            f"There is no deepufm sweep at {path}, but the one path of a `deepufm "
            "solve`. Open it with xarray.open_zarr."
        )
    if not is_store(path, "deepufm-sweep"):
        raise ValueError(f"There is no deepufm sweep at {path}.")


def read_attributes(path: FilePath) -> dict:
    """Returns the attributes of a Zarr group, as they are; none where it is not one."""
    try:
        attributes = json.loads((path / "zarr.json").read_text())["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return attributes if isinstance(attributes, dict) else {}


def versions() -> dict[str, str]:
    """Returns the versions that numbers may depend on."""
    return {name: version(name) for name in ("deepufm", "jax", "diffrax")}


def provenance() -> dict[str, str]:
    """Returns who writes: attributes of a store."""
    return {"versions": json.dumps(versions()), "device": str(jax.devices()[0])}


def consolidate(path: FilePath) -> None:
    """Gathers a store's metadata in one file."""
    with warnings.catch_warnings():
        # Zarr warns that version 3's specification does not mention it (yet); without
        # it, xarray warns at every plain `open_zarr`.
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path)
