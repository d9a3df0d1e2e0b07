"""The costs of a round, determined before any round runs: messages, computation, memory, collectives, time."""

from fedsim.planning._costs import plan as plan
from fedsim.planning._plan import Plan as Plan
