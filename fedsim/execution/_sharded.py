"""`Sharded`: rounds on a mesh of devices, several of which train one client."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh

from fedsim import checks
from fedsim.execution._devices import first_devices
from fedsim.execution._execution import Pmap
from fedsim.execution._placement import AXIS
from fedsim.model import WHOLE, Division, Model
from fedsim.rounds import kept_with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharded(Pmap):
    """Runs compiled rounds on a mesh of devices, where ``model`` times ``data`` devices train each client together.

    The mesh has the axes ``"devices"``, over which the clients of a cohort are divided as in `Pmap`, ``"data"``, over which
    each batch of a client is divided, and ``"model"``, over which its parameters are. So a model needs to fit ``model``
    devices, and not a single one. States and memories of clients are divided like the parameters.
    `fedsim.Model.with_shardings` says how these are divided; by default each is along its largest axis that is a multiple of
    ``model``. With one device for each client, this is `Pmap`.

    XLA adds the messages that the local steps of a client need, between the devices of this client. There is one all-reduce of
    the update over the clients in a round. Results are those of one device up to the order of sums.

    Attributes:
      clients: the number of clients that train at a time; None uses all devices.
      model: the number of devices that a client's parameters are divided over.
      data: the number of devices that a client's batches are divided over. Sizes of batches are multiples of it.

    Raises:
      ValueError: JAX has fewer devices, or derivatives of rounds are asked for.

    >>> Sharded(clients=4, model=2, data=1).model
    2
    """

    clients: int | None = None
    model: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, or_none=True, clients=self.clients, remedy="None uses all devices")
        checks.whole(1, model=self.model, data=self.data)

    def mesh(self) -> Mesh:
        devices, of_client = tuple(super().mesh().devices.flat), self.model * self.data
        clients = max(1, len(devices) // of_client) if self.clients is None else self.clients
        if (needed := clients * of_client) > len(devices):
            raise ValueError(
                f"Expected clients * model * data to be at most {len(devices)}, the number of devices, got "
                f"clients={self.clients}, model={self.model}, data={self.data}: use fewer, or on a CPU call "
                f"fedsim.use_all_cores({needed}) before JAX is first used, which --mesh does if it names clients."
            )
        used = devices[:needed] if isinstance(self.devices, tuple) else first_devices(needed)
        # With one device for each client, the mesh is that of `Pmap`, whose devices may also have blocks of the population.
        return _mesh(used, clients, self.data, self.model) if of_client > 1 else _mesh(used, clients)

    def division(self, model: Model | None) -> Division:
        if model is None or self.model * self.data == 1:
            return WHOLE
        known = kept_with(model).setdefault("divisions", {})
        if (sizes := (self.data, self.model)) not in known:
            known[sizes] = model.division({"data": self.data, "model": self.model})
        return known[sizes]


@functools.cache
def _mesh(devices: tuple[jax.Device, ...], *sizes: int) -> Mesh:
    return Mesh(np.array(devices).reshape(sizes), (AXIS, "data", "model")[: len(sizes)])
