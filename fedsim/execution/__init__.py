"""Execution: how a cohort is run, compiled on one device or several, or in plain Python."""

from fedsim.execution._client import Client as Client
from fedsim.execution._client import ClientUpdate as ClientUpdate
from fedsim.execution._clients import Clients as Clients
from fedsim.execution._debug import Debug as Debug
from fedsim.execution._debug import StageError as StageError
from fedsim.execution._devices import use_all_cores as use_all_cores
from fedsim.execution._execution import Auto as Auto
from fedsim.execution._execution import Execution as Execution
from fedsim.execution._execution import Jit as Jit
from fedsim.execution._execution import Pmap as Pmap
from fedsim.execution._execution import runs_with as runs_with
from fedsim.execution._federated_round import run_round as run_round
from fedsim.execution._placed_clients import place_clients as place_clients
from fedsim.execution._reports import report_problems as report_problems
from fedsim.execution._reports import watch_problems as watch_problems
from fedsim.execution._staleness import Staleness as Staleness
from fedsim.execution._state import Average as Average
from fedsim.execution._state import ClientTable as ClientTable
from fedsim.execution._state import FederatedState as FederatedState
from fedsim.execution._state import RoundInfo as RoundInfo
from fedsim.execution._state import server_state as server_state
