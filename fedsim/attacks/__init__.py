"""Attacks by malicious clients.

The attack and the attackers are properties of a cohort (``Cohort.attack`` and ``Cohort.attackers``, which
`fedsim.samplers.Attacked` sets), so every algorithm and aggregator can be attacked without changes to it. An attack may change
the examples on which attackers train, or the updates that they send. Colluding attackers also know statistics of the honest
clients' updates. These statistics include a mean, so colluding attacks need updates of floats. They raise an error with
`fedsim.algorithms.HypCluster`, whose clients also send the number of a cluster.
"""

from fedsim.attacks._alie import ALittleIsEnough as ALittleIsEnough
from fedsim.attacks._attack import Attack as Attack
from fedsim.attacks._backdoor import PixelBackdoor as PixelBackdoor
from fedsim.attacks._collusion import Collusion as Collusion
from fedsim.attacks._collusion import HonestStatistics as HonestStatistics
from fedsim.attacks._gaussian_noise import GaussianNoise as GaussianNoise
from fedsim.attacks._inner_product import InnerProduct as InnerProduct
from fedsim.attacks._label_flip import LabelFlip as LabelFlip
from fedsim.attacks._min_max import MinMax as MinMax
from fedsim.attacks._min_sum import MinSum as MinSum
from fedsim.attacks._model_replacement import ModelReplacement as ModelReplacement
from fedsim.attacks._sign_flip import SignFlip as SignFlip
from fedsim.names import by_name

# Attacks that can be chosen by name.
ATTACKS: dict[str, type[Attack]] = by_name(
    LabelFlip, PixelBackdoor, SignFlip, GaussianNoise, ALittleIsEnough, InnerProduct, MinMax, MinSum, ModelReplacement
)
