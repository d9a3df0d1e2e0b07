"""Partitioners: seeded pure functions that divide examples, clients or features.

Most go from labels (or only their number) to one sorted ``int64`` index array per client, for
`fedsim.FederatedData.from_partition`; `held_out_clients`, `rotation` and `noise` go from a population to populations, and
`vertical` from features to parties. Unless its "Guarantees" say otherwise, a partitioner gives every example to exactly one
client, does not change its arguments, and gives the same answer for the same arguments.
"""

from fedsim.partitioners._by_column import by_column as by_column
from fedsim.partitioners._classes_per_client import classes_per_client as classes_per_client
from fedsim.partitioners._dirichlet import dirichlet as dirichlet
from fedsim.partitioners._dirichlet_balanced import dirichlet_balanced as dirichlet_balanced
from fedsim.partitioners._feature_shift import noise as noise
from fedsim.partitioners._feature_shift import rotation as rotation
from fedsim.partitioners._held_out_clients import held_out_clients as held_out_clients
from fedsim.partitioners._iid import iid as iid
from fedsim.partitioners._pachinko import pachinko as pachinko
from fedsim.partitioners._quantity_skew import quantity_skew as quantity_skew
from fedsim.partitioners._shards import shards as shards
from fedsim.partitioners._temporal import temporal as temporal
from fedsim.partitioners._vertical import vertical as vertical
