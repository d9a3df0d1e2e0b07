"""File formats: each is read as a `fedsim.data.ClientStream`."""

from fedsim.formats._tff_hdf5 import read_tff_hdf5 as read_tff_hdf5
from fedsim.formats._tff_hdf5 import write_tff_hdf5 as write_tff_hdf5
