"""Systems: devices, faults and synchronization models, and the schedule of events on a virtual clock.

All times are in seconds of the virtual clock, all sizes in bytes, and all energies in joules.
"""

from fedsim.names import by_name
from fedsim.systems._availability import Diurnal as Diurnal
from fedsim.systems._availability import Traces as Traces
from fedsim.systems._clocked import ClockedSampler as ClockedSampler
from fedsim.systems._deliveries import Deliveries as Deliveries
from fedsim.systems._devices import Devices as Devices
from fedsim.systems._dispatch import Dispatch as Dispatch
from fedsim.systems._dispatch import Policy as Policy
from fedsim.systems._energy import EnergyModel as EnergyModel
from fedsim.systems._faults import Fault as Fault
from fedsim.systems._faults import Faults as Faults
from fedsim.systems._faults import FaultSchedule as FaultSchedule
from fedsim.systems._laws import Constant as Constant
from fedsim.systems._laws import Exponential as Exponential
from fedsim.systems._laws import HalfNormal as HalfNormal
from fedsim.systems._laws import Law as Law
from fedsim.systems._laws import LogNormal as LogNormal
from fedsim.systems._records import OUTCOMES as OUTCOMES
from fedsim.systems._records import Schedule as Schedule
from fedsim.systems._records import ServerSteps as ServerSteps
from fedsim.systems._records import Timeline as Timeline
from fedsim.systems._records import Totals as Totals
from fedsim.systems._records import Updates as Updates
from fedsim.systems._sampler import ScheduledSampler as ScheduledSampler
from fedsim.systems._server import Server as Server
from fedsim.systems._server import Synchronization as Synchronization
from fedsim.systems._simulator import Simulator as Simulator
from fedsim.systems._simulator import schedule as schedule
from fedsim.systems._staleness_weights import STALENESS_WEIGHTS as STALENESS_WEIGHTS
from fedsim.systems._staleness_weights import ConstantWeight as ConstantWeight
from fedsim.systems._staleness_weights import HingeWeight as HingeWeight
from fedsim.systems._staleness_weights import PolynomialWeight as PolynomialWeight
from fedsim.systems._synchronization import Asynchronous as Asynchronous
from fedsim.systems._synchronization import Buffered as Buffered
from fedsim.systems._synchronization import FedBuff as FedBuff
from fedsim.systems._synchronization import StaleSynchronous as StaleSynchronous
from fedsim.systems._synchronization import Synchronous as Synchronous

# What can be chosen by name.
LAWS: dict[str, type[Law]] = by_name(Constant, LogNormal, HalfNormal, Exponential)
SYNCHRONIZATIONS: dict[str, type[Synchronization]] = {
    **by_name(Synchronous, StaleSynchronous, Asynchronous, Buffered),
    "fedbuff": FedBuff,
}
