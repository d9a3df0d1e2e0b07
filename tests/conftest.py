"""What every test runs under."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

_MAPPINGS = Path("/proc/self/maps")
_TESTS = itertools.count(1)


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """A compiled program holds mappings of memory, of which Linux gives a process 65,530: XLA crashes at the last."""
    yield
    if next(_TESTS) % 10 == 0 and _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
