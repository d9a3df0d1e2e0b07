"""Collective operations in the text of a compiled program: their sizes, their devices, and whether they lie in a loop."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_OPERATION = re.compile(rf" = (.*?) ({'|'.join(_KINDS)})(?:-start)?\((.*)")
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+)\[([\d,]*)\]")
_PAIRS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})?\}")
_STRIDES = re.compile(r"replica_groups=\[(\d+),\d+\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_LOOP = re.compile(r"\b(?:body|condition)=%?([\w.\-]+)")


class Collective(NamedTuple):
    """A collective operation of a compiled program.

    Attributes:
      kind: such as ``"all-reduce"``.
      bytes: the size of its results on a device.
      groups: the positions in the flattened mesh of the devices that exchange their values with each other; of a
        ``"collective-permute"``, of each sender and receiver. () means all devices, or groups that are not known.
      in_loop: whether it lies in a loop.

    >>> Collective("all-reduce", 4, ((0, 1), (2, 3)), True).between(2), Collective("all-reduce", 4, (), False).between(2)
    (False, True)
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    in_loop: bool

    def between(self, of_client: int) -> bool:
        """Returns whether devices of different clients take part, if each ``of_client`` devices in sequence train one."""
        return not self.groups or any(len({device // of_client for device in group}) > 1 for group in self.groups)


def collectives_in(text: str) -> list[Collective]:
    """Returns the collective operations of a compiled program, where one in a loop is listed once.

    Args:
      text: the program's HLO, see ``jax.stages.Compiled.as_text``.

    >>> collectives_in('''
    ... ENTRY %main (a: f32[2,3]) -> f32[2,3] {
    ...   ROOT %b = f32[2,3]{1,0} all-reduce(%a), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
    ... }''')
    [Collective(kind='all-reduce', bytes=24, groups=((0, 2), (1, 3)), in_loop=False)]
    """
    lines: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[1]
        lines.setdefault(name, []).append(line)
    pending = _LOOP.findall(text)
    in_loops: set[str] = set()
    while pending:
        name = pending.pop()
        if name in lines and name not in in_loops:
            in_loops.add(name)
            pending += re.findall(r"%([\w.\-]+)", "\n".join(lines[name]))
    return [
        Collective(match[2], _num_bytes(match[1]), _groups(match[3]), name in in_loops)
        for name, own in lines.items()
        for line in own
        if (match := _OPERATION.search(line))
    ]


def collectives_of(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Counts the collective operations of a compiled program, by kind.

    Args:
      text: the program's HLO, see ``jax.stages.Compiled.as_text``.

    Returns:
      Those outside of loops and those inside, where each is counted once, however often the loop repeats it.

    >>> collectives_of('''
    ... %step (a: f32[]) -> f32[] {
    ...   ROOT %b = f32[] all-reduce(%a), to_apply=%add
    ... }
    ... ENTRY %main (c: f32[]) -> f32[] {
    ...   %d = f32[] while(%c), condition=%more, body=%step
    ...   ROOT %e = f32[] all-gather(%d)
    ... }''')
    ({'all-gather': 1}, {'all-reduce': 1})
    """
    found = collectives_in(text)
    outside, inside = (Counter(each.kind for each in found if each.in_loop == in_loop) for in_loop in (False, True))
    return dict(outside), dict(inside)


def _num_bytes(types: str) -> int:
    """Returns the size of the arrays of an HLO type.

    >>> _num_bytes("(f32[8,2]{1,0:T(8,128)}, bf16[3]{0}, pred[])")
    71
    """
    return sum(
        int(np.prod([int(size) for size in shape.split(",") if size], dtype=np.int64)) * _width(kind)
        for kind, shape in _ARRAY.findall(types)
    )


def _width(kind: str) -> int:
    if kind in ("pred", "bf16"):
        return 1 if kind == "pred" else jnp.bfloat16.dtype.itemsize
    return -(-int(kind[1:]) // 8)


def _groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices, which XLA lists, describes as a reshaped and transposed range, or by axes of a mesh.

    >>> _groups("%a), replica_groups={{0,2},{1,3}}"), _groups("%a), replica_groups=[2,2]<=[4]")
    (((0, 2), (1, 3)), ((0, 1), (2, 3)))
    >>> _groups("%a), replica_groups=mesh['a'=3,'b'=2], device_ids=([2,3]T(1,0)) {'a'}")
    ((0, 1, 2), (3, 4, 5))
    """
    if match := _STRIDES.search(attributes):
        return _rows(_range(match[2], match[3]).reshape(int(match[1]), -1))
    if match := _AXES.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", match[1])}
        over = [name for name in match[4].split(",") if name]
        if not set(over) <= set(sizes):  # a part of an axis
            return ()
        devices = np.arange(np.prod(list(sizes.values()))) if match[2] is None else _range(match[2], match[3])
        axes = [list(sizes).index(name) for name in over]
        of_group = int(np.prod([sizes[name] for name in over], dtype=int))
        return _rows(np.moveaxis(devices.reshape(list(sizes.values())), axes, range(-len(axes), 0)).reshape(-1, of_group))
    match = _PAIRS.search(attributes)
    listed = re.findall(r"\{([\d,]+)\}", match[1]) if match and match[1] else []
    return tuple(tuple(int(device) for device in group.split(",")) for group in listed)


def _range(shape: str, order: str | None) -> np.ndarray:
    sizes = [int(size) for size in shape.split(",")]
    return np.arange(np.prod(sizes)).reshape(sizes).transpose([int(axis) for axis in order.split(",")] if order else None)


def _rows(devices: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(group) for group in devices.tolist())
