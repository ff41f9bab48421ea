# SPDX-License-Identifier: Apache-2.0
"""Arguments of a wrong type or value are named in the words of the caller, with a hint that can be followed."""

import resource
import sys
import warnings
from pathlib import Path
from typing import get_args, get_type_hints

import harness
import numpy as np
import pytest

import bps_rdma
from bps_rdma import extras
from bps_rdma.errors import BpsError, InvalidArgumentError, TransportError
from bps_rdma.operations.options import ReduceName, ReduceOp
from bps_rdma.operations.prepare import KINDS, prepare

X = np.ones(4, np.float32)

WRONG = [
    ("push_pull(x, name=5)", "name=5 is not a text"),
    ("push_pull(x, name=b'x')", "name=b'x' is not a text"),
    ("push_pull(x, priority='high')", "priority='high' is not a whole number"),
    ("push_pull(x, priority=1 << 40)", "priority=1099511627776 is not a whole number of 32 bits"),
    ("push_pull(x, timeout='3s')", "timeout='3s' is not a number"),
    ("push_pull(x, group=3)", "3 is not a group"),
    ("push_pull(x, op='total')", "'total' is not a reduction"),
    ("push_pull(x, op=['sum'])", "['sum'] is not a reduction"),
    ("push_pull(x, average='yes')", "average='yes' is neither True nor False"),
    ("push_pull(x, average=None)", "average=None is neither"),
    ("push_pull(x, average=x)", "is neither True nor False"),
    ("shard_bounds(-1, 2, 0)", "-1 elements in 2 parts"),
    ("shard_bounds(4, 2, 2)", "4 elements in 2 parts have no part 2"),
    ("shard_bounds(4, 0, 0)", "4 elements in 0 parts"),
    ("push_pull_async(x, priority=1.5)", "priority=1.5"),
    ("push(x, 5)", "name=5"),
    ("reduce_scatter(x, name=5)", "name=5"),
    ("all_gather(x, timeout='3s')", "timeout='3s'"),
    ("push_pull(x, name='\\udc80')", "name='\\udc80' is not a text"),
    ("broadcast(x, root=x)", "is not in the group"),
    ("broadcast(x, root='0')", "root='0' is not in the group"),
    ("send(x, dst=1.0)", "dst=1.0 is not another rank"),
    ("gather(x, root=0.0)", "root=0.0 is not in the group"),
    ("broadcast(x, priority='high')", "priority='high'"),
    ("prepare('push_pull', x, name=5)", "name=5"),
    ("prepare('push_pull', x, timeout='3s')", "timeout='3s'"),
    ("barrier(group=3)", "3 is not a group"),
    ("barrier(timeout='3s')", "timeout='3s'"),
    ("new_group(3)", "3 are not ranks"),
    ("new_group([0.5])", "[0.5] are not ranks"),
    ("new_group([0], name=b'g')", "name=b'g'"),
    ("new_group([0], name=3)", "name=3"),
    ("declare(5, x)", "name=5"),
    ("declare('a', shape=(-1,), dtype='float32')", "(-1,) is not a shape"),
    ("declare('a', shape='ab', dtype='float32')", "'ab' is not a shape"),
    ("declare('a', shape=3, dtype='nonsense')", "'nonsense' is not a dtype"),
    ("declare_many([1])", "list is not a dict"),
    ("wait(3)", "3 is not a list of handles"),
    ("empty(-1)", "-1 is not a shape"),
    ("empty(True)", "True is not a shape"),
    ("empty((2, 2.5))", "(2, 2.5) is not a shape"),
    ("empty((-2, -2))", "(-2, -2) is not a shape"),
    ("empty(None)", "None is not a shape"),
    ("empty(3, 'int16')", "dtype int16 is not supported"),
    ("empty(3, 'complex64')", "dtype complex64 is not supported"),
    ("empty(3, '>f4')", "dtype >f4 is not supported"),
    ("empty(3, 'nonsense')", "'nonsense' is not a dtype"),
    ("empty(10**13)", "more than the memory of the machine"),
    ("empty(10**30)", "bytes are more than any machine has"),
    ("push_pull(x, 5, average=False)", "name=5 is not a text"),
    ("push_pull(x, b'w')", "name=b'w' is not a text"),
    ("broadcast(x, 5, root=0)", "name=5 is not a text"),
    ("push_pull(x, timeout=10**400)", "is not a number"),
    ("push_pull(x, timeout=x)", "is not a number"),
    ("barrier(timeout=x)", "is not a number"),
    ("commit(timeout='3s')", "timeout='3s' is not a number"),
    ("shutdown('3s')", "timeout='3s' is not a number"),
    ("push_pull(x, exact=x)", "is neither True nor False"),
    ("push_pull_many([x], inplace=x)", "is neither True nor False"),
    ("push_pull_many({1: x})", "name=1 is not a text"),
    ("push_pull_many([x], 'm', group=3)", "3 is not a group"),
    ("push_pull_many([x], priority='high')", "priority='high' is not a whole number"),
    ("push_pull_many([x], timeout=x)", "is not a number"),
    ("declare(None, x)", "name=None is not a text"),
    ("declare(['a'], x)", "name=['a'] is not a text"),
    ("new_group([0], name=None)", "name=None is not a text"),
    ("all_to_all(x, sizes=4)", "sizes=4 is no list of whole numbers"),
    ("all_to_all(x[:0].reshape(4, 0), sizes=[4])", "rows of the array have no elements"),
    ("gather(x[:0].reshape(4, 0), root=0, uneven=True)", "rows of the array have no elements"),
    ("all_to_all(x, sizes=[4], out_sizes=4)", "out_sizes=4 is no list of whole numbers"),
    ("all_to_all(x, sizes=[4], out_sizes=['4'])", "out_sizes=['4'] is no list of whole numbers"),
    ("scatter(x, sizes=4, out=x)", "sizes=4 is no list of whole numbers"),
    ("accumulate(x, 'a', staleness=True)", "staleness=True"),
    ("ExactSum(x, 'e').push_pull(divisor=True)", "divisor=True"),
    ("ExactSum(x, 'e').push_pull(average=x)", "is neither True nor False"),
    ("ExactSum(x, 'e').push_pull(timeout=x)", "is not a number"),
]


