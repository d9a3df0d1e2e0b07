"""Vertical federated learning: parties hold different columns of the same people, and one of them has the labels."""

from fedsim.vertical._algorithm import VerticalAlgorithm as VerticalAlgorithm
from fedsim.vertical._algorithm import VerticalState as VerticalState
from fedsim.vertical._batches import BatchSampler as BatchSampler
from fedsim.vertical._batches import VerticalBatch as VerticalBatch
from fedsim.vertical._cvfl import CVFL as CVFL
from fedsim.vertical._data import VerticalData as VerticalData
from fedsim.vertical._data import align as align
from fedsim.vertical._divide import divide_columns as divide_columns
from fedsim.vertical._fedbcd import FedBCD as FedBCD
from fedsim.vertical._model import VerticalModel as VerticalModel
from fedsim.vertical._model import concatenate as concatenate
from fedsim.vertical._model import dense as dense
from fedsim.vertical._model import sum_embeddings as sum_embeddings
from fedsim.vertical._party import Party as Party
from fedsim.vertical._split_learning import SplitLearning as SplitLearning

ALGORITHMS: dict[str, type[VerticalAlgorithm]] = {cls.__name__.lower(): cls for cls in (SplitLearning, FedBCD, CVFL)}
