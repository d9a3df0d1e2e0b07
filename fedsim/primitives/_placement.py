"""`Placement`: a named group of clients, and the devices that their work is divided over."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import checks

AnyMesh = Mesh | AbstractMesh
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


@contextlib.contextmanager
def on_mesh(mesh: AnyMesh) -> Iterator[None]:
    """A context, or a decorator, for programs over ``mesh``: the mesh of the caller's context is this one or none."""
    if _abstract(mesh) == jax.sharding.get_abstract_mesh():
        yield
        return
    with without_mesh_of_context():
        yield


@dataclasses.dataclass(frozen=True)
class Placement:
    """A named group of clients in the wide sense: phones, hospitals, or silos that have clients themselves.

    Attributes:
      name: appears in jaxprs, plans and error messages.
      size: the number of clients. There may be none.
      devices: the devices that the clients are divided over, equally many on each (`jax.shard_map`); None for a single device.
      mesh: instead of ``devices``, a mesh with an axis called ``name``, which the clients are divided over. A client's function
        may divide its arrays over the other axes. If both are None, the mesh of `jax.set_mesh` is used when the program runs,
        provided that it has an axis of that name.

    Raises:
      ValueError: ``name`` is not an identifier; ``size`` is negative or no multiple of the number of devices; ``mesh`` has no
        axis of the name, or one that is manual, or both auto and explicit axes; or it is given together with ``devices``.

    >>> Placement("clients", 8)
    Placement(name='clients', size=8, devices=None, mesh=None)
    """

    name: str
    size: int
    devices: tuple[jax.Device, ...] | None = None
    mesh: AnyMesh | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"Expected name to be an identifier, got name={self.name!r}: use a name such as 'clients'.")
        checks.whole(0, size=self.size)
        if self.devices is not None:
            if self.mesh is not None:
                raise ValueError(f"Expected devices or mesh, got both for {self.name!r}: leave devices out.")
            object.__setattr__(self, "devices", tuple(self.devices))
            if not self.devices or self.size % len(self.devices):
                raise ValueError(
                    f"Expected size to be a multiple of the number of devices, got size={self.size} and {len(self.devices)} "
                    "devices: use fewer devices, or add clients whose weight is 0."
                )
            if len(self.devices) > 1:
                object.__setattr__(self, "mesh", Mesh(np.array(self.devices), (self.name,)))
        if self.mesh is not None:
            _check_axis(self.name, self.size, self.mesh)

    @property
    def size_per_device(self) -> int:
        """The number of clients of each device."""
        return self.size if self.mesh is None else self.size // self.mesh.shape[self.name]

    @property
    def is_explicit(self) -> bool:
        """Whether types of arrays say how they are divided over the clients' axis of the mesh."""
        return self.mesh is not None and self.name in _abstract(self.mesh).explicit_axes

    def in_context(self) -> Placement:
        """Returns the placement on its own mesh, or on that of `jax.set_mesh` if this has an axis of its name.

        In a client's function of another placement it is on the mesh in which the axis of that placement is manual.

        Raises:
          ValueError: the mesh of the context does not allow it.
        """
        context = jax.sharding.get_abstract_mesh()
        if self.mesh is None:
            return self._on(context) if self.name in context.axis_names else self
        own = _abstract(self.mesh)
        if context.manual_axes:
            if (own.axis_names, own.axis_sizes) != (context.axis_names, context.axis_sizes):
                raise ValueError(
                    f"Expected the placement {self.name!r} to be on the mesh of the function that uses it, "
                    f"{_described(context)}, got {_described(own)}: use axes of one mesh for nested placements, or divide only "
                    "one of them."
                )
            return self._on(context)
        if context.explicit_axes and context != own:
            raise ValueError(
                f"Expected no explicit axes in jax.set_mesh around the placement {self.name!r}, which is divided over another "
                f"mesh, got {_described(context)}: give one of its axes the name {self.name!r} and leave devices and mesh out, "
                f"make it with axis_types=(jax.sharding.AxisType.Auto,) * {len(context.axis_names)}, or call the program "
                "outside of the context."
            )
        return self

    def _on(self, mesh: AnyMesh) -> Placement:
        return dataclasses.replace(self, devices=None, mesh=mesh)

    def of_client(self) -> contextlib.AbstractContextManager[None]:
        """A context with the mesh that a client's function sees, in which the axis of the clients is manual."""
        return contextlib.nullcontext() if self.mesh is None else jax.sharding.use_abstract_mesh(self._mesh_of_client)

    def type_in_client(self, x: Any, axes: int) -> Any:
        """Returns the type that an array has in a client's function, without its first axes (0 or 1)."""
        kind = jax.typeof(x)
        sharding = None
        if kind.sharding.mesh.explicit_axes:
            mesh = kind.sharding.mesh if self.mesh is None else self._mesh_of_client
            sharding = NamedSharding(mesh, P(*kind.sharding.spec[axes:]))
        return jax.core.ShapedArray(kind.shape[axes:], kind.dtype, sharding=sharding)

    @property
    def _mesh_of_client(self) -> AbstractMesh:
        assert self.mesh is not None
        return _abstract(self.mesh).update_axis_types({self.name: AxisType.Manual})

    def divided(self, stacked: Any) -> Any:
        """Divides an array ``[size, ...]``, traced or not, over the devices, and leaves its other axes as they are."""
        if self.mesh is None:
            return stacked
        with on_mesh(self.mesh):
            if isinstance(stacked, jax.core.Tracer):
                if self.is_explicit:
                    return jax.sharding.reshard(stacked, NamedSharding(self.mesh, self._spec(jax.typeof(stacked).sharding)))
                others = [P.UNCONSTRAINED] * (stacked.ndim - 1)
                return jax.lax.with_sharding_constraint(stacked, NamedSharding(self.mesh, P(self.name, *others)))
            spec = self._spec(getattr(stacked, "sharding", None))
            return jax.device_put(stacked, spec if isinstance(self.mesh, AbstractMesh) else NamedSharding(self.mesh, spec))

    def shown(self, x: Any) -> Any:
        """Returns a result of a primitive, divided as it is, such that an enclosing `jax.jit` sees the devices.

        It does not look into primitives, but sees the mesh of `jax.set_mesh` and that of explicit types.
        """
        if not isinstance(self.mesh, Mesh) or self.is_explicit or not isinstance(x, jax.core.Tracer):
            return x
        with on_mesh(self.mesh):
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*[P.UNCONSTRAINED] * x.ndim)))

    def whole(self, stacked: Any) -> Any:
        """Returns an array ``[size, ...]`` that is not divided over the clients' axis, if types say how arrays are divided."""
        if self.mesh is None or not self.is_explicit:
            return stacked
        return jax.sharding.reshard(stacked, NamedSharding(self.mesh, P(None, *jax.typeof(stacked).sharding.spec[1:])))

    def _spec(self, sharding: Any) -> P:
        """Returns how an array ``[size, ...]`` is divided that so far has this sharding."""
        assert self.mesh is not None
        same = isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == self.mesh.axis_names
        others = sharding.spec[1:] if same else ()
        return P(self.name, *(None if self.name in np.atleast_1d(axes) else axes for axes in others))


def _abstract(mesh: AnyMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def _described(mesh: AbstractMesh) -> str:
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return "a mesh with axes " + ", ".join(f"{name}={size} ({kind.name.lower()})" for name, size, kind in axes)


def _check_axis(name: str, size: int, mesh: AnyMesh) -> None:
    own = _abstract(mesh)
    if name not in own.axis_names:
        raise ValueError(
            f"Expected mesh to have an axis {name!r}, the name of the placement, got {_described(own)}: use the name of an "
            "axis."
        )
    if name in own.manual_axes:
        raise ValueError(
            f"Expected the axis {name!r} of the mesh to be auto or explicit, got {_described(own)}: call the program outside "
            "of the map or the jax.shard_map that has divided this axis already."
        )
    if own.auto_axes and own.explicit_axes:
        raise ValueError(
            f"Expected the axes of the mesh to be all auto or all explicit, got {_described(own)}: make it with axis_types="
            f"(jax.sharding.AxisType.Auto,) * {len(own.axis_names)}."
        )
    if size % mesh.shape[name]:
        raise ValueError(
            f"Expected size to be a multiple of {mesh.shape[name]}, the size of the axis {name!r} of the mesh, got "
            f"size={size}: use a smaller axis, or add clients whose weight is 0."
        )
