"""fedsim: simulating federated learning in JAX."""

from fedsim import aggregators as aggregators
from fedsim import algorithms as algorithms
from fedsim import datasets as datasets
from fedsim import metrics as metrics
from fedsim import models as models
from fedsim.algorithm import Algorithm as Algorithm
from fedsim.data import Batch as Batch
from fedsim.data import Batches as Batches
from fedsim.data import ClientDataset as ClientDataset
from fedsim.data import Cohort as Cohort
from fedsim.data import FederatedData as FederatedData
from fedsim.data import UniformSampler as UniformSampler
from fedsim.execution import Auto as Auto
from fedsim.execution import Client as Client
from fedsim.execution import ClientUpdate as ClientUpdate
from fedsim.execution import Debug as Debug
from fedsim.execution import Evaluation as Evaluation
from fedsim.execution import Execution as Execution
from fedsim.execution import Jit as Jit
from fedsim.execution import Pmap as Pmap
from fedsim.execution import RoundInfo as RoundInfo
from fedsim.execution import evaluate as evaluate
from fedsim.execution import use_all_cores as use_all_cores
from fedsim.model import Model as Model

__version__ = "0.1.0"
