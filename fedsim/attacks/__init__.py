"""Attacks: what some clients of a cohort do to the others' model, as values that a cohort carries.

Who attacks is a property of a cohort (``Cohort.attack``, ``Cohort.attackers``; `fedsim.samplers.Attacked` sets them), so
algorithms and aggregators can be attacked without knowing of it. An attack may change what its clients train on, what they
send, or, if they collude, both with a view of what the honest ones sent. Those who collude need the mean of what is sent, so
they are refused where that is not floats alone: by `fedsim.algorithms.HypCluster`, whose clients send the number of a cluster.
"""

from fedsim.attacks._alie import ALittleIsEnough as ALittleIsEnough
from fedsim.attacks._attack import Attack as Attack
from fedsim.attacks._backdoor import PixelBackdoor as PixelBackdoor
from fedsim.attacks._collusion import Collusion as Collusion
from fedsim.attacks._collusion import Honest as Honest
from fedsim.attacks._gaussian_noise import GaussianNoise as GaussianNoise
from fedsim.attacks._inner_product import InnerProduct as InnerProduct
from fedsim.attacks._label_flip import LabelFlip as LabelFlip
from fedsim.attacks._sign_flip import SignFlip as SignFlip
from fedsim.names import by_name

ATTACKS: dict[str, type[Attack]] = by_name(LabelFlip, PixelBackdoor, SignFlip, GaussianNoise, ALittleIsEnough, InnerProduct)
