"""What commands share: pictures that may fail alone, and processes for the work."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path


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
