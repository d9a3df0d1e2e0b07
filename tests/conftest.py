"""What every test runs under."""

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
# Their many programs are compiled in half of the time, and round otherwise: where bits are compared over executions, it is as
# users compile.
_QUICKLY = {"xla_backend_optimization_level": 0} | ({"xla_cpu_use_fusion_emitters": False} if _OLDEST else {})
_QUICK = {
    "aggregators",
    "algorithms",
    "attacks",
    "compressors",
    "evaluation",
    "execution",
    "models",
    "test_reproductions",
    "test_examples",
}
_QUICK |= {"test_notebooks", "test_readme", "test_cli", "test_client_memory", "test_identity", "test_loop", "test_personal"}
if not _OLDEST:  # where all else is tested as users run it
    _QUICK = {"algorithms"}

# To cut a program into 32 parts takes two cores longer than it saves. And tracing makes millions of objects that live as long
# as their program: Python looks through them less often.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1".strip()
gc.freeze()
gc.set_threshold(200_000, 50, 1000)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test compiles itself, and what the processes that it starts do."""
    with pytest.MonkeyPatch.context() as patch:
        if _QUICK & {request.path.parent.name, request.path.stem}:
            jax.devices()  # after this the flags are for others
            flags = (f"--{name}={str(value).lower()}" for name, value in _QUICKLY.items())
            patch.setenv("XLA_FLAGS", " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip())
            # Not of what is bound before and may be called within another program, which can't have options of its own.
            patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=_QUICKLY))
            jax.config.update("jax_disable_most_optimizations", True)  # of operations that run one by one
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """A compiled program holds memory and mappings, of which Linux gives a process 65,530: XLA crashes at the last."""
    yield
    if next(_TESTS) % 10 == 0 and _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
