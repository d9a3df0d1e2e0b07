"""Execution: how a cohort is run (debug, jit, pmap), and how a population is evaluated."""

from fedsim.execution._contract import Average as Average
from fedsim.execution._contract import Client as Client
from fedsim.execution._contract import ClientTable as ClientTable
from fedsim.execution._contract import ClientUpdate as ClientUpdate
from fedsim.execution._contract import Remembered as Remembered
from fedsim.execution._contract import RoundInfo as RoundInfo
from fedsim.execution._contract import Turnout as Turnout
from fedsim.execution._debug import Debug as Debug
from fedsim.execution._debug import StageError as StageError
from fedsim.execution._devices import use_all_cores as use_all_cores
from fedsim.execution._dropped import report_dropped as report_dropped
from fedsim.execution._dropped import watch_dropped as watch_dropped
from fedsim.execution._evaluate import Evaluation as Evaluation
from fedsim.execution._evaluate import evaluate as evaluate
from fedsim.execution._evaluate_personalized import evaluate_personalized as evaluate_personalized
from fedsim.execution._execution import Auto as Auto
from fedsim.execution._execution import Execution as Execution
from fedsim.execution._execution import Jit as Jit
from fedsim.execution._execution import Pmap as Pmap
from fedsim.execution._execution import runs_with as runs_with
from fedsim.execution._memory import remember as remember
from fedsim.execution._memory import split as split
