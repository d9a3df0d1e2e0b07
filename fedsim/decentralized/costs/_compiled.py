"""What a compiled program sends, counted from the text of its HLO."""

from __future__ import annotations

import math
import re

import numpy as np

from fedsim.decentralized.costs._exchange import Cost
from fedsim.planning._collectives import collectives_of

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_DEFINITION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)$", re.MULTILINE)
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")  # f32[8,16], pred[], f8e4m3fn[4]
_DEVICES = re.compile(r"(?:num_partitions|replica_count)=(\d+)")
_LISTED = re.compile(r"\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def moved(text: str, workers: int | None = None) -> Cost:
    """Counts the bytes that a compiled program sends between devices.

    A ``collective-permute`` is a round of messages, one for each of its pairs of a source and a target, of the size of its
    operand. Other collective operations name no messages; they count as rings of messages: ``all-gather``, ``reduce-scatter``
    and ``all-to-all`` among n devices as n - 1 rounds, in which a device sends the n-th part of the vector in one piece, and
    ``all-reduce`` as `RingAllReduce`.

    Args:
      text: the HLO of a compiled program, ``jax.stages.Compiled.as_text()``.
      workers: how many of the devices, the first ones, are workers; None: all.

    Raises:
      ValueError: a loop has a collective operation, so that the text does not say how many times it runs.

    >>> import jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("nodes",))
    >>> mean = jax.shard_map(lambda x: jax.lax.pmean(x, "nodes"), mesh=mesh, in_specs=jax.P("nodes"), out_specs=jax.P())
    >>> moved(jax.jit(mean).lower(np.ones([4, 100], np.float32)).compile().as_text())
    Cost(worker=600, busiest=1200, total=2400, rounds=6, longest=600)
    """
    once, repeated = collectives_of(text)
    if repeated:
        raise ValueError(
            f"Expected a program without collective operations in loops, got {', '.join(repeated)} in a loop: the text does "
            "not say how many times it runs; unroll the loop."
        )
    if unknown := set(once) - set(_KINDS):
        raise ValueError(f"Expected only the collective operations {', '.join(_KINDS)}, got {', '.join(unknown)}: use these.")
    devices = math.prod(map(int, _DEVICES.findall(text.partition("\n")[0])))
    definitions = [match.groups() for match in _DEFINITION.finditer(text)]
    types = {name: kind for name, kind, *_ in definitions}
    sent, received = np.zeros([2, devices], np.int64)
    rounds = longest = 0
    for _, _, operation, operands, attributes in definitions:
        operation = operation.removesuffix("-start")
        if operation not in _KINDS:
            continue
        operand = " ".join(types.get(name, "") for name in re.findall(r"[\w.\-]+", operands))
        if operation == "collective-permute":
            pairs = np.array([pair for pair in _numbers(attributes, "source_target_pairs") if pair[0] != pair[1]], int)
            size, steps = _bytes(operand), int(len(pairs) > 0)
            senders, receivers = pairs.reshape(-1, 2).T
        else:
            groups = _groups(attributes, devices)
            members = len(groups[0])
            # An all-to-all may have an operand for every member.
            size = _bytes(operand, members if "reduce" in operation else 1) // (members if operation == "all-to-all" else 1)
            steps = (2 if operation == "all-reduce" else 1) * (members - 1)
            senders = receivers = np.concatenate(groups)
        np.add.at(sent, senders, steps * size)
        np.add.at(received, receivers, steps * size)
        rounds, longest = rounds + steps, longest + steps * size
    return Cost(int(sent[:workers].max()), int((sent + received).max()), int(sent.sum()), rounds, longest)


def _bytes(arrays: str, parts: int = 1) -> int:
    """Returns the bytes of one of equal parts of arrays.

    >>> _bytes("f32[8,16]{1,0} bf16[3] pred[]"), _bytes("f32[10]", parts=4)
    (519, 12)
    """
    total = 0
    for _, bits, shape in _ARRAY.findall(arrays):
        count = -(-math.prod(map(int, filter(None, shape.split(",")))) // parts)
        total += -(-(count * int(bits or 8)) // 8)
    return total


def _numbers(attributes: str, name: str) -> list[list[int]]:
    """Returns the lists of an attribute, such as [[0, 1], [1, 0]] of ``source_target_pairs={{0,1},{1,0}}``."""
    listed = re.search(rf"{name}=\{{((?:\{{[\d,]+\}},?)*)\}}", attributes)
    return [[int(number) for number in group.split(",")] for group in _LISTED.findall(listed[1] if listed else "")]


def _groups(attributes: str, devices: int) -> list[list[int]]:
    """Returns the devices of each group of a collective operation.

    >>> _groups("replica_groups={{0,1},{2,3}}", 4), _groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4), _groups("", 2)
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1]])
    """
    if iota := _IOTA.search(attributes):
        shape, dims, order = ([int(number) for number in each.split(",")] if each else None for each in iota.groups())
        return np.arange(devices).reshape(dims).transpose(order).reshape(shape).tolist()
    return _numbers(attributes, "replica_groups") or [list(range(devices))]
