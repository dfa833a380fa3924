"""Settings every test runs under; the package itself changes no global setting."""

import gc
import os

# Before NumPy is loaded: two workers on two cores have no use for threads of BLAS, that
# wait by spinning and make small linear algebra five times as dear.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

# Tracing makes millions of small objects: looking for cycles among them, again and
# again, is a twentieth of the suite's time.
gc.set_threshold(100_000, 50, 50)

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

with install_import_hook("deepufm", "beartype.beartype"):
    import deepufm  # noqa: F401


# A minute or more in few tests: last, one of two workers would wait for the other.
LONG_FILES = ("test_notebooks.py", "test_readme.py", "test_cli.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


@pytest.fixture(scope="session")
def key():
    return jax.random.key(0)


@pytest.fixture
def unhooked():
    """Without jaxtyping's checks, which users do not have: our own messages show."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
