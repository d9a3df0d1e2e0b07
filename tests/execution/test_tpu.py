"""Compiles rounds for a TPU v5e 2x4, which needs no TPU."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import fedsim

# `make test-all` installs the compiler in a separate folder, because JAX looks for a TPU if it finds the compiler.
COMPILER = Path(sys.prefix) / "tpu-compiler"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILER.exists(), reason="needs libtpu, which make test-all installs")]

_COMPILE = """
import json, sys
import jax, numpy as np, optax
from jax.experimental import topologies
import fedsim

model = fedsim.models.get(sys.argv[1])
draw = np.random.default_rng(0)
columns = {}
for name, column in model.dummy_examples(400).items():
    top = 255 if column.dtype == np.uint8 else model.num_classes or 2
    columns[name] = draw.integers(0, top, column.shape).astype(column.dtype)
data = fedsim.FederatedData.from_arrays(columns, sizes=[10] * 40)
devices = topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
settings = dict(
    model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), execution=fedsim.Pmap(devices=devices)
)
if sys.argv[2] == "FedAvg":
    algorithm = fedsim.algorithms.FedAvg(**settings)
else:
    algorithm = fedsim.decentralized.DPSGD(**settings, topology=fedsim.decentralized.ring(40))
cohort = fedsim.UniformSampler(data, clients=16, seed=0).cohort(0)
compiled = algorithm.execution.lower(algorithm, cohort).compile()
memory = compiled.memory_analysis()
found = {"text": compiled.as_text(), "bytes": memory.temp_size_in_bytes, "output": memory.output_size_in_bytes}
print(json.dumps({"devices": len(devices), **found}))
"""


def compiled(model, algorithm):
    # Otherwise libtpu looks for a TPU on this machine and for other processes that use it.
    alone = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env = {**os.environ, **alone, "XLA_FLAGS": "", "PYTHONPATH": str(COMPILER)}
    run = subprocess.run([sys.executable, "-c", _COMPILE, model, algorithm], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("model", ["emnist_dense", "emnist_cnn", "stackoverflow_lstm"])
def test_a_round_is_compiled_for_eight_tpus_with_one_all_reduce(model):
    found = compiled(model, "FedAvg")
    assert found["devices"] == 8
    assert len(re.findall(r" all-reduce(?:-start)?\(", found["text"])) == 1
    assert not re.search(r" all-gather(?:-start)?\(", found["text"])
    assert 0 < found["bytes"] < 16 * 2**30  # the memory of a v5e


def test_each_of_eight_tpus_has_the_models_of_its_nodes_and_sends_two():
    found, model = compiled("emnist_dense", "DPSGD"), fedsim.models.emnist_dense()
    leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    size = sum(4 * math.prod(leaf.shape) for leaf in leaves)
    assert 5 * size <= found["output"] < 6 * size  # of 40 models, in tiles
    assert len(re.findall(r" collective-permute(?:-start)?\(", found["text"])) == 2
    assert not re.search(r" all-gather(?:-start)?\(", found["text"])
