"""Guards of a store: one writer at a time, and disk errors in words.

The lock is a file beside the store (Zarr warns about foreign files inside), held
through the operating system: it goes with the process, however that ends, while the
file itself stays. Readers take no lock.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path as FilePath

from filelock import BaseFileLock, FileLock, Timeout


class StoreError(RuntimeError):
    """A store that cannot be used as it is; the message says what to do about it."""


@contextlib.contextmanager
def disk_errors(path: FilePath, advice: str) -> Iterator[None]:
    """Turns an `OSError` while writing to the store at `path` into a `StoreError`."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error, advice) from error


@contextlib.contextmanager
def claimed(path: FilePath) -> Iterator[BaseFileLock]:
    """Yields the lock of the store at `path`, released only where the body raises.

    **Raises:** `StoreError` where somebody else holds it.
    """
    # Whichever way the path is written, it is one store with one lock.
    full = path.resolve()
    # Cells may be written by another thread than the one that made the store.
    lock = FileLock(full.with_name(f".{full.name}.lock"), thread_local=False)
    claim(lock, path)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def claim(lock: BaseFileLock, path: FilePath) -> None:
    """Takes the lock of the store at `path`, unless this object holds it already."""
    if lock.is_locked:
        return
    try:
        os.makedirs(os.path.dirname(lock.lock_file), exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise StoreError(
            f"Another sweep is writing to {path}. Wait until it has ended (`deepufm "
            f"status {path}` looks on), or choose another --out."
        ) from None
    except OSError as error:
        raise _unwritable(path, error, "Choose another --out.") from error


def _unwritable(path: FilePath, error: OSError, advice: str) -> StoreError:
    reason = error.strerror or str(error) or type(error).__name__
    return StoreError(f"{path} cannot be written: {reason}. {advice}")
