"""Models by name, for command lines and configuration files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedsim.model import Model
from fedsim.models._autoencoder import digits_autoencoder, emnist_autoencoder
from fedsim.models._cifar import cifar10_cnn, cifar100_logistic, cifar100_resnet18
from fedsim.models._decoder import decoder, lm_1b, lm_8b, lm_350m, lm_tiny
from fedsim.models._dense import dense, dense_regression, linear_regression, logistic
from fedsim.models._digits import digits_dense, digits_logistic, digits_split
from fedsim.models._emnist import emnist_cnn, emnist_dense, emnist_logistic
from fedsim.models._generated import synthetic_logistic, toy_regression
from fedsim.models._mnist import mnist_2nn, mnist_cnn
from fedsim.models._mobilenet import mobilenet_v2
from fedsim.models._resnet import resnet8, resnet18, resnet20
from fedsim.models._shakespeare import shakespeare_lstm, shakespeare_transformer
from fedsim.models._stackoverflow import stackoverflow_logistic, stackoverflow_lstm, stackoverflow_transformer
from fedsim.models._vision_transformer import vit_tiny
from fedsim.names import make

MODELS: dict[str, Callable[..., Model]] = {
    factory.__name__: factory
    for factory in (
        cifar10_cnn,
        cifar100_logistic,
        cifar100_resnet18,
        decoder,
        dense,
        dense_regression,
        digits_autoencoder,
        digits_dense,
        digits_logistic,
        digits_split,
        emnist_autoencoder,
        emnist_cnn,
        emnist_dense,
        emnist_logistic,
        linear_regression,
        lm_1b,
        lm_8b,
        lm_350m,
        lm_tiny,
        logistic,
        mnist_2nn,
        mnist_cnn,
        mobilenet_v2,
        resnet8,
        resnet18,
        resnet20,
        shakespeare_lstm,
        shakespeare_transformer,
        stackoverflow_logistic,
        stackoverflow_lstm,
        stackoverflow_transformer,
        synthetic_logistic,
        toy_regression,
        vit_tiny,
    )
}
"""The models of `fedsim.models` by the names of their functions."""


def get(name: str, **kwargs: Any) -> Model:
    """Returns the model ``fedsim.models.<name>(**kwargs)``. The name may contain options: ``"name(option=literal)"``.

    Raises:
      ValueError: the name is not in `MODELS`, or the model does not have an option; the message lists the nearest names.

    >>> get("emnist_dense", hidden=(100,)).num_classes
    62
    >>> get("emnist_cnn(num_classes=10)").num_classes
    10
    >>> get("emnist_cn")
    Traceback (most recent call last):
    ...
    ValueError: There is no model 'emnist_cn'. Did you mean 'emnist_cnn' or 'mnist_cnn'?
    """
    return make("model", name, MODELS, Model, **kwargs)
