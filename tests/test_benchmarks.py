"""The benchmarks' tables over whole registries hold all of them."""

import pytest

import fedsim
from benchmarks import workload
from benchmarks.peers import fedsim_catalogue


@pytest.mark.parametrize("catalogue", fedsim_catalogue.CATALOGUES)
def test_everything_registered_is_measured_and_needs_some_gradients(catalogue):
    task = workload.Task(model="dense", catalogue=catalogue)
    entries = fedsim_catalogue.CATALOGUES[catalogue](fedsim.models.emnist_dense(), task)
    assert all(entry.step >= 1 and entry.look >= 0 for entry in entries.values())


def test_what_is_registered_and_in_no_row_is_named():
    with pytest.raises(ValueError, match="is registered: FedAvg, FedProx"):
        fedsim_catalogue._complete({fedsim.algorithms.FedProx, fedsim.algorithms.FedAvg}, set())
