"""What a user sees of the public classes: names, representations, errors of wrong arguments."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import numpy as np
import pytest

import moolink
from moolink.accumulate import AccumulatorBase
from moolink.accumulate.options import AccumulatorOptions
from moolink.env_pool import EnvPool
from tests.env_pool import pool_environments as environments
from tests.numpy_accumulator import NumpyAccumulator
from tests.waiting import TIMEOUT, until

# --- exports


def test_all_that_is_exported_is_there_and_documented() -> None:
    for name in moolink.__all__:
        assert getattr(moolink, name).__doc__, name


def test_types_that_only_the_core_or_a_submodule_had() -> None:
    import moolink.torch

    assert issubclass(moolink.StateError, moolink.Error)
    assert moolink.torch.TrainingStep.__doc__
    with moolink.Rpc("peer") as rpc:
        assert rpc.stats().keys() == moolink.reports.RpcStats.__annotations__.keys()


def test_what_is_internal_is_not_offered() -> None:
    assert {"define_streamed", "define_confined"}.isdisjoint(dir(moolink.Rpc))
    with moolink.Rpc("peer") as rpc, moolink.Group(rpc, "group") as group:
        assert not hasattr(group, "core")
    with pytest.raises(TypeError, match=r"use EnvPool\.step"):
        moolink.env_pool.EnvStepper()


def test_the_module_has_the_names_that_most_programs_need() -> None:
    assert len(moolink.__all__) <= 40


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Queue", ": it is moolink.rpc.Queue"),
        ("EnvPool", ": it is moolink.env_pool.EnvPool"),
        ("PeerInfo", ": it is moolink.reports.PeerInfo"),
        ("ordered_sum", ": it is moolink.accumulate.ordered_sum"),
        ("RpcError", ": it is moolink.compat.moolib.RpcError"),
        ("Brokr", ": did you mean 'Broker'?"),
        ("_Broker", ""),
    ],
)
def test_a_name_that_is_elsewhere_is_found(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"no attribute {name!r}{meant}") + "$"):
        getattr(moolink, name)


def test_the_names_of_the_hints_are_where_they_say() -> None:
    for module, names in moolink._ELSEWHERE.items():
        assert set(names) <= set(importlib.import_module(f"moolink.{module}").__all__)
        assert not set(names) & set(moolink.__all__)


def test_public_classes_of_the_core_bear_the_name_of_the_package() -> None:
    assert moolink.Future.__module__ == "moolink"
    for kind in (moolink.rpc.Lent, moolink.rpc.RpcDeferredReturn, moolink.rpc.Stream):
        assert kind.__module__ == "moolink.rpc"


# --- repr


def test_repr_of_peers_and_calls() -> None:
    with moolink.Rpc("server") as server, moolink.Rpc("client", timeout=TIMEOUT) as client:
        deferred: list[moolink.rpc.RpcDeferredReturn] = []
        server.define_deferred("later", lambda reply: deferred.append(reply))
        address = server.listen("127.0.0.1:0")[0]
        assert repr(server) == f"<moolink.Rpc 'server' at {address}, connected to 0 peers>"
        client.connect(address)
        future = client.async_("server", "later")
        until(lambda: bool(deferred), "the call")
        assert repr(future) == "<moolink.Future of call of 'later' at peer 'server', pending>"
        assert repr(deferred[0]) == "<moolink.rpc.RpcDeferredReturn of 'later', pending>"
        deferred[0](1)
        assert future.result() == 1
        assert repr(future).endswith(", done>")
        assert repr(deferred[0]).endswith(", replied>")
        missing = client.async_("server", "nothing")
        missing.wait()
        assert repr(missing).endswith("'server', NoSuchFunction>")
        assert repr(client).endswith(", connected to 1 peer>")
    assert repr(server) == "<moolink.Rpc 'server', closed>"


def test_repr_of_groups_and_accumulators() -> None:
    with moolink.Broker(first=True) as broker, moolink.Rpc("alice") as rpc:
        address = broker.listen("127.0.0.1:0")[0]
        assert repr(broker) == f"<moolink.Broker 'broker' at {address}, 0 groups>"
        rpc.connect(address)
        with moolink.Group(rpc, "pong") as group:
            assert repr(group) == "<moolink.Group 'pong', no view yet>"
            until(group.update, "the group")
            epoch = group.epoch()
            assert repr(group) == f"<moolink.Group 'pong', membership {epoch}, members alice>"
            assert repr(broker).endswith(", 1 group>")
            future = group.all_reduce("total", np.ones(3))
            future.result()
            assert "all_reduce 'total'" in repr(future)
            with NumpyAccumulator("model", np.zeros(3), group) as accumulator:
                assert repr(accumulator).endswith(
                    "NumpyAccumulator 'model' in group 'pong', version 0, without a leader>"
                )
        assert repr(group) == "<moolink.Group 'pong', closed>"
    assert repr(broker) == "<moolink.Broker 'broker', closed>"


def test_repr_of_the_data_plane() -> None:
    with moolink.env_pool.EnvPool(environments.Counter, 2, 4, 3) as pool:
        assert repr(pool) == "<moolink.env_pool.EnvPool of 3 x 4 environments in 2 processes, open>"
    assert repr(pool).endswith(", closed>")
    queue = moolink.rpc.Queue(max_size=5)
    queue.enqueue(1)
    assert repr(queue) == "<moolink.rpc.Queue, 1 of at most 5 waiting>"
    queue.close()
    assert repr(queue).endswith(", closed>")
    batcher = moolink.Batcher(3)
    batcher.stack(np.zeros(1))
    assert repr(batcher) == "<moolink.Batcher, 0 batches waiting, 1 of 3 rows in the next one>"


def test_repr_in_a_forked_child() -> None:
    with moolink.Rpc("parent") as rpc, moolink.Group(rpc, "group") as group:
        pid = os.fork()
        if pid == 0:
            said = repr(rpc), repr(group)
            expected = "<moolink.Rpc of the parent process>", "<moolink.Group 'group', closed>"
            os._exit(said != expected)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- wrong arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: moolink.Rpc(foo=1), r"Rpc has no keyword argument 'foo'\. It has name, arrays"),
        (lambda: moolink.Rpc(time_out=1), "'time_out': did you mean 'timeout'"),
        (lambda: moolink.Broker(frist=True), "Broker has no .* did you mean 'first'"),
        (lambda: moolink.Group(nam="a"), "Group has no .* did you mean 'name'"),
        (lambda: moolink.rpc.Queue(maxsize=1), "Queue has no .* did you mean 'max_size'"),
        (lambda: moolink.Replay([], sed=1), "Replay has no .* did you mean 'seed'"),
        (lambda: moolink.Batcher(1, max_batch=1), "did you mean 'max_batches'"),
        (
            lambda: moolink.env_pool.EnvPool(environments.Counter, 1, 1, on_crsh="raise"),
            "EnvPool has no .* did you mean 'on_crash'",
        ),
    ],
)
def test_an_unknown_keyword_names_the_known_ones(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rpc: moolink.rpc.Queue(max_size=1.5), r"max_size must be an integer, got 1\.5"),
        (lambda rpc: moolink.Batcher("3"), "size must be an integer, got '3'"),
        (lambda rpc: moolink.Batcher(3, dim=None), "dim must be an integer, got None"),
        (
            lambda rpc: EnvPool(environments.Counter, 1, 2.5),
            "batch_size must be an int",
        ),
        (lambda rpc: moolink.VectorEnv(environments.Counter, 2.5), "num_envs must be an integer"),
        (lambda rpc: moolink.VectorEnv("Counter"), "create_env must be callable, or several"),
        (lambda rpc: moolink.Publisher(rpc, "w", keep=None), "keep must be an integer, got None"),
        (lambda rpc: moolink.TrajectoryWriter(rpc, "t", "p", ahead="2"), "ahead must be an int"),
        (lambda rpc: moolink.InferenceServer(rpc, "m", id, max_actors="9"), "max_actors must be"),
        (
            lambda rpc: moolink.ReplayClient(rpc, server="p").writer(2, chunk=0.5),
            "chunk must be an int",
        ),
        (lambda rpc: moolink.ReplayClient(rpc, server="p").writer("2"), "keep must be an integer"),
        (
            lambda rpc: moolink.ReplayClient(rpc, server="p").batches(2, prefetch=0.5),
            "prefetch must be",
        ),
    ],
    ids=range(12),
)
def test_a_count_that_is_no_integer_is_named(
    make: Callable[[moolink.Rpc], Any], message: str
) -> None:
    with moolink.Rpc("peer") as rpc, pytest.raises(TypeError, match=message):
        make(rpc)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rpc: rpc.connect(adress="x"), r"Rpc\.connect\(\) has no .* did you mean 'address'"),
        (lambda rpc: moolink.Group(rpc, "g").all_reduce("x", 1, opp="sum"), "did you mean 'op'"),
        (
            lambda rpc: moolink.Group(rpc, "g").update(now=1),
            r"Group\.update\(\) has .* It has none",
        ),
    ],
)
def test_an_unknown_keyword_of_a_method_names_the_known_ones(
    call: Callable[[moolink.Rpc], Any], message: str
) -> None:
    with moolink.Rpc("peer") as rpc, pytest.raises(TypeError, match=message):
        call(rpc)


def test_no_address_at_all_says_where_one_comes_from() -> None:
    with moolink.Rpc("peer") as rpc, pytest.raises(TypeError, match=r"None for the address .* run"):
        rpc.connect(None)  # type: ignore[arg-type]


def test_a_misspelt_name_of_the_package_is_corrected() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Replya': did you mean 'Replay'"):
        moolink.Replya  # noqa: B018


def test_the_arguments_of_a_contribution_are_named() -> None:
    import torch

    parameters = [torch.zeros(3, requires_grad=True)]
    with moolink.Rpc() as rpc, moolink.Group(rpc, "g") as group:
        accumulator = moolink.Accumulator("m", parameters, group=group)
        with pytest.raises(TypeError, match="did you mean 'batch_size'"):
            accumulator.reduce_gradients(batchsize=4)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"batch_size must be an integer, got 1\.5"):
            accumulator.reduce_gradients(1.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"set_virtual_batch_size\(\) has no .* 'size'"):
            accumulator.set_virtual_batch_size(sise=1)  # type: ignore[call-arg]
        accumulator.close()


def test_an_unknown_option_of_an_accumulator_names_the_known_ones() -> None:
    import torch

    parameters = [torch.zeros(3, requires_grad=True)]
    with pytest.raises(TypeError, match=r"Accumulator has no .* did you mean 'max_grad_norm'"):
        moolink.Accumulator("model", parameters, max_gard_norm=1.0)  # type: ignore[call-overload]


def test_options_of_accumulators_are_those_that_the_base_takes() -> None:
    import inspect

    taken = [
        parameter.name
        for parameter in inspect.signature(AccumulatorBase.__init__).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    assert list(get_type_hints(AccumulatorOptions)) == taken


@pytest.mark.parametrize(
    "fail",
    [
        lambda rpc: moolink.Group(None, "group"),
        lambda rpc: moolink.Group("group", rpc),
        lambda rpc: moolink.Broker("broker"),
        lambda rpc: moolink.Group(rpc, 3),
        lambda rpc: moolink.Group(rpc, "group").set_timeout(None),
        lambda rpc: moolink.Group(rpc, "group").set_sort_order("first"),
        lambda rpc: moolink.Group(rpc, "group").all_reduce(3, 1.0),
        lambda rpc: moolink.Group(rpc, "group").all_reduce("sum", 1.0, 3),
        lambda rpc: moolink.Group(rpc, "group").reduce_scatter("sum", [1.0], op=max),
        lambda rpc: moolink.Group(rpc, "group").barrier(3),
        lambda rpc: moolink.Rpc(3),
        lambda rpc: moolink.Rpc(timeout=None),
        lambda rpc: moolink.Rpc(transports="tcp"),
        lambda rpc: moolink.Publisher("policy", rpc),
        lambda rpc: moolink.Publisher(rpc, 3),
        lambda rpc: moolink.Subscriber(rpc, "policy", 3),
        lambda rpc: moolink.weights.ShardedSubscriber("policy", rpc, ["peer"]),
        lambda rpc: moolink.weights.ParameterServer(rpc, "policy", 1.0, "update"),
        lambda rpc: moolink.ReplayServer(rpc, "replay"),
        lambda rpc: moolink.ReplayClient("replay", server="p"),
        lambda rpc: moolink.ReplayClient(rpc, "replay"),
        lambda rpc: moolink.ReplayClient(rpc, "replay", "p"),
        lambda rpc: moolink.TrajectoryQueue("unrolls", rpc),
        lambda rpc: moolink.TrajectoryWriter(rpc, "unrolls", None),
        lambda rpc: moolink.InferenceServer("model", rpc, id),
        lambda rpc: moolink.InferenceClient("model", rpc, "server"),
        lambda rpc: moolink.replay.MinSize("3"),
        lambda rpc: moolink.replay.Prioritized("3"),
        lambda rpc: moolink.replay.SampleToInsertRatio(1.0, 1, "3"),
        lambda rpc: moolink.Replay(moolink.replay.Table("t", 3), seed="3"),
        lambda rpc: insert_twice(priority="high"),
        lambda rpc: rpc.listen(4431),
        lambda rpc: rpc.connect(None),
        lambda rpc: rpc.async_("peer"),
        lambda rpc: rpc.async_many("peer", "function"),
        lambda rpc: rpc.set_timeout("a minute"),
        lambda rpc: moolink.rpc.Lent(),
        lambda rpc: moolink.Future(),
    ],
    ids=range(38),
)
def test_errors_quote_public_names(fail: Callable[[moolink.Rpc], Any]) -> None:
    with moolink.Rpc("peer") as rpc, pytest.raises(TypeError) as error:
        fail(rpc)
    assert "_core" not in str(error.value)
    assert "Core" not in str(error.value)
    assert "attribute" not in str(error.value)
    assert "supported between" not in str(error.value)


def insert_twice(**wrong: Any) -> None:
    with moolink.Replay(moolink.replay.Table("t", 3)) as replay:
        replay.insert(1.0)
        replay.insert(2.0, **wrong)


# --- subinterpreters

ANOTHER_INTERPRETER = """
import sys
import _xxsubinterpreters as interpreters
{before}
other = interpreters.create()
code = f"import sys; sys.path[:] = {{sys.path!r}}; import moolink; moolink.Rpc"
try:
    interpreters.run_string(other, code)
except interpreters.RunFailedError as error:
    print(error)
import moolink
with moolink.Rpc("peer") as rpc:
    rpc.define("same", lambda x: x)
    print(rpc.sync("peer", "same", 7))
"""


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="_xxsubinterpreters has another name")
@pytest.mark.parametrize("before", ["", "import moolink; moolink.Rpc"])
def test_a_subinterpreter_is_refused_and_does_no_harm(before: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_INTERPRETER.format(before=before)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refusal, result = done.stdout.splitlines()
    assert "ImportError" in refusal
    assert "in the main interpreter only" in refusal
    assert result == "7"
