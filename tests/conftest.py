"""Settings for all tests: less garbage collection, and less memory for compiled programs."""

import collections
import gc
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from fedsim.execution import _compile

_MAPPINGS = Path("/proc/self/maps")
_TESTS = itertools.count(1)

# Tracing creates millions of objects that live as long as their program, so the garbage collector runs less often.
gc.freeze()
gc.set_threshold(200_000, 50, 1000)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes the cases of a test slow that its marker ``first(count)`` leaves out; it counts those that are not slow already."""
    seen = collections.Counter[str]()
    for item in items:
        if (marker := item.get_closest_marker("first")) and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > marker.args[0]:
                item.add_marker("slow")


def pytest_runtest_setup() -> None:
    """Skips what is left when the time is over that .ci/run gives to slow tests, for machines of any speed."""
    if time.time() > float(os.environ.get("FEDSIM_TESTS_UNTIL", "inf")):
        pytest.skip("no time was left for this test: FEDSIM_TESTS_UNTIL")


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """Frees compiled programs before their memory mappings reach Linux's limit of 65,530 per process, where XLA crashes."""
    yield
    if next(_TESTS) % 10 == 0 and _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        _compile._executables.clear()
        gc.collect()  # An algorithm and its programs refer to each other.
