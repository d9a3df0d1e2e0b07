"""Federated data: populations of clients, streams of clients, single clients, batches and cohorts."""

from fedsim.data._batching import Batch as Batch
from fedsim.data._batching import Batches as Batches
from fedsim.data._client_rows import ClientRows as ClientRows
from fedsim.data._client_rows import is_rows as is_rows
from fedsim.data._cohort import Arrivals as Arrivals
from fedsim.data._cohort import Cohort as Cohort
from fedsim.data._errors import FormatError as FormatError
from fedsim.data._federated_data import ClientDataset as ClientDataset
from fedsim.data._federated_data import FederatedData as FederatedData
from fedsim.data._identity import client_ids_hash as client_ids_hash
from fedsim.data._identity import population_identity as population_identity
from fedsim.data._stream import ClientStream as ClientStream
from fedsim.data._text_column import TextColumn as TextColumn
