"""``tf.train.Example`` messages without TensorFlow: a reader and a writer of the protocol buffer's wire format.

An Example is a map from names to features, and a feature is a list of byte strings, of float32 or of int64
(`tensorflow/core/example/feature.proto`). In the wire format, every field is ``varint(number << 3 | type)`` followed by its
value; see https://protobuf.dev/programming-guides/encoding. Lists of numbers may be packed or not; unknown fields are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedsim.data import FormatError
from fedsim.formats._source import Columns, Features, locating_errors, selected, texts

_BYTES, _FLOAT, _INT = 1, 2, 3  # field numbers of Feature
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while byte >= 0x80:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise FormatError("an integer of more than ten bytes")
    return value, at + 1


def _fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields ``(number, wire type, start, stop)`` of each field in ``data[at:stop]``; its value is ``data[start:stop]``."""
    while at < stop:
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == _LENGTH:
            length, at = _varint(data, at)
            end = at + length
        elif wire == _VARINT:
            _, end = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            end = at + (4 if wire == _FIXED32 else 8)
        else:
            raise FormatError(f"no field of a tf.train.Example has wire type {wire}")
        if end > stop:
            raise FormatError("a field is longer than its message")
        yield tag >> 3, wire, at, end
        at = end


def _split(data: bytes) -> dict[str, tuple[int, list[bytes]]]:
    """Returns each feature's kind and its pieces: byte strings, or ranges of float32s or of varints."""
    features: dict[str, tuple[int, list[bytes]]] = {}
    for number, wire, start, stop in _fields(data, 0, len(data)):
        if number != 1 or wire != _LENGTH:
            continue
        for entry, entry_wire, entry_start, entry_stop in _fields(data, start, stop):
            if entry == 1 and entry_wire == _LENGTH:
                name, kind, pieces = _feature(data, entry_start, entry_stop)
                features[name] = kind, pieces
    return features


def _feature(data: bytes, start: int, stop: int) -> tuple[str, int, list[bytes]]:
    """Parses one entry of the map: its name, kind and pieces."""
    name, kind = "", 0
    pieces: list[bytes] = []
    for number, wire, at, end in _fields(data, start, stop):
        if wire != _LENGTH:
            continue
        if number == 1:
            name = data[at:end].decode()
        elif number == 2:
            for field, field_wire, low, high in _fields(data, at, end):
                if field_wire != _LENGTH or field not in (_BYTES, _FLOAT, _INT):
                    continue
                if field != kind:
                    kind, pieces = field, []
                single = (_LENGTH, _FIXED32, _VARINT)[kind - 1]
                for value, value_wire, first, last in _fields(data, low, high):
                    if value == 1 and value_wire in (single, _LENGTH):
                        pieces.append(data[first:last])
    return name, kind, pieces


