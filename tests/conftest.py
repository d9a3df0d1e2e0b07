"""What every test runs under."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """A compiled program holds mappings of memory, of which Linux gives a process 65,530: XLA crashes at the last."""
    yield
    jax.clear_caches()
