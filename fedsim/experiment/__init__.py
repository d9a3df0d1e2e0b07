"""Experiments: the run loop, and run folders with metrics, checkpoints and pictures.

The names of `fedsim.configuration` that a run needs are here, too. Sweeps and populations are in `fedsim.sweeps`.
"""

from fedsim.configuration import Experiment as Experiment
from fedsim.configuration import How as How
from fedsim.configuration import Published as Published
from fedsim.configuration import RunConfig as RunConfig
from fedsim.configuration import Settings as Settings
from fedsim.configuration import algorithm_class as algorithm_class
from fedsim.configuration import build as build
from fedsim.configuration import client_optimizer as client_optimizer
from fedsim.configuration import published as published
from fedsim.experiment._bisect import Finding as Finding
from fedsim.experiment._bisect import bisect as bisect
from fedsim.experiment._checkpoint import Checkpoints as Checkpoints
from fedsim.experiment._folder import read_config as read_config
from fedsim.experiment._folder import read_sweep as read_sweep
from fedsim.experiment._lines import best_round as best_round
from fedsim.experiment._loop import Result as Result
from fedsim.experiment._loop import restore as restore
from fedsim.experiment._loop import run as run
from fedsim.experiment._loop import run_experiment as run_experiment
from fedsim.experiment._loop import saved_round as saved_round
from fedsim.experiment._metrics_file import read_metrics as read_metrics
from fedsim.experiment._replay import ReplayedClient as ReplayedClient
from fedsim.experiment._replay import replay as replay
from fedsim.experiment._report import closing_table as closing_table
from fedsim.experiment._report import draw_learning_curve as draw_learning_curve
from fedsim.experiment._report import evaluation_table as evaluation_table
from fedsim.experiment._simulate import Simulation as Simulation
from fedsim.experiment._simulate import simulate as simulate
from fedsim.experiment._stop_rules import STOP_RULES as STOP_RULES
from fedsim.experiment._stop_rules import StopRule as StopRule
from fedsim.experiment._stored_run import StoredRun as StoredRun
from fedsim.experiment._stored_run import load as load
