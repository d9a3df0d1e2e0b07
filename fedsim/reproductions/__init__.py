"""Reproductions of published experiments: `fedsim reproduce NAME` prints the paper's results next to those of fedsim.

There is one file per paper. A `Reproduction` consists of cases, which can be run one at a time. Each case returns rows,
which are written to a JSON file together with the machine, the date, the versions and all settings. The results are in
docs/reproductions.md.
"""

from fedsim.names import look_up
from fedsim.reproductions._afl_adult import AFL_ADULT
from fedsim.reproductions._attacks_and_defenses import ATTACKS_AND_DEFENSES
from fedsim.reproductions._compression_femnist import COMPRESSION
from fedsim.reproductions._curve import Curve as Curve
from fedsim.reproductions._curve import rounds_to_target as rounds_to_target
from fedsim.reproductions._curve import train as train
from fedsim.reproductions._data_parallel import DATA_PARALLEL
from fedsim.reproductions._diloco import DILOCO
from fedsim.reproductions._dp_ftrl_femnist import DP_FTRL_FEMNIST
from fedsim.reproductions._dropped_messages import DROPPED_MESSAGES
from fedsim.reproductions._fedavg_mnist import FEDAVG
from fedsim.reproductions._fedem_emnist import FEDEM_EMNIST
from fedsim.reproductions._fedprox_stragglers import FEDPROX
from fedsim.reproductions._few_labels import FEW_LABELS
from fedsim.reproductions._flute_mnist import FLUTE_MNIST
from fedsim.reproductions._flute_shakespeare import FLUTE_SHAKESPEARE
from fedsim.reproductions._four_ways import FOUR_WAYS
from fedsim.reproductions._niid_mnist import NIID_MNIST
from fedsim.reproductions._nmse_and_bytes import NMSE_AND_BYTES
from fedsim.reproductions._opacus_mnist import OPACUS_MNIST
from fedsim.reproductions._personalization_femnist import PERSONALIZATION
from fedsim.reproductions._qffl_fairness import QFFL
from fedsim.reproductions._random_quadratics import RANDOM_QUADRATICS
from fedsim.reproductions._record import read as read
from fedsim.reproductions._record import reproduce as reproduce
from fedsim.reproductions._record import select_cases as select_cases
from fedsim.reproductions._reproduction import Extent as Extent
from fedsim.reproductions._reproduction import Reproduction as Reproduction
from fedsim.reproductions._reproduction import Request as Request
from fedsim.reproductions._reproduction import Row as Row
from fedsim.reproductions._robustness_femnist import ROBUSTNESS
from fedsim.reproductions._scaffold_emnist import SCAFFOLD_EMNIST
from fedsim.reproductions._scaffold_quadratics import SCAFFOLD_QUADRATICS
from fedsim.reproductions._secagg_cost import SECAGG_COST
from fedsim.reproductions._tables import markdown_table as markdown_table
from fedsim.reproductions._tables import text_table as text_table
from fedsim.reproductions._tff_dp_digits import TFF_DP_DIGITS
from fedsim.reproductions._transfer import TRANSFER
from fedsim.reproductions._unus_dssgd import UNUS_DSSGD
from fedsim.reproductions._unus_faults import UNUS_FAULTS
from fedsim.reproductions._unus_fedavg import UNUS_FEDAVG
from fedsim.reproductions._unus_peers import UNUS_PEERS
from fedsim.reproductions._unus_staleness import UNUS_STALENESS
from fedsim.reproductions._vertical import VERTICAL

REPRODUCTIONS: dict[str, Reproduction] = {
    each.name: each
    for each in (
        FEDAVG,
        FEDPROX,
        QFFL,
        SCAFFOLD_EMNIST,
        NIID_MNIST,
        PERSONALIZATION,
        FEDEM_EMNIST,
        COMPRESSION,
        ROBUSTNESS,
        UNUS_FEDAVG,
        UNUS_DSSGD,
        UNUS_STALENESS,
        UNUS_FAULTS,
        UNUS_PEERS,
        RANDOM_QUADRATICS,
        DROPPED_MESSAGES,
        FOUR_WAYS,
        DATA_PARALLEL,
        DILOCO,
        VERTICAL,
        FEW_LABELS,
        TRANSFER,
        ATTACKS_AND_DEFENSES,
        OPACUS_MNIST,
        DP_FTRL_FEMNIST,
        TFF_DP_DIGITS,
        SECAGG_COST,
        NMSE_AND_BYTES,
        SCAFFOLD_QUADRATICS,
        FLUTE_MNIST,
        FLUTE_SHAKESPEARE,
        AFL_ADULT,
    )
}


def get(name: str) -> Reproduction:
    """Returns the reproduction with this name.

    Raises:
      ValueError: there is no such reproduction; the message has the most similar names.

    >>> get("fedavgg")
    Traceback (most recent call last):
    ...
    ValueError: There is no reproduction 'fedavgg'. Did you mean 'fedavg' or 'unus_fedavg'?
    """
    return look_up("reproduction", name, REPRODUCTIONS)