def _integers(raw: bytes, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decodes concatenated varints to ``int64 [m]``, and counts those before each of ``ends`` (byte positions)."""
    values = np.frombuffer(raw, np.uint8)
    last = values < 0x80
    if last.all():
        return values.astype(np.int64), ends
    stops = np.flatnonzero(last)
    if not last[ends[ends > 0] - 1].all():
        raise FormatError("an integer is truncated")
    starts = np.concatenate([[0], stops[:-1] + 1])
    lengths = stops - starts + 1
    if lengths.max() > 10:
        raise FormatError("an integer of more than ten bytes")
    position = np.arange(len(values)) - np.repeat(starts, lengths)
    shifted = (values & 0x7F).astype(np.uint64) << (7 * position).astype(np.uint64)
    return np.add.reduceat(shifted, starts).view(np.int64), np.searchsorted(stops, ends)


def columns(examples: Sequence[bytes], features: Features = None) -> Columns:
    """Parses the serialized Examples of one client to columns ``[n, ...]``.

    Args:
      examples: at least one message.
      features: the features to read; by default all features of the first Example, as int64, float32 or bytes. Features of one
        value have shape ``[n]``, those of k values ``[n, k]``.

    Raises:
      FormatError: a message is not an Example; a feature is missing in a message, or has another type or number of values.
    """
    parsed: list[dict[str, tuple[int, list[bytes]]]] = []
    for example, data in enumerate(examples):
        try:
            parsed.append(_split(data))
        except (FormatError, IndexError, UnicodeDecodeError) as error:
            raise FormatError(f"example {example} is not a complete tf.train.Example ({error})") from None
    return selected({name: _column(name, parsed) for name in features or parsed[0]}, features)


def _column(name: str, parsed: list[dict[str, tuple[int, list[bytes]]]]) -> np.ndarray:
    kind = parsed[0].get(name, (0,))[0]
    pieces: list[list[bytes]] = []
    for example, features in enumerate(parsed):
        this_kind, these_pieces = features.get(name, (0, []))
        if this_kind != kind or not kind:
            names = {0: "empty or missing", _BYTES: "bytes", _FLOAT: "floats", _INT: "integers"}
            raise FormatError(f"Feature {name!r} is {names[this_kind]} in example {example}, and {names[kind]} in example 0.")
        pieces.append(these_pieces)
    if kind == _BYTES:
        flat: np.ndarray = texts([value for each in pieces for value in each])
        ends = np.cumsum([len(each) for each in pieces])
    else:
        joined = [b"".join(each) for each in pieces]
        raw, ends = b"".join(joined), np.cumsum([len(each) for each in joined])
        if kind == _INT:
            with locating_errors(f"Feature {name!r}"):
                flat, ends = _integers(raw, ends)
        elif np.any(ends % 4):
            raise FormatError(f"Feature {name!r} has floats that are not four bytes each.")
        else:
            flat, ends = np.frombuffer(raw, "<f4").astype(np.float32, copy=False), ends // 4
    counts = np.diff(ends, prepend=0)
    if (counts != counts[0]).any():
        example = int(np.flatnonzero(counts != counts[0])[0])
        raise FormatError(
            f"Feature {name!r} has {counts[example]} values in example {example}, and {counts[0]} in example 0, but the "
            "rows of a column must have the same length: leave the feature out by features=[...]."
        )
    return flat if counts[0] == 1 else flat.reshape(len(parsed), counts[0])


def _encoded(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _message(number: int, content: bytes) -> bytes:
    return _encoded(number << 3 | _LENGTH) + _encoded(len(content)) + content


def _varints(values: np.ndarray) -> bytes:
    unsigned = values.astype(np.int64).view(np.uint64)
    if not unsigned.size or unsigned.max() < 0x80:
        return unsigned.astype(np.uint8).tobytes()
    groups = (unsigned[:, None] >> np.arange(0, 70, 7, dtype=np.uint64)).astype(np.uint8) & 0x7F
    lengths = np.maximum(1, 10 - (groups[:, ::-1] != 0).argmax(1))
    lengths[~groups.any(1)] = 1
    position = np.arange(10)
    groups |= np.where(position < lengths[:, None] - 1, 0x80, 0).astype(np.uint8)
    return groups[position < lengths[:, None]].tobytes()


def serialized(example: Mapping[str, Any]) -> bytes:
    """Serializes an example ``{feature: array or bytes}`` as a ``tf.train.Example``; arrays are flattened."""
    entries = []
    for name, value in example.items():
        if isinstance(value, bytes):
            kind, content = _BYTES, _message(1, value)
        else:
            array = np.asarray(value).reshape(-1)
            if array.dtype.kind == "f":
                kind, content = _FLOAT, _message(1, array.astype("<f4").tobytes())
            else:
                kind, content = _INT, _message(1, _varints(array))
        entries.append(_message(1, _message(1, name.encode()) + _message(2, _message(kind, content))))
    return _message(1, b"".join(entries))
