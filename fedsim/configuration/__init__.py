"""Configurations of runs by name: what determines a run's result, and the objects that are built from it.

`RunConfig` has everything that the result of a run depends on, and `Settings` how it is executed and reported. `build` makes
the algorithm, the sampler and the test data from both. `published` has the defaults for a dataset and an algorithm.
"""

from fedsim.configuration._build import Experiment as Experiment
from fedsim.configuration._build import algorithm_class as algorithm_class
from fedsim.configuration._build import algorithm_hyperparameters as algorithm_hyperparameters
from fedsim.configuration._build import build as build
from fedsim.configuration._build import build_members as build_members
from fedsim.configuration._build import models_without_arguments as models_without_arguments
from fedsim.configuration._build import synchronization_of as synchronization_of
from fedsim.configuration._client_optimizer import client_optimizer as client_optimizer
from fedsim.configuration._config import WRITERS as WRITERS
from fedsim.configuration._config import How as How
from fedsim.configuration._config import RunConfig as RunConfig
from fedsim.configuration._config import Settings as Settings
from fedsim.configuration._config import Value as Value
from fedsim.configuration._config import fields_that_name as fields_that_name
from fedsim.configuration._config import options_that_build as options_that_build
from fedsim.configuration._config import python_numbers as python_numbers
from fedsim.configuration._config import topology_with_seed as topology_with_seed
from fedsim.configuration._config import writer_names as writer_names
from fedsim.configuration._published import Published as Published
from fedsim.configuration._published import published as published
from fedsim.configuration._scheduled import Prepared as Prepared
from fedsim.configuration._scheduled import following as following
from fedsim.configuration._scheduled import prepared as prepared
from fedsim.configuration._scheduled import scheduled as scheduled
