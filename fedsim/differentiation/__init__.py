"""Derivatives of whole runs with respect to rates, other numbers, parameters and weights, and gradient descent on rates."""

from fedsim.differentiation._client_worth import ClientWorth as ClientWorth
from fedsim.differentiation._client_worth import client_worth as client_worth
from fedsim.differentiation._client_worth import with_client_weights as with_client_weights
from fedsim.differentiation._differentiable import differentiable as differentiable
from fedsim.differentiation._objective import validation_loss as validation_loss
from fedsim.differentiation._tune import Tuned as Tuned
from fedsim.differentiation._tune import TunedRun as TunedRun
from fedsim.differentiation._tune import tune as tune
