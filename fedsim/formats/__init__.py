"""File formats: each is read as a `fedsim.data.ClientStream`, and written from one or from a `FederatedData`."""

from fedsim.formats._fedjax_sqlite import read_fedjax_sqlite as read_fedjax_sqlite
from fedsim.formats._fedjax_sqlite import write_fedjax_sqlite as write_fedjax_sqlite
from fedsim.formats._leaf import read_leaf as read_leaf
from fedsim.formats._leaf import write_leaf as write_leaf
from fedsim.formats._tff_hdf5 import read_tff_hdf5 as read_tff_hdf5
from fedsim.formats._tff_sqlite import read_tff_sqlite as read_tff_sqlite
from fedsim.formats._tff_sqlite import write_tff_sqlite as write_tff_sqlite
