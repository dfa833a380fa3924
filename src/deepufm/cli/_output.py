"""What commands share: outputs, pictures that may fail alone, and processes."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr


def check_outputs(
    out: Path,
    picture: Path,
    overwrite: bool,
    suffixes: tuple[str, ...] = (".nc", ".csv"),
) -> None:
    """Refuses outputs before anything is computed.

    **Raises:** `ValueError` for another suffix, or a file that exists or cannot be
    replaced.
    """
    from ..sweep import check_output

    if out.suffix not in suffixes:
        raise ValueError(f"--out must end in {' or '.join(suffixes)}, but is {out}.")
    if not out.parent.is_dir():
        raise ValueError(f"the folder of --out, {out.parent}, does not exist.")
    if not (overwrite and out.is_file()):
        check_output(out, overwrite=overwrite)
    check_output(picture, overwrite=overwrite)


def write_dataset(dataset: "xr.Dataset", out: Path, but: tuple[str, ...] = ()) -> None:
    """Writes NetCDF, or for .csv a table without the dimensions `but`; says where.

    **Raises:** `ValueError` where it cannot be written.
    """
    try:
        if out.suffix == ".csv":
            table = dataset.drop_dims(but).to_dataframe()
            table.to_csv(out, float_format="%.16g")
        else:
            # The engine that SciPy brings: no library of NetCDF is needed.
            dataset.to_netcdf(out, engine="scipy")
    except OSError as error:
        raise ValueError(
            f"Output {out} cannot be written ({error.strerror or error})."
        ) from None
    reader = "pandas.read_csv" if out.suffix == ".csv" else "xarray.open_dataset"
    print(f"results  {out}  ({reader})")


def draw(picture: Path, figure: Callable[[Path], object], kept: str) -> None:
    """Writes a picture and says where it is.

    **Raises:** `ValueError` where it cannot be written; `kept` says what is not lost.
    """
    try:
        figure(picture)
    except OSError as error:
        raise ValueError(
            f"the picture {picture} cannot be written ({error.strerror}); {kept}."
        ) from error
    print(f"picture  {picture}")


@contextmanager
def processes(workers: int | None, tasks: int) -> Iterator[Executor | None]:
    """Yields processes to share the work, or None where one is enough.

    **Raises:** `ValueError` for fewer workers than 1.
    """
    from ..ensemble import available_cores

    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, but is {workers}.")
    workers = min(workers or available_cores(), tasks)
    if workers <= 1:
        yield None
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # JAX has threads, which a fork would not survive.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
