"""What a strategy and its peers send: one value each, frames together, and arrays as Flower writes them."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message.typeddict import TypedDict
from raising import raises
from routing_peers import client, sets_its_values_once, zeros

from flower_privdec.common.errors import RunError
from flower_privdec.flower import LocalGrid, PushSum
from flower_privdec.flower.mods import peer_messages
from flower_privdec.flower.mods.peer_messages import (
    SAYS,
    SMALL,
    PeerReport,
    PeerRequest,
    array_of,
    given_record,
    pack_bytes,
    unpack_bytes,
    views_of,
)
from flower_privdec.pushsum.exactly_once import RefusedError

ARRAYS = {
    "a matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a number": np.array(2.5),
    "no numbers": np.zeros((0, 3), np.float64),
    "counters": np.array([1, -2]),
    "a mask": np.array([True, False]),
    "half": np.ones((2, 1, 2), np.float16),
    "big-endian": np.arange(3, dtype=">f8"),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "every other": np.arange(10.0)[::2],
    "words": np.array(["a", "bc"]),
}


@pytest.mark.parametrize("value", ARRAYS.values(), ids=ARRAYS)
def test_an_array_reads_as_flowers_own(value: np.ndarray) -> None:
    ours = array_of(value)
    theirs = Array(value)
    assert (ours.dtype, ours.shape, ours.stype) == (theirs.dtype, theirs.shape, theirs.stype)
    for array in (ours, theirs):
        (view,) = views_of(ArrayRecord({"it": array})).values()
        for read in (view, ours.numpy()):
            assert (read.dtype, read.shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(read, value)


@pytest.mark.parametrize("value", ARRAYS.values(), ids=ARRAYS)
def test_a_given_array_is_flowers_whatever_an_app_does(value: np.ndarray) -> None:
    def given() -> Array:
        return given_record({"it": value})["it"]

    for read in (given().numpy(), views_of(ArrayRecord({"it": given()}))["it"]):
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(read, value)

    # An app may write into what it reads, and replace the bytes.
    array = given()
    array.numpy()[...] = np.zeros_like(value)
    np.testing.assert_array_equal(array.numpy(), value)
    array.data = array_of(np.zeros(2)).data
    for read in (array.numpy(), views_of(ArrayRecord({"it": copy.copy(array)}))["it"]):
        np.testing.assert_array_equal(read, np.zeros(2))

    # It may send it or keep it: what arrives is of Flower's class.
    theirs = array_of(value)
    assert (given().deflate(), given().object_id) == (theirs.deflate(), theirs.object_id)
    assert type(pickle.loads(pickle.dumps(given()))) is Array
    assert given() == theirs == given()
    assert given() != array_of(np.zeros(5))


def damaged() -> dict[str, bytes]:
    whole = Array(np.arange(4.0)).data
    negative = whole.replace(b"(4,)", b"(-4,)").replace(b"), } ", b"), }")
    return {
        "nothing": b"",
        "no array": b"no array",
        "cut": whole[:-1],
        "more": whole + b"\0",
        "more numbers than there are": whole.replace(b"(4,)", b"(9,)"),
        "fewer than none": negative,
        "an endless header": whole[:8] + b"\xff\xff" + whole[10:],
        "a pickle": whole.replace(b"'<f8'", b"'|O' "),
    }


@pytest.mark.parametrize("data", damaged().values(), ids=damaged())
def test_damaged_arrays_read_as_numpy_reads_them(data: bytes) -> None:
    array = Array("float64", (4,), "numpy.ndarray", data)
    found = []
    for read in (array.numpy, lambda: views_of(ArrayRecord({"it": array}))["it"]):
        try:
            found.append(str(read().tolist()))
        except (ValueError, EOFError) as error:
            found.append(type(error).__name__)
    assert found[0] == found[1]


def test_frames_arrive_whole_with_their_names() -> None:
    frames = {"1.2": b"", "ledger of 3": bytes(range(256)), "4.5": bytes(SMALL + 1), "öß": b"\0" * SMALL, "6": b"x"}
    record = pack_bytes(frames)
    assert len(record) == 2
    assert dict(unpack_bytes(record)) == frames
    assert unpack_bytes(None) == unpack_bytes(pack_bytes({})) == []


@pytest.mark.parametrize("changed", [lambda data: data[:-1], lambda data: data + b"\1", lambda data: b"\xff" * 40])
def test_frames_that_are_no_frames_are_refused(changed: Any) -> None:
    (data,) = (array.data for array in pack_bytes({"1.2": b"content"}).values())
    content = changed(data)
    record = ArrayRecord({peer_messages.SMALL_FRAMES: Array("uint8", (len(content),), "privdec.share", content)})
    with raises(RefusedError, "frame.length"):
        unpack_bytes(record)


def test_empty_frames_take_little_memory() -> None:
    content = bytes(peer_messages.LENGTHS.size * (peer_messages.MOST_FRAMES + 1))
    record = ArrayRecord({peer_messages.SMALL_FRAMES: Array("uint8", (len(content),), "privdec.share", content)})
    with raises(RefusedError, "frame.count"):
        unpack_bytes(record)


def test_a_message_is_read_as_it_was_written() -> None:
    written = PeerRequest(
        "round",
        run='a "run"\né',
        round_index=2**63 - 1,
        weights=[0.1, 5e-324],
        receivers=[1, 2],
        acknowledgements=[bytes(range(256)), b""],
        disagreement=float("inf"),
    )
    record = written.record()
    assert len(record) == 1
    assert PeerRequest.of(RecordDict({SAYS: record}), "", "") == written
    report = PeerReport(0, 3, key=b"\xff\x00", epsilon=float("inf"), refused_keys=["a"], refused=["b"])
    assert PeerReport.of(RecordDict({SAYS: report.record()}), "", "") == report


WRONG: dict[str, Any] = {
    "text": '{"peer": 0, "n_peers": 2}',
    "no JSON": b"\xff{",
    "a list": b"[1, 2]",
    "a number": b"7",
    "deep": b"[" * 10**6,
    "too little": b'{"peer": 0}',
    "more": b'{"peer": 0, "n_peers": 2, "other": 1}',
    "a truth": b'{"peer": true, "n_peers": 2}',
    "a float": b'{"peer": 0.0, "n_peers": 2}',
    "a large number": b'{"peer": 0, "n_peers": 9223372036854775808}',
    "a small number": b'{"peer": 0, "n_peers": 2, "incarnation": -9223372036854775809}',
    "a long number": b'{"peer": 0, "n_peers": 1' + b"0" * 5000 + b"}",
    "large in a list": b'{"peer": 0, "n_peers": 2, "mean_of": [1, 9223372036854775808]}',
    "two types": b'{"peer": 0, "n_peers": 2, "mean_of": [1, "1"]}',
    "no bytes": '{"peer": 0, "n_peers": 2, "key": "\u20ac"}'.encode(),
    "a number of bytes": b'{"peer": 0, "n_peers": 2, "key": 7}',
    "no list of bytes": b'{"peer": 0, "n_peers": 2, "acknowledgements": 7}',
    "words for a list": b'{"peer": 0, "n_peers": 2, "acknowledgements": "abc"}',
    "half a character": b'{"peer": 0, "n_peers": 2, "stopped": "\\ud800"}',
    "half a character in a list": b'{"peer": 0, "n_peers": 2, "local": ["a", "\\udfff"]}',
    "lists in lists": b'{"peer": 0, "n_peers": 2, "mean_of": [[1]]}',
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_what_is_no_report_is_refused(fields: Any) -> None:
    content = RecordDict({SAYS: ConfigRecord({"fields": fields})})
    with raises(RunError, "test.code", "the remedy"):
        PeerReport.of(content, "the remedy", "test.code")


def test_unequal_lists_are_refused() -> None:
    fields = json.dumps({"peer": 0, "n_peers": 2, "refused": ["a"]}).encode()
    with raises(RunError, "test.code", "differ in length"):
        PeerReport.of(RecordDict({SAYS: ConfigRecord({"fields": fields})}), "the remedy", "test.code")


def test_a_message_costs_few_dictionary_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower checks each value that is put into a record in Python, so a small model costs what it has of these."""
    writes = 0
    put = TypedDict.__setitem__

    def counted(self: Any, key: Any, value: Any) -> None:
        nonlocal writes
        writes += 1
        put(self, key, value)

    monkeypatch.setattr(TypedDict, "__setitem__", counted)
    n_peers, rounds = 4, 6
    PushSum().start(LocalGrid(client(sets_its_values_once), n_peers), zeros(), rounds)
    messages = 2 * n_peers * rounds
    assert messages * 10 < writes < messages * 26
