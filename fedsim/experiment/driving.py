"""For programs that drive runs themselves, as the command line and `fedsim.sweeps` do: the rounds of a run, and its folder.

`fedsim.experiment.run` drives one run from its first to its last round. A program that drives several runs at a time uses the
same pieces: a `Run` sends rounds to the devices and writes what comes back, `pipelined` keeps the devices busy meanwhile,
`RunFolder` has the names of a run's files, and an `Interruption` records Ctrl-C until the rounds that were sent have ended.
"""

from fedsim.experiment._checkpoint import DEPLOYMENT as DEPLOYMENT
from fedsim.experiment._checkpoint import Checkpoints as Checkpoints
from fedsim.experiment._default_evaluation import default_evaluation as default_evaluation
from fedsim.experiment._default_evaluation import is_personal as is_personal
from fedsim.experiment._dispatch import DispatchedRounds as DispatchedRounds
from fedsim.experiment._dispatch import DispatchLength as DispatchLength
from fedsim.experiment._dispatch import Rounds as Rounds
from fedsim.experiment._dispatch import pipelined as pipelined
from fedsim.experiment._divergence import LossMonitor as LossMonitor
from fedsim.experiment._divergence import is_diverged as is_diverged
from fedsim.experiment._environment import code_of as code_of
from fedsim.experiment._folder import RunFolder as RunFolder
from fedsim.experiment._folder import code_change as code_change
from fedsim.experiment._folder import is_sweep as is_sweep
from fedsim.experiment._folder import resume_command as resume_command
from fedsim.experiment._folder import stored_run as stored_run
from fedsim.experiment._folder import sweep_file as sweep_file
from fedsim.experiment._folder import warn_of_changed_code as warn_of_changed_code
from fedsim.experiment._identity import rows_identity as rows_identity
from fedsim.experiment._lines import Line as Line
from fedsim.experiment._lines import evaluation_line as evaluation_line
from fedsim.experiment._lines import round_lines as round_lines
from fedsim.experiment._lines import score as score
from fedsim.experiment._lines import score_name as score_name
from fedsim.experiment._lines import split_and_metric as split_and_metric
from fedsim.experiment._longer import check_rounds as check_rounds
from fedsim.experiment._loop import arguments_of as arguments_of
from fedsim.experiment._loop import warnings_above as warnings_above
from fedsim.experiment._replay import RunRound as RunRound
from fedsim.experiment._report import described_guarantee as described_guarantee
from fedsim.experiment._run import Run as Run
from fedsim.experiment._run import Stopwatch as Stopwatch
from fedsim.experiment._run_log import Callback as Callback
from fedsim.experiment._signals import Interruption as Interruption
from fedsim.experiment._stop_rules import stop_rules as stop_rules
from fedsim.experiment._trust import check_trusted as check_trusted
from fedsim.experiment._trust import imported_modules as imported_modules
from fedsim.experiment._trust import rewrite as rewrite
from fedsim.experiment._trust import write_signed as write_signed
