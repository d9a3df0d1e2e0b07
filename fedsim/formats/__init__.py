"""File formats of federated data.

Readers return a `fedsim.data.ClientStream`; writers take a `ClientStream` or a `FederatedData`.
Tables (CSV, Parquet) and TensorFlow Datasets need the extra ``formats``: ``pip install "fedsim-jax[formats]"``.
"""

from fedsim.formats._convert import convert as convert
from fedsim.formats._convert import read as read
from fedsim.formats._convert import recognize as recognize
from fedsim.formats._fedjax_sqlite import read_fedjax_sqlite as read_fedjax_sqlite
from fedsim.formats._fedjax_sqlite import write_fedjax_sqlite as write_fedjax_sqlite
from fedsim.formats._huggingface import read_huggingface as read_huggingface
from fedsim.formats._idx import read_idx as read_idx
from fedsim.formats._json_lines import read_json_lines as read_json_lines
from fedsim.formats._leaf import read_leaf as read_leaf
from fedsim.formats._leaf import write_leaf as write_leaf
from fedsim.formats._rows import Rows as Rows
from fedsim.formats._rows import is_data_file as is_data_file
from fedsim.formats._rows import read_rows as read_rows
from fedsim.formats._table import read_table as read_table
from fedsim.formats._table import write_table as write_table
from fedsim.formats._tfds import arrays_from_tfds as arrays_from_tfds
from fedsim.formats._tfds import read_tfds as read_tfds
from fedsim.formats._tff_hdf5 import read_tff_hdf5 as read_tff_hdf5
from fedsim.formats._tff_hdf5 import write_tff_hdf5 as write_tff_hdf5
from fedsim.formats._tff_sqlite import read_tff_sqlite as read_tff_sqlite
from fedsim.formats._tff_sqlite import write_tff_sqlite as write_tff_sqlite
