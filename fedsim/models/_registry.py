"""Models by name, for command lines and configuration files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedsim.model import Model
from fedsim.models._dense import dense, logistic
from fedsim.models._digits import digits_dense, digits_logistic
from fedsim.models._emnist import emnist_cnn, emnist_dense, emnist_logistic
from fedsim.models._shakespeare import shakespeare_lstm
from fedsim.models._stackoverflow import stackoverflow_logistic, stackoverflow_lstm, stackoverflow_transformer
from fedsim.names import look_up

MODELS: dict[str, Callable[..., Model]] = {
    factory.__name__: factory
    for factory in (
        dense,
        digits_dense,
        digits_logistic,
        emnist_cnn,
        emnist_dense,
        emnist_logistic,
        logistic,
        shakespeare_lstm,
        stackoverflow_logistic,
        stackoverflow_lstm,
        stackoverflow_transformer,
    )
}
"""Every model of `fedsim.models` by its function's name."""


def get(name: str, **kwargs: Any) -> Model:
    """The model that ``fedsim.models.<name>(**kwargs)`` makes.

    Raises:
      ValueError: for a name that is not in `MODELS`; the message has the nearest ones.

    >>> get("emnist_dense", hidden=(100,)).num_classes
    62
    >>> get("emnist_cn")
    Traceback (most recent call last):
    ...
    ValueError: There is no model 'emnist_cn'. Did you mean 'emnist_cnn' or 'emnist_dense'?
    """
    return look_up("model", name, MODELS)(**kwargs)
