"""The evaluation of a run's states on test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fedsim import rng
from fedsim.algorithm import Algorithm
from fedsim.data import FederatedData
from fedsim.evaluation import Evaluation, evaluate_personalized, evaluation_of_none
from fedsim.evaluation import evaluate as evaluate_model
from fedsim.execution import Jit
from fedsim.metrics import better_of
from fedsim.model import keeps_parts
from fedsim.samplers import Arriving, Sampler

State = Any
Scores = Evaluation | Mapping[str, float]


def is_personal(algorithm: Algorithm) -> bool:
    """Returns whether clients have models of their own.

    >>> import fedsim
    >>> is_personal(fedsim.algorithms.Histogram(bins=2))
    False
    """
    return hasattr(algorithm, "personal_params") or keeps_parts(getattr(algorithm, "model", None))


def default_evaluation(
    algorithm: Algorithm,
    train: FederatedData,
    data: FederatedData | None,
    like: State,
    name: str = "test_data",
    sampler: Sampler | None = None,
) -> Callable[..., Scores] | None:
    """Returns the evaluation of states on test or validation data, see `fedsim.experiment.run`; None without test data.

    Args:
      algorithm: the algorithm of the run.
      train: the training data, for clients' personal models.
      data: the test data.
      like: a state of the algorithm, of arrays or ``jax.ShapeDtypeStruct``.
      name: of the data, for error messages.
      sampler: that of the run, which may also be given with a state. If examples arrive (`Arriving`), personal models are those
        by the examples of the last round, so the evaluation needs the number of finished rounds.

    Raises:
      ValueError: the algorithm cannot be evaluated, or the data has no examples or does not fit the model.

    >>> import fedsim, optax
    >>> data, model = fedsim.datasets.load("digits").train, fedsim.models.digits_logistic()
    >>> algorithm = fedsim.algorithms.FedSGD(model=model, server_optimizer=optax.sgd(0.1))
    >>> state = algorithm.init(jax.random.key(0))
    >>> evaluation = default_evaluation(algorithm, data, data, state)
    >>> sorted(evaluation(state).overall)
    ['accuracy', 'loss']
    """
    if data is None:
        return None
    if not data.num_examples:
        raise ValueError(
            f"Expected {name} with examples, got {data.num_clients} clients without any: give other data, or leave it out."
        )
    own, model = getattr(algorithm, "evaluate", None), getattr(algorithm, "model", None)
    if own is not None:
        return lambda state, finished=0, sampler=None: own(state, data)
    params = jax.eval_shape(lambda state: getattr(state, "params", None), like)
    if model is None or params is None:
        raise ValueError(
            f"{type(algorithm).__name__} cannot be evaluated on {name}, because it has no model or no state.params. Define "
            "a method evaluate(state, data), or pass evaluate=, a function of the state, to run."
        )
    model.check(data)
    execution = algorithm.execution if isinstance(algorithm.execution, Jit) else Jit()
    has_whole = _is_whole(params, model)

    def evaluation(state: State, finished: int = 0, sampler: Sampler | None = sampler) -> Evaluation:
        # A server with only a part of the model, or with several models, has no model of its own to evaluate.
        whole = evaluate_model(model, state.params, data, execution=execution) if has_whole else Evaluation({}, {})
        if not is_personal(algorithm):
            return whole
        own = evaluate_personalized(algorithm, state, train, data, execution=execution, rows=_rows(sampler, finished))
        overall = whole.overall | {f"personal_{name}": value for name, value in own.overall.items()}
        return Evaluation(overall, whole.clients | {f"personal_{name}": mean for name, mean in own.clients.items()})

    if not has_whole and not is_personal(algorithm):
        raise ValueError(
            f"state.params of {type(algorithm).__name__} has other shapes than the parameters of its model, so it cannot be "
            f"evaluated on {name}. Define a method evaluate(state, data), or pass evaluate=, a function of the state, to run."
        )
    return evaluation


def ranking_metrics(algorithm: Algorithm, like: State, data: FederatedData) -> list[str] | None:
    """Returns the names of the metrics by which evaluations can be ranked; None if the algorithm evaluates itself.

    These have one number, and it is known which values are better.

    Args:
      algorithm: the algorithm of the run.
      like: a state of the algorithm, of arrays or ``jax.ShapeDtypeStruct``.
      data: what is evaluated.
    """
    model: Any = getattr(algorithm, "model", None)
    if hasattr(algorithm, "evaluate") or model is None:
        return None
    overall, clients = evaluation_of_none(model, data)
    names = [name for name, value in overall.items() if np.ndim(value) == 0 and better_of(name, clients[name])]
    return (names if _is_whole(like.params, model) else []) + [f"personal_{name}" for name in names if is_personal(algorithm)]


def _is_whole(params: Any, model: Any) -> bool:
    """Returns whether the server's parameters are those of the whole model, and not of a part or of several models."""
    shapes = [[x.shape for x in jax.tree.leaves(of)] for of in (params, jax.eval_shape(model.init_whole, rng.root(0)))]
    return shapes[0] == shapes[1]


def _rows(sampler: Any, finished: int) -> np.ndarray | None:
    """Returns which examples all clients have had in the last finished round; None for all of them."""
    while sampler is not None and not isinstance(sampler, Arriving):
        sampler = getattr(sampler, "sampler", None)
    if sampler is None:
        return None
    return sampler.rows(np.arange(sampler.data.num_clients), max(0, finished - 1))
