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
from fedsim.planning import collectives_in

# `make test-all` installs the compiler in a separate folder, because JAX looks for a TPU if it finds the compiler.
COMPILER = Path(os.environ.get("TPU_LIBRARY_PATH", Path(sys.prefix) / "tpu-compiler" / "libtpu" / "libtpu.so"))
DECODER = dict(vocabulary=1024, length=64, width=256, layers=2, heads=4, hidden=704, tied=True)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILER.exists(), reason="needs libtpu, which make test-all installs")]

_COMPILE = """
import json, sys
import numpy as np, optax
import fedsim

model = fedsim.models.get(sys.argv[1]) if sys.argv[1] != "decoder" else fedsim.models.decoder(**json.loads(sys.argv[3]))
draw = np.random.default_rng(0)
columns = {}
for name, column in model.dummy_examples(400).items():
    top = 255 if column.dtype == np.uint8 else model.num_classes or 2
    columns[name] = draw.integers(0, top, column.shape).astype(column.dtype)
data = fedsim.FederatedData.from_arrays(columns, sizes=[10] * 40)
devices = fedsim.execution.described_tpus("v5e:2x4")
settings = dict(
    model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), execution=fedsim.Pmap(devices=devices)
)
if sys.argv[2] == "Sharded":
    settings["execution"] = fedsim.Sharded(devices=devices, clients=2, model=4)
if sys.argv[2] != "DPSGD":
    algorithm = fedsim.algorithms.FedAvg(**settings)
else:
    algorithm = fedsim.decentralized.DPSGD(**settings, topology=fedsim.decentralized.ring(40))
cohort = fedsim.UniformSampler(data, clients=16, seed=0).cohort(0)
compiled = algorithm.execution.lower(algorithm, cohort).compile()
memory = compiled.memory_analysis()
found = {"text": compiled.as_text(), "bytes": memory.temp_size_in_bytes, "output": memory.output_size_in_bytes}
print(json.dumps({"devices": len(devices), **found}))
"""


def output_of(*command):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "TPU_LIBRARY_PATH": str(COMPILER)}
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return run.stdout


def compiled(model, algorithm):
    return json.loads(output_of("-c", _COMPILE, model, algorithm, json.dumps(DECODER)))


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


def test_only_the_all_reduce_of_a_round_is_between_clients_that_four_tpus_each_train():
    found = collectives_in(compiled("decoder", "Sharded")["text"])
    between = [each for each in found if each.between(4)]
    assert {(each.kind, each.in_loop) for each in between} == {("all-reduce", False)}
    assert any(each.in_loop for each in found)  # within a client
    leaves = jax.tree.leaves(jax.eval_shape(fedsim.models.decoder(**DECODER).init, jax.random.key(0)))
    share = 4 * sum(leaf.size for leaf in leaves) / 4  # bytes on each of four chips
    assert share <= sum(each.bytes for each in between) < 1.01 * share  # with the entries of the round's info


def test_a_plan_for_tpus_needs_none():
    options = ["--dataset", "digits(clients=20)", "--model", "digits_dense", "--mesh", "clients=4, model=2"]
    text = output_of("-m", "fedsim", "plan", *options, "--tpu", "v5e:2x4")
    assert "on 8 TPU devices" in text and "with 17.2 GB in each" in text
    assert re.search(r"collectives .* all-reduce", text) and "time            unknown" in text
