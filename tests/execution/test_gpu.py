"""Tests that need a GPU; skipped without one."""

import os
import subprocess
import sys

import jax
import pytest

_TRAINS = """
import hashlib
import jax, numpy as np, optax
import fedsim

draws = np.random.default_rng(0)
columns = {"x": draws.integers(0, 256, (1200, 28, 28, 1), np.uint8), "y": draws.integers(0, 10, 1200, np.int32)}
data = fedsim.FederatedData.from_arrays(columns, sizes=[60] * 20)
batches = fedsim.Batches(size=20)
algorithm = fedsim.algorithms.FedAvg(model=fedsim.models.mnist_cnn(), client_optimizer=optax.sgd(0.05), batches=batches)
state = algorithm.init(jax.random.key(0))
for cohort in fedsim.UniformSampler(data, clients=5, seed=0).rounds(3):
    state, _ = algorithm.apply(state, cohort)
print(hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state.params))).hexdigest())
print(fedsim.evaluate(algorithm.model, state.params, data).overall["loss"])
"""


def _gpus() -> list[jax.Device]:
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


@pytest.mark.skipif(not _gpus(), reason="needs a GPU")
def test_a_seed_repeats_a_run_bit_for_bit_in_another_process():
    """Each process chooses the fastest implementation of a product, and these differ in the order of sums."""
    # A shared compilation cache would share that choice, and the flags of these tests are for CPUs.
    ours = {"JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS"}
    env = {name: value for name, value in os.environ.items() if name not in ours} | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    of_each = [subprocess.run([sys.executable, "-c", _TRAINS], capture_output=True, text=True, env=env) for _ in range(3)]
    assert not any(run.returncode for run in of_each), [run.stderr for run in of_each]
    assert len({run.stdout for run in of_each}) == 1, [run.stdout for run in of_each]
