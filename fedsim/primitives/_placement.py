"""`Placement`: a named group of clients, and the devices that their work is divided over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import checks

_NO_MESH = Mesh(np.empty((), dtype=object), ())


@contextlib.contextmanager
def without_mesh_of_context() -> Iterator[None]:
    """A context, or a decorator, without the mesh that the caller has chosen by `jax.set_mesh`.

    JAX refuses programs over another mesh than that one, and fedsim makes a mesh of its own for its clients.

    >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))), without_mesh_of_context():
    ...     jax.sharding.get_abstract_mesh().empty
    True
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:  # There is none, or this is a part of a program over the devices of a mesh.
        yield
        return
    try:
        context: Any = jax.set_mesh(_NO_MESH)
    except ValueError:  # A function is traced.
        context = jax.sharding.use_abstract_mesh(_NO_MESH.abstract_mesh)
    with context:
        yield


def check_context(placement: Placement) -> None:
    """Raises ``ValueError`` in a context of `jax.set_mesh` with explicit axes, where JAX refuses values of another mesh."""
    if axes := jax.sharding.get_abstract_mesh().explicit_axes:
        raise ValueError(
            f"Expected no explicit axes in jax.set_mesh around the placement {placement.name!r}, which is divided over "
            f"devices, got {', '.join(map(str, axes))}: make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * "
            f"{len(axes)}, or call the program outside of the context."
        )


@dataclasses.dataclass(frozen=True)
class Placement:
    """A named group of clients in the wide sense: phones, hospitals, or silos that have clients themselves.

    Attributes:
      name: appears in jaxprs, plans and error messages.
      size: the number of clients. There may be none.
      devices: the devices that the clients are divided over, equally many on each (`jax.shard_map`); None for a single device.

    Raises:
      ValueError: ``name`` is not an identifier, ``size`` is negative or no multiple of the number of devices.

    >>> Placement("clients", 8)
    Placement(name='clients', size=8, devices=None)
    """

    name: str
    size: int
    devices: tuple[jax.Device, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"Expected name to be an identifier, got name={self.name!r}: use a name such as 'clients'.")
        checks.whole(0, size=self.size)
        if self.devices is not None:
            object.__setattr__(self, "devices", tuple(self.devices))
            if not self.devices or self.size % len(self.devices):
                raise ValueError(
                    f"Expected size to be a multiple of the number of devices, got size={self.size} and {len(self.devices)} "
                    "devices: use fewer devices, or add clients whose weight is 0."
                )

    @property
    def size_per_device(self) -> int:
        """The number of clients of each device."""
        return self.size // len(self.devices) if self.devices else self.size

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """The devices as a mesh of one axis with the name of the placement; None for a single device."""
        return Mesh(np.array(self.devices), (self.name,)) if self.devices and len(self.devices) > 1 else None

    def divided(self, stacked: Any) -> Any:
        """Divides an array ``[size, ...]``, traced or not, over the devices."""
        if self.mesh is None:
            return stacked
        check_context(self)
        sharding = NamedSharding(self.mesh, P(self.name))
        with without_mesh_of_context():
            if isinstance(stacked, jax.core.Tracer):
                return jax.lax.with_sharding_constraint(stacked, sharding)
            return jax.device_put(stacked, sharding)
