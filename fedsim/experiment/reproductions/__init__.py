"""Published experiments, run again: `fedsim reproduce NAME` prints paper | ours | seeds | time.

One paper a file. A `Reproduction` is made of cases, which can be run one at a time; each gives rows, which go to a JSON file
with the machine, the date, the versions and all settings. Committed results: docs/reproductions.md.
"""

from fedsim.experiment.reproductions._compression_femnist import COMPRESSION
from fedsim.experiment.reproductions._curve import Curve as Curve
from fedsim.experiment.reproductions._curve import rounds_to_target as rounds_to_target
from fedsim.experiment.reproductions._curve import train as train
from fedsim.experiment.reproductions._fedavg_mnist import FEDAVG
from fedsim.experiment.reproductions._fedprox_stragglers import FEDPROX
from fedsim.experiment.reproductions._personalization_femnist import PERSONALIZATION
from fedsim.experiment.reproductions._qffl_fairness import QFFL
from fedsim.experiment.reproductions._record import chosen as chosen
from fedsim.experiment.reproductions._record import read as read
from fedsim.experiment.reproductions._record import reproduce as reproduce
from fedsim.experiment.reproductions._reproduction import Plan as Plan
from fedsim.experiment.reproductions._reproduction import Reproduction as Reproduction
from fedsim.experiment.reproductions._reproduction import Request as Request
from fedsim.experiment.reproductions._reproduction import Row as Row
from fedsim.experiment.reproductions._robustness_femnist import ROBUSTNESS
from fedsim.experiment.reproductions._scaffold_emnist import SCAFFOLD_EMNIST
from fedsim.experiment.reproductions._tables import markdown_table as markdown_table
from fedsim.experiment.reproductions._tables import text_table as text_table
from fedsim.names import look_up

REPRODUCTIONS: dict[str, Reproduction] = {
    each.name: each for each in (FEDAVG, FEDPROX, QFFL, SCAFFOLD_EMNIST, PERSONALIZATION, COMPRESSION, ROBUSTNESS)
}


def get(name: str) -> Reproduction:
    """The reproduction of a name.

    Raises:
      ValueError: unknown; the message has the nearest names.

    >>> get("fedavgg")
    Traceback (most recent call last):
    ...
    ValueError: There is no reproduction 'fedavgg'. Did you mean 'fedavg'?
    """
    return look_up("reproduction", name, REPRODUCTIONS)
