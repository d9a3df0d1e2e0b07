"""Federated data: packed populations, one client's dataset, batches, cohorts, file formats."""

from fedsim.data._batching import Batch as Batch
from fedsim.data._batching import Batches as Batches
from fedsim.data._cohort import Cohort as Cohort
from fedsim.data._federated_data import ClientDataset as ClientDataset
from fedsim.data._federated_data import FederatedData as FederatedData
from fedsim.data._hdf5 import read_tff_hdf5 as read_tff_hdf5
