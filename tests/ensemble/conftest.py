"""What the tests of `ensemble` share."""

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def two_cores():
    """Two shares in two threads, on machines of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
        yield
