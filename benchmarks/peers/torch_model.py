"""The task's models in PyTorch, and conversion of their parameters from and to Haiku's layout."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from benchmarks import workload


def build(task: workload.Task) -> nn.Sequential:
    drop = 1.0 if task.dropout else 0.0
    if task.model == "cnn":
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25 * drop),
            nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5 * drop), nn.Linear(128, 62),
        )  # fmt: skip
    else:
        modules: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in workload.SHAPES[task.model]:
            modules += [nn.Linear(inputs, outputs), nn.ReLU()]
        model = nn.Sequential(*modules[:-1])
    with torch.no_grad():
        layers = workload.initial_layers(task.model, task.seed)
        for module, (bias, weight) in zip(_weighted(model), layers, strict=True):
            module.bias.copy_(torch.from_numpy(bias))
            module.weight.copy_(torch.from_numpy(_to_torch(weight)))
    return model


def images(data: workload.Population) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns all examples in PyTorch's layout: float32 [n, 1, 28, 28] and int64 [n]."""
    return torch.from_numpy(data.floats().reshape(-1, 1, 28, 28)), torch.from_numpy(data.y.astype(np.int64))


def leaves(model: nn.Module) -> list[np.ndarray]:
    """Returns the parameters in the order and layout of `workload.initial_leaves`."""
    arrays = []
    for module in _weighted(model):
        arrays += [module.bias.detach().cpu().numpy(), _to_haiku(module.weight.detach().cpu().numpy())]
    return arrays


def _weighted(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]


def _to_torch(weight: np.ndarray) -> np.ndarray:
    """Converts Haiku's layout to PyTorch's: [h, w, in, out] to [out, in, h, w], [in, out] to [out, in].

    The inputs of the first dense layer are reordered from pixels of channels to channels of pixels.
    """
    if weight.ndim == 4:
        return weight.transpose(3, 2, 0, 1)
    if weight.shape[0] == 9216:
        weight = weight.reshape(12, 12, 64, -1).transpose(2, 0, 1, 3).reshape(9216, -1)
    return np.ascontiguousarray(weight.T)


def _to_haiku(weight: np.ndarray) -> np.ndarray:
    """Inverts `_to_torch`."""
    if weight.ndim == 4:
        return weight.transpose(2, 3, 1, 0)
    if weight.shape[1] == 9216:
        weight = weight.reshape(-1, 64, 12, 12).transpose(0, 2, 3, 1).reshape(-1, 9216)
    return weight.T
