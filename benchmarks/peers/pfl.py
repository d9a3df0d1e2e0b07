"""pfl-research: FederatedAveraging with PyTorch in its simulated backend, weighted by examples, central Adam."""

from __future__ import annotations

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy

from benchmarks import workload
from benchmarks.peers import torch_model


class Counting(torch.nn.Module):
    """The model with the two methods that pfl requires; it counts its steps."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net, self.steps = net, 0

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return cross_entropy(self.net(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        return {}  # the benchmark evaluates nothing


class Contender:
    packages = ("pfl", "torch", "numpy")

    def __init__(self, task: workload.Task) -> None:
        self.data, self.rounds = workload.population(task), 0
        np.random.seed(task.seed)  # pfl draws from NumPy's global generator
        if task.model != "cnn":  # measured: more threads do not help small models, and stall where a core is shared
            torch.set_num_threads(1)
        device = pytorch_ops.get_default_device()
        self.about = {"devices": f"{device}, {torch.get_num_threads()} threads"}
        x, y = (tensor.to(device) for tensor in torch_model.images(self.data))
        offsets = self.data.offsets

        def user(index: int) -> PyTorchTensorDataset:
            start, stop = offsets[index : index + 2]
            order = start + torch.randperm(int(stop - start), device=device)  # pfl itself does not shuffle
            return PyTorchTensorDataset((x[order], y[order]), user_id=str(index))

        users = np.random.permutation(len(self.data.sizes)).tolist()
        dataset = FederatedDataset(user, MinimizeReuseUserSampler(users))
        self.module = Counting(torch_model.build(task).to(device))
        adam = torch.optim.Adam(self.module.parameters(), task.server_lr, betas=(0.9, task.b2), eps=task.eps)
        server = adam if task.server == "adam" else torch.optim.SGD(self.module.parameters(), 1.0)
        self.model = PyTorchModel(self.module, torch.optim.SGD, server)
        self.backend = SimulatedBackend(dataset, dataset, postprocessors=[WeightByDatapoints()])
        self.hyperparams = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=task.client_lr, local_batch_size=task.batch
        )
        self.cohort = task.clients
        self.algorithm = FederatedAveraging()

    def run(self, rounds: int) -> int:
        before, self.rounds = self.module.steps, self.rounds + rounds
        params = NNAlgorithmParams(
            central_num_iterations=self.rounds,  # the algorithm continues from its last iteration
            evaluation_frequency=10**9,
            train_cohort_size=self.cohort,
            val_cohort_size=0,
        )
        self.algorithm.run(params, self.backend, self.model, self.hyperparams, send_metrics_to_platform=False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.module.steps - before

    def save(self, path: str) -> None:
        np.savez(path, *torch_model.leaves(self.module))
