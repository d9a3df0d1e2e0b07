"""Membership inference: which examples, or which clients, a model was trained on.

S. Yeom, I. Giacomelli, M. Fredrikson, S. Jha, "Privacy risk in machine learning", CSF 2018, attack 1, a threshold of the loss:
https://arxiv.org/abs/1709.01604. N. Carlini, S. Chien, M. Nasr, S. Song, A. Terzis, F. Tramèr, "Membership inference attacks
from first principles", S&P 2022, algorithm 1 and section 6: https://arxiv.org/abs/2112.03570, for `likelihood_ratios`.

Deviation from Carlini et al.: the target is asked about the example itself only, not about augmentations of it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from fedsim import checks
from fedsim.data import FederatedData
from fedsim.model import Model, Params

_CHUNK = 1024


def losses(model: Model, params: Params, data: FederatedData) -> np.ndarray:
    """Returns the loss of every example, ``float64 [num_examples]``. Low losses are those of examples that were trained on.

    ``Scores(-losses(members), -losses(others))`` is the attack by a threshold of the loss.

    Args:
      model: whose loss is used.
      params: its parameters.
      data: the examples, in the order of its columns.

    Raises:
      ValueError: the data is not what the model reads.

    >>> import fedsim
    >>> from fedsim.privacy import Scores
    >>> splits = fedsim.datasets.load("digits(clients=5)")
    >>> model = fedsim.models.digits_logistic()
    >>> params = model.init(jax.random.key(0))
    >>> scores = Scores(-losses(model, params, splits.train), -losses(model, params, splits.test))
    >>> round(scores.auc, 1)  # before the training
    0.5
    """
    model.check(data)
    columns = {name: np.asarray(data.columns[name]) for name in model.features}
    parts = range(0, data.num_examples, _CHUNK)
    found = [_losses(model, params, {name: x[start : start + _CHUNK] for name, x in columns.items()}) for start in parts]
    return np.concatenate([np.zeros(0), *map(np.asarray, found)]).astype(np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _losses(model: Model, params: Params, examples: Any) -> jax.Array:
    return model.losses(examples, model.apply_for_eval(params, examples))


def confidences(cross_entropies: Any) -> np.ndarray:
    """Returns log p - log(1 - p) for the probability p of the label, whose law is nearly normal, from cross-entropies -log p.

    >>> confidences([np.log(2), -np.log(0.9)]).round(3).tolist()
    [0.0, 2.197]
    """
    # A probability that is rounded to 1 has a finite confidence, too.
    loss = np.maximum(np.asarray(cross_entropies, np.float64), 1e-9)
    return -loss - np.log(-np.expm1(-loss))


def likelihood_ratios(target: Any, shadows: Any, members: Any, *, common_variance: bool = True) -> np.ndarray:
    """Returns log-likelihood ratios of having been trained on, by models that were trained with and without (LiRA).

    For every example, the values of the models that were trained on it, and of those that were not, have two normal laws. An
    example that no model was trained on gets the probability of a lower value than the target's without it, in standard
    deviations: the offline attack.

    Args:
      target: ``[n]``, the attacked model's values, such as `confidences`, of n examples or clients; higher for members.
      shadows: ``[models, n]``, the values of the other models.
      members: ``bool [models, n]``, what each of these was trained on.
      common_variance: whether the variances are those of all examples together, which is better for fewer than about 64 models.

    Returns:
      ``float64 [n]``.

    Raises:
      ValueError: the shapes do not fit, or an example has fewer than two models that were not trained on it.

    >>> likelihood_ratios([2.0], [[1.9], [2.1], [-0.1], [0.1]], [[True], [True], [False], [False]]).round(6).tolist()
    [100.0]
    """
    target, shadows, members = np.asarray(target, np.float64), np.asarray(shadows, np.float64), np.asarray(members)
    if target.ndim != 1 or shadows.shape[1:] != target.shape or members.shape != shadows.shape or members.dtype != bool:
        raise ValueError(
            f"Expected target [n], shadows [models, n] and members bool [models, n], got {list(target.shape)}, "
            f"{list(shadows.shape)} and {members.dtype} {list(members.shape)}."
        )
    checks.truth(common_variance=common_variance)
    if (~members).sum(axis=0).min(initial=2) < 2:
        raise ValueError("Expected at least two models without each example in members, got fewer: train more models.")

    def law(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count = chosen.sum(axis=0)
        mean = np.where(chosen, shadows, 0).sum(axis=0) / np.maximum(count, 1)
        squares = np.where(chosen, np.square(shadows - mean), 0).sum(axis=0)
        if common_variance:
            squares, freedom = squares.sum() * np.ones_like(mean), np.maximum(count - 1, 0).sum() * np.ones_like(mean)
        else:
            freedom = np.maximum(count - 1, 0)
        return mean, np.maximum(squares / np.maximum(freedom, 1), 1e-12)

    (mean_in, in_), (mean_out, out) = law(members), law(~members)
    single = members.sum(axis=0) < 2  # One value has no variance.
    in_ = np.where(single.all() if common_variance else single, out, in_)
    online = 0.5 * (np.square(target - mean_out) / out - np.square(target - mean_in) / in_ + np.log(out / in_))
    return np.where(members.any(axis=0), online, (target - mean_out) / np.sqrt(out))
