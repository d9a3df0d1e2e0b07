"""Strict dtype and rank promotion, eight virtual devices, quick compilation and an empty cache for all tests and doctests."""

import builtins
import os
import tempfile
from collections.abc import Iterator

import jax
import pytest

import fedsim

# Without XLA's optimizations, the many small programs of the tests compile in half of the time. On two cores, splitting a
# program into 32 parts takes longer than it saves. Flags that the environment sets take precedence: CONTRIBUTING.md has
# the command that tests with the options of users.
_FLAGS = {"xla_backend_optimization_level": "0", "xla_cpu_parallel_codegen_split_count": "1"}
if jax.__version_info__ < (0, 11):
    _FLAGS["xla_cpu_use_fusion_emitters"] = "false"
_GIVEN = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_GIVEN, *(f"--{name}={value}" for name, value in _FLAGS.items() if name not in _GIVEN)])

fedsim.use_all_cores(8)
jax.devices()  # JAX starts here, so later calls of fedsim.use_all_cores in this process do not change the number of devices.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Many tests compile the same small programs. A cache that the workers of a session share halves its time.
os.environ.setdefault("FEDSIM_TEST_PROGRAMS", tempfile.mkdtemp(prefix="fedsim-tests-"))
jax.config.update("jax_compilation_cache_dir", os.environ["FEDSIM_TEST_PROGRAMS"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
# Tests neither read nor write the user's cache.
os.environ["FEDSIM_CACHE"] = tempfile.mkdtemp(prefix="fedsim-tests-cache-")


@pytest.fixture(autouse=True)
def forget_last_value() -> Iterator[None]:
    """Removes the value that a doctest leaves in ``builtins._``: tyro puts everything there into a set when it is imported."""
    yield
    vars(builtins).pop("_", None)
