"""The benchmarks' tables contain every registered class, and the script for GPUs runs."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import fedsim
from benchmarks import gpu, populations, tables, tpu, workload
from benchmarks.peers import fedsim_catalogue


@pytest.mark.parametrize("catalogue", fedsim_catalogue.CATALOGUES)
def test_every_registered_class_is_measured_and_needs_gradients(catalogue):
    task = workload.Task(model="dense", catalogue=catalogue)
    entries = fedsim_catalogue.CATALOGUES[catalogue](fedsim.models.emnist_dense(), task)
    assert all(entry.step >= 1 and entry.preview >= 0 for entry in entries.values())
    # A refusal would become a row without a time. Equal sizes have the median of the sizes that are measured, about 200.
    data = fedsim.FederatedData.from_arrays(
        {"x": np.zeros([600, 28, 28, 1], np.float32), "y": np.zeros(600, np.int32), "domain": np.arange(600) % 2},
        sizes=[200] * 3,
    )
    with jax.numpy_dtype_promotion("standard"):  # required by optax.adam; conftest.py sets strict promotion
        for entry in entries.values():
            entry.algorithm.check(data)
            if catalogue == "aggregators":  # whose updates are parameters
                entry.algorithm.aggregator.check(jax.eval_shape(entry.algorithm.model.init, jax.random.key(0)), task.clients)


def test_the_error_for_a_registered_class_without_a_row_names_it():
    with pytest.raises(ValueError, match="in no row: FedAvg, FedProx"):
        fedsim_catalogue._check_complete({fedsim.algorithms.FedProx, fedsim.algorithms.FedAvg}, set())


@pytest.mark.slow
def test_the_script_for_gpus_runs_on_a_cpu_and_writes_nothing(capsys):
    written = gpu.RESULT.exists()
    with jax.numpy_dtype_promotion("standard"):  # required by optax.adam; conftest.py sets strict promotion
        logistic, lstm = gpu.main(["--rows", "0", "6"])
    assert (logistic["model"], lstm["model"]) == ("emnist_logistic", "stackoverflow_lstm")
    assert all(row["ms a round"] > 0 and row["clients"] == 2 for row in (logistic, lstm))
    assert "ms a round" in capsys.readouterr().out
    assert gpu.RESULT.exists() == written


def test_the_estimate_of_a_round_is_the_longer_of_two_times():
    row = {"topology": "v5e:2x4", "cohort": 15, "clients": 8, "steps": 3, "flops_of_step": 197e12, "bytes_of_share": 0}
    assert tpu.seconds(row) == 6  # two clients with three steps each
    assert tpu.seconds(row | {"bytes_of_share": 819e9}) == 24


def test_tables_name_measurements_that_exist():
    named = set(re.findall(r'measured\(\s*args, "(\w+)"', Path(tables.__file__).read_text(encoding="utf-8")))
    assert len(named) > 8 and named == set(populations.MEASUREMENTS)
