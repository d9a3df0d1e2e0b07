"""Settings for all tests: faster compilation, and less memory for compiled programs."""

import functools
import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

_MAPPINGS = Path("/proc/self/maps")
_TESTS = itertools.count(1)
_OLDEST = jax.__version_info__ < (0, 11)
# With these options the many programs of some tests compile in half of the time, with other rounding errors. Tests that compare
# bits of different executions compile with the options that users have.
_QUICKLY = {"xla_backend_optimization_level": 0} | ({"xla_cpu_use_fusion_emitters": False} if _OLDEST else {})
_QUICK = {
    "aggregators",
    "algorithms",
    "attacks",
    "compressors",
    "decentralized",
    "evaluation",
    "execution",
    "models",
    "test_reproductions",
    "test_examples",
}
_QUICK |= {
    "test_notebooks",
    "test_pages",
    "test_readme",
    "test_cli",
    "test_client_memory",
    "test_identity",
    "test_loop",
    "test_personal",
    "test_plan",
}
if not _OLDEST:  # With this version, all other tests use the options of users.
    _QUICK = {"algorithms"}

# On two cores, splitting a program into 32 parts takes longer than it saves. Tracing creates millions of objects that live as
# long as their program, so the garbage collector runs less often.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1".strip()
gc.freeze()
gc.set_threshold(200_000, 50, 1000)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles quickly in the test and in the processes that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        if _QUICK & {request.path.parent.name, request.path.stem}:
            jax.devices()  # JAX has read the flags; from here on they apply to child processes.
            flags = (f"--{name}={str(value).lower()}" for name, value in _QUICKLY.items())
            patch.setenv("XLA_FLAGS", " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip())
            # Functions that jax.jit wrapped before keep their options, because a program inside another one cannot have any.
            patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=_QUICKLY))
            jax.config.update("jax_disable_most_optimizations", True)  # for operations outside of compiled functions
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """Frees compiled programs before their memory mappings reach Linux's limit of 65,530 per process, where XLA crashes."""
    yield
    if next(_TESTS) % 10 == 0 and _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
