"""What every test runs under."""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

_MAPPINGS = Path("/proc/self/maps")
_TESTS = itertools.count(1)
# Their many programs are compiled in half of the time, and round otherwise: where bits are compared, it is as users compile.
_QUICKLY = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
_QUICK = {"aggregators", "algorithms", "attacks", "compressors", "execution", "models", "test_reproductions", "test_examples"}


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only on the oldest JAX: the newest is tested as users run it."""
    with pytest.MonkeyPatch.context() as patch:
        if _QUICK & {request.path.parent.name, request.path.stem} and jax.__version_info__ < (0, 11):
            patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=_QUICKLY))
            jax.config.update("jax_disable_most_optimizations", True)  # of operations that run one by one
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """A compiled program holds memory and mappings, of which Linux gives a process 65,530: XLA crashes at the last."""
    yield
    if next(_TESTS) % 10 == 0 and _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > 16_000:
        jax.clear_caches()
