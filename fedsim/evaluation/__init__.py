"""Evaluation of a population, with one model for all clients or with each client's own model."""

from fedsim.evaluation._evaluate import Evaluation as Evaluation
from fedsim.evaluation._evaluate import evaluate as evaluate
from fedsim.evaluation._evaluate import evaluation_of_none as evaluation_of_none
from fedsim.evaluation._personalized import evaluate_personalized as evaluate_personalized
