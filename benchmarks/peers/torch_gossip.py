"""D-PSGD on a ring as a plain loop over the nodes in PyTorch, which `benchmarks.decentralized` starts as a process.

The file needs only PyTorch and NumPy. It reads the job from a ``.npz`` file (parameters, examples, rate, rounds), and prints
the seconds per round of each repeat. It writes the nodes' parameters of the last repeat to another ``.npz`` file.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy


def build(weights: list[np.ndarray], biases: list[np.ndarray]) -> nn.Sequential:
    modules: list[nn.Module] = [nn.Flatten()]
    for weight, bias in zip(weights, biases, strict=True):
        layer = nn.Linear(*weight.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight.T))
            layer.bias.copy_(torch.from_numpy(bias))
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def main(job: str, result: str) -> None:
    given = np.load(job)
    layers = range(int(given["layers"]))
    weights, biases = [given[f"w{i}"] for i in layers], [given[f"b{i}"] for i in layers]
    x, y = torch.from_numpy(given["x"]), torch.from_numpy(given["y"].astype(np.int64))  # [nodes, batch, ...]
    rate, rounds, nodes = float(given["rate"]), int(given["rounds"]), len(x)
    seconds = []
    for _ in range(int(given["repeats"])):
        models = [build(weights, biases) for _ in range(nodes)]
        start = time.perf_counter()
        for _ in range(rounds):
            gradients = []
            for node, model in enumerate(models):
                loss = cross_entropy(model(x[node]), y[node])
                gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            with torch.no_grad():
                old = [[p.clone() for p in model.parameters()] for model in models]
                for node, model in enumerate(models):
                    left, right = old[node - 1], old[(node + 1) % nodes]
                    for p, own, a, b, gradient in zip(model.parameters(), old[node], left, right, gradients[node], strict=True):
                        p.copy_((own + a + b) / 3 - rate * gradient)
        seconds.append((time.perf_counter() - start) / rounds)
    stacked = [torch.stack([list(model.parameters())[k].detach() for model in models]).numpy() for k in range(2 * len(layers))]
    np.savez(result, *stacked)
    print(json.dumps({"seconds": seconds, "version": torch.__version__, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
