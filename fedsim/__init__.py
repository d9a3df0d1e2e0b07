"""fedsim: simulating federated learning in JAX.

Submodules are imported where they are first used, so that a program waits only for what it uses.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from fedsim._version import __version__ as __version__

if TYPE_CHECKING:
    from fedsim import aggregators as aggregators
    from fedsim import algorithms as algorithms
    from fedsim import attacks as attacks
    from fedsim import augmentations as augmentations
    from fedsim import comparison as comparison
    from fedsim import compressors as compressors
    from fedsim import configuration as configuration
    from fedsim import data as data
    from fedsim import datasets as datasets
    from fedsim import decentralized as decentralized
    from fedsim import deployment as deployment
    from fedsim import differentiation as differentiation
    from fedsim import distributed as distributed
    from fedsim import evaluation as evaluation
    from fedsim import execution as execution
    from fedsim import experiment as experiment
    from fedsim import formats as formats
    from fedsim import heterogeneity as heterogeneity
    from fedsim import metrics as metrics
    from fedsim import models as models
    from fedsim import partitioners as partitioners
    from fedsim import planning as planning
    from fedsim import plots as plots
    from fedsim import primitives as primitives
    from fedsim import privacy as privacy
    from fedsim import rng as rng
    from fedsim import rounds as rounds
    from fedsim import samplers as samplers
    from fedsim import sweeps as sweeps
    from fedsim import systems as systems
    from fedsim import text as text
    from fedsim import transfer as transfer
    from fedsim import tree as tree
    from fedsim import vertical as vertical
    from fedsim.algorithm import Algorithm as Algorithm
    from fedsim.algorithm import Capabilities as Capabilities
    from fedsim.algorithm import map_clients as map_clients
    from fedsim.data import Batch as Batch
    from fedsim.data import Batches as Batches
    from fedsim.data import ClientDataset as ClientDataset
    from fedsim.data import Cohort as Cohort
    from fedsim.data import FederatedData as FederatedData
    from fedsim.differentiation import differentiable as differentiable
    from fedsim.differentiation import tune as tune
    from fedsim.evaluation import Evaluation as Evaluation
    from fedsim.evaluation import evaluate as evaluate
    from fedsim.evaluation import evaluate_personalized as evaluate_personalized
    from fedsim.execution import Auto as Auto
    from fedsim.execution import Debug as Debug
    from fedsim.execution import Execution as Execution
    from fedsim.execution import Jit as Jit
    from fedsim.execution import Pmap as Pmap
    from fedsim.execution import Sharded as Sharded
    from fedsim.execution import place_clients as place_clients
    from fedsim.execution import use_all_cores as use_all_cores
    from fedsim.model import MixtureModel as MixtureModel
    from fedsim.model import Model as Model
    from fedsim.model import SplitModel as SplitModel
    from fedsim.planning import Audit as Audit
    from fedsim.planning import Plan as Plan
    from fedsim.planning import audit as audit
    from fedsim.planning import plan as plan
    from fedsim.rounds import Client as Client
    from fedsim.rounds import Clients as Clients
    from fedsim.rounds import ClientUpdate as ClientUpdate
    from fedsim.rounds import RoundInfo as RoundInfo
    from fedsim.rounds import Staleness as Staleness
    from fedsim.samplers import UniformSampler as UniformSampler
    from fedsim.saved_arrays import read_params as read_params
    from fedsim.saved_arrays import write_params as write_params
    from fedsim.sweeps import population as population
else:  # At run time, `__getattr__` imports the submodules, and these names from them.
    _SUBMODULES = {module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")}
    _EXPORTS = {
        "algorithm": "Algorithm Capabilities map_clients",
        "data": "Batch Batches ClientDataset Cohort FederatedData",
        "differentiation": "differentiable tune",
        "evaluation": "Evaluation evaluate evaluate_personalized",
        "execution": "Auto Debug Execution Jit Pmap Sharded place_clients use_all_cores",
        "model": "MixtureModel Model SplitModel",
        "planning": "Audit Plan audit plan",
        "rounds": "Client ClientUpdate Clients RoundInfo Staleness",
        "samplers": "UniformSampler",
        "saved_arrays": "read_params write_params",
        "sweeps": "population",
    }
    _EXPORTED_BY = {name: module for module, names in _EXPORTS.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        """Imports a submodule, or the submodule that exports a name."""
        if name in _SUBMODULES:
            return importlib.import_module(f"fedsim.{name}")
        if name in _EXPORTED_BY:
            return getattr(importlib.import_module(f"fedsim.{_EXPORTED_BY[name]}"), name)
        raise AttributeError(f"module 'fedsim' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Returns all names, for completion in a shell."""
        return sorted({*globals(), *_SUBMODULES, *_EXPORTED_BY})
