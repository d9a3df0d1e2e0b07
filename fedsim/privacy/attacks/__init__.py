"""Attacks on privacy: what an observer of models and updates finds out about clients and their examples.

The observer follows the protocol. Clients that disturb the training are in `fedsim.attacks`.
"""

from fedsim.privacy.attacks._inversion import inputs_of_dense as inputs_of_dense
from fedsim.privacy.attacks._inversion import invert as invert
from fedsim.privacy.attacks._inversion import likeness as likeness
from fedsim.privacy.attacks._membership import confidences as confidences
from fedsim.privacy.attacks._membership import likelihood_ratios as likelihood_ratios
from fedsim.privacy.attacks._membership import losses as losses
from fedsim.privacy.attacks._property import property_scores as property_scores
from fedsim.privacy.attacks._property import sent_updates as sent_updates
from fedsim.privacy.attacks._shadows import ShadowSampler as ShadowSampler
