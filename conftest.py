"""Strict numerics, eight virtual devices and an empty cache for every test and doctest."""

import os
import tempfile

import jax

import fedsim

fedsim.use_all_cores(8)
jax.devices()  # JAX starts here: no later call of fedsim.use_all_cores in this process changes the number of devices
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Many tests compile the same small programs; one session's cache, which its workers share, halves its time.
os.environ.setdefault("FEDSIM_TEST_PROGRAMS", tempfile.mkdtemp(prefix="fedsim-tests-"))
jax.config.update("jax_compilation_cache_dir", os.environ["FEDSIM_TEST_PROGRAMS"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
# No test reads or writes the user's own cache.
os.environ["FEDSIM_CACHE"] = tempfile.mkdtemp(prefix="fedsim-tests-cache-")
