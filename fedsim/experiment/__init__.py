"""Experiments: the run loop, run folders with metrics, checkpoints and pictures, and configurations by name."""

from fedsim.experiment._build import Experiment as Experiment
from fedsim.experiment._build import algorithm_class as algorithm_class
from fedsim.experiment._build import build as build
from fedsim.experiment._checkpoint import Checkpoints as Checkpoints
from fedsim.experiment._config import RunConfig as RunConfig
from fedsim.experiment._config import Settings as Settings
from fedsim.experiment._folder import read_config as read_config
from fedsim.experiment._lines import best_round as best_round
from fedsim.experiment._loop import Result as Result
from fedsim.experiment._loop import restore as restore
from fedsim.experiment._loop import run as run
from fedsim.experiment._population import How as How
from fedsim.experiment._population import Population as Population
from fedsim.experiment._population import population as population
from fedsim.experiment._published import Published as Published
from fedsim.experiment._published import published as published
from fedsim.experiment._report import closing_table as closing_table
from fedsim.experiment._report import draw_learning_curve as draw_learning_curve
from fedsim.experiment._schedule import client_optimizer as client_optimizer
from fedsim.experiment._simulate import Simulation as Simulation
from fedsim.experiment._simulate import simulate as simulate
from fedsim.experiment._sweep import read_sweep as read_sweep
from fedsim.experiment._sweep import sweep as sweep
from fedsim.experiment._sweep_result import SweepMember as SweepMember
from fedsim.experiment._sweep_result import SweepResult as SweepResult
from fedsim.experiment._writers import read_metrics as read_metrics