def test_wrong_arguments_are_named(alone):
    for call, says in WRONG:
        with pytest.raises(BpsError) as caught:
            eval(f"bps.{call}", {"bps": alone, "x": X})
        assert says in caught.value.message, call
        assert caught.value.hint, call
    assert alone.push_pull(X, average=np.False_).tolist() == [1] * 4
    assert alone.push_pull(X, name="w", priority=np.int64(3), timeout=np.float32(9)).tolist() == [1] * 4
    total = alone.ExactSum(X, "e")
    total.add(X)
    assert total.push_pull(divisor=np.int64(2)).tolist() == [0.5] * 4
    with pytest.raises(TypeError, match="multiple values for argument 'average'"):
        total.push_pull(True, average=True)


@pytest.mark.parametrize("value", [None, b"open-sesame", ["open-sesame"], {"open-sesame": 1}])
def test_a_setting_of_a_wrong_type_is_not_made_a_text(value):
    """As a text, `None` would be a secret that everybody guesses."""
    with pytest.raises(InvalidArgumentError, match=f"secret is a {type(value).__name__}, and no text") as caught:
        bps_rdma.init(secret=value)
    assert "open-sesame" not in str(caught.value)


def test_hints_for_arrays_say_what_to_pass(alone):
    frozen = np.ones(3)
    frozen.flags.writeable = False
    for call in (alone.push_pull_inplace, alone.broadcast, lambda out: alone.all_gather(np.ones(3), out=out)):
        with pytest.raises(alone.InvalidTensorError, match="read-only") as caught:
            call(frozen)
        assert caught.value.hint == "pass an array that can be written to; push_pull() leaves its array as it is"
    with pytest.raises(alone.InvalidTensorError, match="dtype >f4") as caught:
        alone.push_pull(np.ones(3, ">f4"))
    assert "array.astype('float32')" in caught.value.hint


