"""A round: what its clients and its server do, as a value that `fedsim.execution` runs and everything else reads.

`Client`, `ClientUpdate`, `Clients`, `RoundInfo` and `Staleness` are what algorithms are written with. `RoundProgram` is
a traced round. `fedsim.execution.run_round` shows how to run it in another way.
"""

from fedsim.rounds._call import Call as Call
from fedsim.rounds._call import send_down as send_down
from fedsim.rounds._client import Client as Client
from fedsim.rounds._client import ClientPlan as ClientPlan
from fedsim.rounds._client import ClientUpdate as ClientUpdate
from fedsim.rounds._client import RunLoop as RunLoop
from fedsim.rounds._client import Step as Step
from fedsim.rounds._client import batch_loop as batch_loop
from fedsim.rounds._client import streams as streams
from fedsim.rounds._client import training_steps as training_steps
from fedsim.rounds._clients import Clients as Clients
from fedsim.rounds._clients import arrived_at_server as arrived_at_server
from fedsim.rounds._numbers import Made as Made
from fedsim.rounds._numbers import Numbers as Numbers
from fedsim.rounds._numbers import are_alike as are_alike
from fedsim.rounds._numbers import form_of as form_of
from fedsim.rounds._numbers import kept_with as kept_with
from fedsim.rounds._numbers import numbers_of as numbers_of
from fedsim.rounds._numbers import with_numbers as with_numbers
from fedsim.rounds._plan import RoundPlan as RoundPlan
from fedsim.rounds._round_program import Operands as Operands
from fedsim.rounds._round_program import RoundProgram as RoundProgram
from fedsim.rounds._round_program import TracedCall as TracedCall
from fedsim.rounds._round_program import Values as Values
from fedsim.rounds._staleness import Staleness as Staleness
from fedsim.rounds._staleness import check_scalable as check_scalable
from fedsim.rounds._staleness import check_scales as check_scales
from fedsim.rounds._staleness import is_scalable as is_scalable
from fedsim.rounds._state import Average as Average
from fedsim.rounds._state import ClientTable as ClientTable
from fedsim.rounds._state import FederatedAlgorithm as FederatedAlgorithm
from fedsim.rounds._state import FederatedState as FederatedState
from fedsim.rounds._state import RoundInfo as RoundInfo
from fedsim.rounds._state import Shared as Shared
from fedsim.rounds._state import State as State
from fedsim.rounds._state import first_memory as first_memory
from fedsim.rounds._state import parts_of as parts_of
from fedsim.rounds._state import server_state as server_state
from fedsim.rounds._state import with_memory_of as with_memory_of
from fedsim.rounds._state import with_params as with_params
from fedsim.rounds._trace import TraceOptions as TraceOptions
from fedsim.rounds._trace import finished as finished
from fedsim.rounds._trace import trace_round as trace_round
