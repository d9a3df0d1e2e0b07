"""The codec of tf.train.Example, compared with the protobuf library."""

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from fedsim.data import FormatError
from fedsim.formats._example_proto import columns, serialized


@pytest.fixture(scope="module")
def messages():
    """The classes that the protobuf library creates for feature.proto and example.proto, with packed and unpacked lists."""
    field = descriptor_pb2.FieldDescriptorProto
    made = {}
    for package, packed in (("packed", True), ("unpacked", False)):
        file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
        for name, kind in (("BytesList", field.TYPE_BYTES), ("FloatList", field.TYPE_FLOAT), ("Int64List", field.TYPE_INT64)):
            value = file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)
            if name != "BytesList":
                value.options.packed = packed
        feature = file.message_type.add(name="Feature")
        feature.oneof_decl.add(name="kind")
        for number, kind in enumerate(("Bytes", "Float", "Int64"), 1):
            how = {"type": field.TYPE_MESSAGE, "type_name": f".{package}.{kind}List", "oneof_index": 0, "label": 1}
            feature.field.add(name=f"{kind.lower()}_list", number=number, **how)
        features = file.message_type.add(name="Features")
        entry = features.nested_type.add(name="FeatureEntry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=1)
        entry.field.add(name="value", number=2, type=field.TYPE_MESSAGE, type_name=f".{package}.Feature", label=1)
        repeated = {"type": field.TYPE_MESSAGE, "label": field.LABEL_REPEATED}
        features.field.add(name="feature", number=1, type_name=f".{package}.Features.FeatureEntry", **repeated)
        example = file.message_type.add(name="Example")
        example.field.add(name="features", number=1, type=field.TYPE_MESSAGE, type_name=f".{package}.Features", label=1)
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        made[package] = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Example"))
    return made


INTEGERS = [0, 1, 127, 128, 300, 2**31 - 1, 2**31, 2**63 - 1, -1, -300, -(2**63)]


def example_of(messages, how, **features):
    example = messages[how]()
    for name, values in features.items():
        feature = example.features.feature[name]
        kind = {bytes: feature.bytes_list, float: feature.float_list, int: feature.int64_list}[type(values[0])]
        kind.value.extend(values)
    return example.SerializeToString()


@pytest.mark.parametrize("how", ["packed", "unpacked"])
def test_messages_of_protobuf_are_read(messages, how):
    rows = [
        example_of(messages, how, i=INTEGERS, f=[0.5, -1e30, 3.0], t=[b"one"], scalar=[7], pair=[b"", b"x" * 300]),
        example_of(messages, how, i=INTEGERS[::-1], f=[1.5, float("inf"), 0.0], t=[b""], scalar=[-7], pair=[b"a", b"b"]),
    ]
    read = columns(rows)
    np.testing.assert_array_equal(read["i"], [INTEGERS, INTEGERS[::-1]])
    np.testing.assert_array_equal(read["f"], np.array([[0.5, -1e30, 3], [1.5, np.inf, 0]], np.float32))
    assert read["t"].tolist() == [b"one", b""]
    assert read["scalar"].tolist() == [7, -7]
    assert read["pair"].tolist() == [[b"", b"x" * 300], [b"a", b"b"]]
    assert {name: str(array.dtype) for name, array in read.items()} == dict(
        i="int64", f="float32", t="object", scalar="int64", pair="object"
    )


def test_protobuf_reads_the_written_messages(messages):
    written = serialized({"i": np.array(INTEGERS), "small": np.arange(128), "f": np.array([[0.5], [2]]), "t": b"words", "n": 5})
    feature = messages["packed"].FromString(written).features.feature
    assert list(feature["i"].int64_list.value) == INTEGERS
    assert list(feature["small"].int64_list.value) == list(range(128))
    assert list(feature["f"].float_list.value) == [0.5, 2]
    assert list(feature["t"].bytes_list.value) == [b"words"]
    assert list(feature["n"].int64_list.value) == [5]


def test_random_integers_round_trip(messages):
    random = np.random.default_rng(0)
    values = (random.integers(-(2**63), 2**63 - 1, 2000) >> random.integers(0, 64, 2000)).astype(np.int64)
    read = messages["packed"].FromString(serialized({"i": values}))
    assert list(read.features.feature["i"].int64_list.value) == values.tolist()
    np.testing.assert_array_equal(columns([serialized({"i": values})])["i"], values[None])


def test_unknown_fields_are_skipped_and_split_lists_joined():
    one = serialized({"y": np.array([300, 2])})
    unknown = b"\x10\x96\x01" + b"\x1d\0\0\0\0" + b"\x21" + bytes(8) + b"\x2a\x03abc"  # varint, fixed32, fixed64, bytes
    assert columns([unknown + one])["y"].tolist() == [[300, 2]]
    # feature y, whose int64_list is split: [1] packed, then 2 unpacked
    entry = b"\x0a\x01y" + b"\x12\x07" + b"\x1a\x05" + b"\x0a\x01\x01" + b"\x08\x02"
    assert columns([b"\x0a" + bytes([len(entry) + 2]) + b"\x0a" + bytes([len(entry)]) + entry])["y"].tolist() == [[1, 2]]


def test_features_can_be_chosen_shaped_and_narrowed():
    rows = [serialized({"image": np.arange(12), "label": np.array(i)}) for i in range(3)]
    read = columns(rows, {"image": ((2, 2, 3), np.uint8)})
    assert list(read) == ["image"]
    assert read["image"].dtype == np.uint8
    np.testing.assert_array_equal(read["image"], np.tile(np.arange(12).reshape(2, 2, 3), (3, 1, 1, 1)))
    assert list(columns(rows, ["label"])) == ["label"]


@pytest.mark.parametrize(
    ("rows", "features", "message"),
    [
        ([{"x": np.arange(3)}, {"x": np.arange(2)}], None, "'x' has 2 values in example 1, and 3 in example 0"),
        ([{"x": np.arange(3)}, {"y": np.arange(3)}], None, "'x' is empty or missing in example 1, and integers in example 0"),
        ([{"x": np.arange(3)}, {"x": b"abc"}], None, "'x' is bytes in example 1, and integers in example 0"),
        ([{"x": np.array([300])}], {"x": ((1,), np.uint8)}, "'x' has values from 300 to 300, which uint8 cannot represent"),
        ([{"x": np.array([3])}], {"x": ((2,), np.uint8)}, r"'x' has \[\] values per example, not \[2\]"),
        ([{"x": b"text"}], {"x": ((), np.uint8)}, "'x' is object, not uint8"),
        ([{"x": np.array([3])}], ["z"], "'z' is empty or missing"),
    ],
)
def test_examples_that_do_not_form_a_column_are_refused(rows, features, message):
    with pytest.raises(FormatError, match=message):
        columns([serialized(row) for row in rows], features)


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a\x05\x0a\x03",  # lengths that exceed the message
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",  # a length of more than ten bytes
        b"\x0b",  # a group
        b"\x0a\x07\x0a\x05\x0a\x03\xff\xfe\xfd",  # a name that is not UTF-8
        b"\x0a",  # nothing after a tag
    ],
)
def test_bytes_that_are_not_an_example_are_refused(message):
    with pytest.raises(FormatError, match="example 1 is not a complete tf.train.Example"):
        columns([serialized({"x": np.arange(3)}), message])


def test_a_truncated_integer_is_refused():
    entry = b"\x0a\x01y" + b"\x12\x05" + b"\x1a\x03" + b"\x0a\x01\x80"
    with pytest.raises(FormatError, match="Feature 'y': an integer is truncated"):
        columns([b"\x0a\x0c\x0a\x0a" + entry])