def test_masked_arrays_are_refused(alone):
    masked = np.ma.array([1.0, 2.0], mask=[True, False])
    for call in (alone.push_pull, alone.push_pull_inplace, alone.all_gather, alone.broadcast):
        with pytest.raises(alone.InvalidTensorError, match="masked"):
            call(masked)
    assert alone.push_pull(np.asmatrix(X)).tolist() == [[1] * 4]


def test_arrays_of_the_dtypes_of_torch(alone):
    torch = pytest.importorskip("torch")
    assert alone.empty((2, 3), torch.float16).dtype == np.float16
    assert alone.empty(np.int64(3), torch.bool).dtype == np.bool_
    alone.declare("t", shape=torch.Size([3]), dtype=torch.bfloat16)
    for dtype, says in ((torch.int16, "not supported"), (torch.bfloat16, "ml_dtypes")):
        with pytest.raises(alone.InvalidTensorError, match=says):
            alone.empty(3, dtype)
    with pytest.raises(alone.InvalidTensorError, match="not dense") as caught:
        alone.push_pull(torch.ones(3).to_sparse())
    assert "to_dense" in caught.value.hint


def test_choices_are_typed_so_that_a_misspelt_one_is_found_before_it_runs():
    assert set(get_args(ReduceName)) == set(ReduceOp.__members__)
    assert set(get_args(get_type_hints(prepare)["kind"])) == set(KINDS)
    pytest.importorskip("torch")
    import bps_rdma.torch
    from bps_rdma.torch.plan import STRATEGIES

    for takes in (bps_rdma.torch.DistributedDataParallel.__init__, bps_rdma.torch.DistributedOptimizer):
        assert set(get_args(get_type_hints(takes)["strategy"])) == set(STRATEGIES)


def test_the_packages_that_hints_name_are_those_of_the_project():
    found = Path(__file__).parents[3] / "pyproject.toml"
    text = found.read_text(encoding="utf-8")
    for package in extras.PACKAGES.values():
        assert f'"{package}"' in text or f"{package}]" in text
    assert not extras.is_installed("nothing.at.all")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras, "is_installed", lambda _: False)
        with pytest.raises(ImportError, match="-m pip install 'megatron-core"):
            extras.require("megatron.core", "bps_rdma.megatron")


NO_THREADS = """
import os, resource, sys
import bps_rdma
from bps_rdma.launch.process import Children
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for start in (bps_rdma.init, Children):
    try:
        start()
    except bps_rdma.BpsError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NPROC)[1] == 1, reason="no process may be started at all")
def test_a_low_limit_on_processes_is_named(tmp_path):
    done = harness.run_command([sys.executable, "-c", NO_THREADS], env=harness.clean_env(XDG_RUNTIME_DIR=str(tmp_path)))
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith(f"{TransportError.__name__} cannot start a thread: the limit on processes"), lines
    assert "cannot start" in lines[1]
    assert all("ulimit -u" in line for line in lines)


def test_arguments_are_errors_of_the_usual_kinds(alone):
    with pytest.raises(TypeError):
        alone.empty(3, "int16")
    with pytest.raises(ValueError, match="shape"):
        alone.empty(-1)


def test_names_that_never_end_are_warned_of_once(alone):
    def declare(first: int) -> None:
        alone.declare_many({f"step {number}": ((1,), "float32") for number in range(first, first + 65536)})

    with pytest.warns(RuntimeWarning, match=r"65536 names .* 'step 65535'.*use the same names in every step"):
        declare(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        declare(65536)
