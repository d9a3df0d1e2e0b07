"""Partitioners: pure functions with a seed that divide examples, clients or features.

Most take labels (or only a number of examples) and return one sorted ``int64`` index array per client, for
`fedsim.FederatedData.from_partition`. `same_shares` divides another split, such as the test examples, by the shares of such a
partition. `split_within_clients`, `held_out_clients`, `rotation`, `noise`, `hide_labels` and `only_labelled` take a population
and return populations, and `vertical` divides features among parties. Unless its "Guarantees" say otherwise, a partitioner
assigns every example to exactly one client, does not change its arguments, and returns the same result for the same arguments.
"""

from fedsim.partitioners._by_column import by_column as by_column
from fedsim.partitioners._classes_per_client import classes_per_client as classes_per_client
from fedsim.partitioners._dirichlet import dirichlet as dirichlet
from fedsim.partitioners._dirichlet_balanced import dirichlet_balanced as dirichlet_balanced
from fedsim.partitioners._feature_shift import noise as noise
from fedsim.partitioners._feature_shift import rotation as rotation
from fedsim.partitioners._held_out_clients import held_out_clients as held_out_clients
from fedsim.partitioners._hidden_labels import hide_labels as hide_labels
from fedsim.partitioners._hidden_labels import only_labelled as only_labelled
from fedsim.partitioners._iid import iid as iid
from fedsim.partitioners._pachinko import pachinko as pachinko
from fedsim.partitioners._quantity_skew import quantity_skew as quantity_skew
from fedsim.partitioners._same_shares import same_shares as same_shares
from fedsim.partitioners._shards import shards as shards
from fedsim.partitioners._split_within_clients import split_within_clients as split_within_clients
from fedsim.partitioners._temporal import temporal as temporal
from fedsim.partitioners._vertical import vertical as vertical
