"""Settings every test runs under; the package itself changes no global setting."""

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

with install_import_hook("deepufm", "beartype.beartype"):
    import deepufm  # noqa: F401


@pytest.fixture(scope="session")
def key():
    return jax.random.key(0)
