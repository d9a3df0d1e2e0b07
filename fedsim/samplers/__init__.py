"""Samplers: they choose the clients of round r, as a function of the seed and r alone.

Any object with ``data`` and ``cohort(round)`` is a sampler. The samplers of this package also have ``clients`` (the number of
clients per round, or the maximum where the documentation says so), ``key`` (the run's root key) and ``rounds(stop, start=0)``.
The cohorts of one sampler may differ in size, but have the same number of slots, so one compiled program runs all rounds.
"""

from fedsim.samplers._attacked import Attacked as Attacked
from fedsim.samplers._checked import check_is_cohort as check_is_cohort
from fedsim.samplers._checked import checked_cohort as checked_cohort
from fedsim.samplers._checked import same_key as same_key
from fedsim.samplers._diurnal import DiurnalSampler as DiurnalSampler
from fedsim.samplers._poisson import PoissonSampler as PoissonSampler
from fedsim.samplers._protocol import Sampler as Sampler
from fedsim.samplers._schedule import ScheduleSampler as ScheduleSampler
from fedsim.samplers._shuffled import ShuffledSampler as ShuffledSampler
from fedsim.samplers._stragglers import Stragglers as Stragglers
from fedsim.samplers._uniform import UniformSampler as UniformSampler
from fedsim.samplers._weighted import WeightedSampler as WeightedSampler
