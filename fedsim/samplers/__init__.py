"""Samplers: they choose the clients of round r, as a function of the seed and r.

Any object with ``data`` and ``cohort(round)`` is a sampler. The samplers of this package also have ``clients`` (the number of
clients per round, or the maximum where the documentation says so), ``key`` (the run's root key) and ``rounds(stop, start=0)``.
The cohorts of one sampler may differ in size, but have the same number of slots, so one compiled program runs all rounds.

`PowerOfChoice`, `Oort` and `ImportanceByNorm` also see values of the rounds before, such as losses, see `SteeredSampler`.
"""

from fedsim.names import by_name
from fedsim.samplers._arriving import Arriving as Arriving
from fedsim.samplers._attacked import Attacked as Attacked
from fedsim.samplers._checked import check_fits as check_fits
from fedsim.samplers._checked import check_is_cohort as check_is_cohort
from fedsim.samplers._checked import checked_cohort as checked_cohort
from fedsim.samplers._checked import same_key as same_key
from fedsim.samplers._clustered import ClusteredSampling as ClusteredSampling
from fedsim.samplers._cyclic import CyclicSampler as CyclicSampler
from fedsim.samplers._cyclic_poisson import CyclicPoissonSampler as CyclicPoissonSampler
from fedsim.samplers._diurnal import DiurnalSampler as DiurnalSampler
from fedsim.samplers._importance import ImportanceByNorm as ImportanceByNorm
from fedsim.samplers._observation import Observation as Observation
from fedsim.samplers._oort import Oort as Oort
from fedsim.samplers._poisson import PoissonSampler as PoissonSampler
from fedsim.samplers._power_of_choice import PowerOfChoice as PowerOfChoice
from fedsim.samplers._protocol import Sampler as Sampler
from fedsim.samplers._sampler import WrappedSampler as WrappedSampler
from fedsim.samplers._schedule import ScheduleSampler as ScheduleSampler
from fedsim.samplers._shuffled import ShuffledSampler as ShuffledSampler
from fedsim.samplers._steered import SteeredSampler as SteeredSampler
from fedsim.samplers._steered import is_steered as is_steered
from fedsim.samplers._steered import not_observed as not_observed
from fedsim.samplers._stragglers import Stragglers as Stragglers
from fedsim.samplers._uniform import UniformSampler as UniformSampler
from fedsim.samplers._weighted import WeightedSampler as WeightedSampler

# Samplers of a number of clients, for Poisson of an expected number, by name, for the command line.
SAMPLERS = {
    "uniform": UniformSampler,
    "weighted": WeightedSampler,
    "poisson": PoissonSampler,
    "shuffled": ShuffledSampler,
    "cyclic": CyclicSampler,
    "cyclic_poisson": CyclicPoissonSampler,
    "diurnal": DiurnalSampler,
    **by_name(ClusteredSampling, PowerOfChoice, Oort, ImportanceByNorm),
}
