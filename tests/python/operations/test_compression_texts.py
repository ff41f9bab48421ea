# SPDX-License-Identifier: Apache-2.0
"""Texts of compression are for settings: a program that passes one works, and is told the object."""

import warnings
from typing import Any

import harness
import numpy as np
import pytest
from reference.codecs import METHODS

import bps_rdma
from bps_rdma import BFloat16, Compression, Dithering, Int8, OneBit, RandomK, TopK, Uncompressed

OBJECTS = [
    Int8(),
    BFloat16(momentum=0.5),
    TopK(k=100, feedback=True, everywhere=True),
    RandomK(k=0.25, seed=2**64 - 1),
    OneBit(scaling=False),
    Dithering(k=7, partition="natural", normalize="l2"),
    Uncompressed(),
]


@pytest.mark.parametrize("how", OBJECTS, ids=lambda how: how.text)
def test_a_text_is_its_object(how: Compression) -> None:
    assert Compression.from_text(how.text) == how
    assert eval(how.spelled) == how


def test_every_method_has_an_object() -> None:
    assert [Compression.from_text(method).text for method in METHODS] == list(METHODS)


def test_what_is_no_method_is_refused() -> None:
    for wrong in ("zip", "int8:k=3", "topk:k=-1", "none:feedback=1", ""):
        with pytest.raises(bps_rdma.InvalidArgumentError):
            Compression.from_text(wrong)


@harness.on_ranks(workers=1)
def test_texts_warn_where_they_stand(bps: Any) -> None:
    array = np.ones(4, np.float32)
    calls = [
        lambda: bps.push_pull(array, name="a", compression="int8:feedback=1"),
        lambda: bps.push_pull_async_inplace(array, name="a", compression="int8:feedback=1").wait(),
        lambda: bps.declare("b", array, compression="int8:feedback=1"),
        lambda: bps.push_pull_many({"a": array}, compression="int8:feedback=1"),
        lambda: bps.reduce_scatter(array, name="c", compression="int8:feedback=1"),
        lambda: bps.prepare("push_pull", array, name="a", compression="int8:feedback=1"),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            call()
            call()
        (one,) = told
        assert one.category is DeprecationWarning
        assert one.filename == __file__
        assert one.lineno == call.__code__.co_firstlineno
        assert "a program passes compression=bps_rdma.Int8(feedback=True)" in str(one.message)
    with pytest.warns(DeprecationWarning, match="a program passes exact=True"):
        bps.push_pull(array, name="e", compression="exact")
    byteps = {"byteps_compressor_type": "int8", "byteps_error_feedback_type": "vanilla"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for how in (byteps, Int8(feedback=True), None):
            bps.push_pull(array, name="a", compression=how)
            bps.push_pull_many({f"of {how}": array}, compression=how)
