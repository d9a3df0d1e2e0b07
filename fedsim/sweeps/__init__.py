"""Many runs of one federation: sweeps, with a run folder for each run, and populations, in one compiled program.

`sweep` runs a configuration with several values of its options and several seeds, as ``fedsim run`` does with several values.
`population` trains algorithms that you make yourself, and returns their states.
"""

from fedsim.configuration import How as How
from fedsim.experiment import read_sweep as read_sweep
from fedsim.sweeps._change_rounds import change_rounds as change_rounds
from fedsim.sweeps._grid import Range as Range
from fedsim.sweeps._grid import drawn_settings as drawn_settings
from fedsim.sweeps._population import Population as Population
from fedsim.sweeps._population import population as population
from fedsim.sweeps._result import SweepMember as SweepMember
from fedsim.sweeps._result import SweepResult as SweepResult
from fedsim.sweeps._sweep import Differing as Differing
from fedsim.sweeps._sweep import Varied as Varied
from fedsim.sweeps._sweep import sweep as sweep
