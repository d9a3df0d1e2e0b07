"""Samplers: which clients take part in round r, as a function of the seed and r alone.

Anything with ``data`` and ``cohort(round)`` is a sampler. Those here also have ``clients`` (how many take part: exactly, or at
most where they say so), ``key`` (the run's root key) and ``rounds(stop, start=0)``. Cohorts of one sampler differ in
size at most, and not in slots, so all its rounds run by one compiled program.
"""

from fedsim.samplers._attacked import Attacked as Attacked
from fedsim.samplers._diurnal import DiurnalSampler as DiurnalSampler
from fedsim.samplers._poisson import PoissonSampler as PoissonSampler
from fedsim.samplers._sampler import Sampler as Sampler
from fedsim.samplers._schedule import ScheduleSampler as ScheduleSampler
from fedsim.samplers._shuffled import ShuffledSampler as ShuffledSampler
from fedsim.samplers._stragglers import Stragglers as Stragglers
from fedsim.samplers._uniform import UniformSampler as UniformSampler
from fedsim.samplers._weighted import WeightedSampler as WeightedSampler
