"""A moolink replay as TorchRL's replay buffer."""

import functools
import random

import gymnasium
import pytest

import moolink

pytest.importorskip("torchrl", reason="needs torchrl: make test-interop")

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import (
    LazyTensorStorage,
    ListStorage,
    OneHot,
    RandomSampler,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from torchrl.envs import GymWrapper
from torchrl.modules import EGreedyModule, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate

import moolink.torchrl
from moolink.replay import Prioritized, Replay, ReplayClient, ReplayServer, Table

make = functools.partial(gymnasium.make, "CartPole-v1")


def steps(*values):
    """Returns steps with entries that tell them apart."""
    x = torch.tensor(values, dtype=torch.float32)
    return TensorDict(
        {"obs": torch.stack([x, -x], 1), "next": {"reward": x[:, None], "done": x[:, None] > 2}},
        batch_size=[len(values)],
    )


@pytest.fixture(params=["local", "served"])
def replay(request):
    local = Replay(Table("steps", 100, sampler=Prioritized(1.0)), seed=0)
    if request.param == "local":
        yield local
        return
    with moolink.Rpc("server") as server, moolink.Rpc("client") as client:
        client.connect(server.listen("127.0.0.1:0")[0])
        with ReplayServer(server, local):
            yield ReplayClient(client, server="server")


def test_samples_are_what_was_inserted(replay):
    buffer = moolink.torchrl.ReplayBuffer(replay, batch_size=50, timeout=20)
    keys = buffer.extend(steps(0, 1, 2, 3))
    assert keys.dtype == torch.int64
    assert (len(buffer), buffer.write_count, buffer.batch_size) == (4, 4, 50)
    sample, info = buffer.sample(return_info=True)
    assert sample.batch_size == torch.Size([50])
    x = sample["obs"][:, 0]
    assert set(x.tolist()) == {0.0, 1.0, 2.0, 3.0}
    assert torch.equal(sample["next", "reward"][:, 0], x)
    assert torch.equal(sample["next", "done"][:, 0], x > 2)
    assert torch.equal(sample["index"], keys[x.long()])
    assert sample["priority_weight"].tolist() == [1.0] * 50
    assert info["probabilities"].tolist() == [0.25] * 50
    assert int(buffer.add(steps(4)[0])) not in keys.tolist()
    assert next(iter(buffer)).batch_size == torch.Size([50])
    buffer.empty()
    assert (len(buffer), buffer.write_count) == (0, 0)


def test_priorities(replay):
    buffer = moolink.torchrl.ReplayBuffer(replay, timeout=20)
    buffer.extend(steps(0, 1))
    sample = buffer.sample(30)
    sample["td_error"] = torch.where(sample["obs"][:, 0] == 1, 3.0, -1.0)
    buffer.update_tensordict_priority(sample)
    sample, info = buffer.sample(400, return_info=True)
    first = sample["obs"][:, 0] == 0
    assert 50 <= first.sum() <= 150
    assert set(info["probabilities"][first].tolist()) == {0.25}
    assert sample["priority_weight"][first].tolist() == [1.0] * int(first.sum())
    assert sample["priority_weight"][~first].allclose(torch.tensor(1 / 3))
    # New items have the greatest priority so far, or their own.
    buffer.extend(steps(2))
    buffer.extend(steps(3).set("td_error", torch.tensor([5.0])))
    sample, info = buffer.sample(400, return_info=True)
    assert sample.get("td_error", None) is None
    for value, priority in [(0, 1), (1, 3), (2, 3), (3, 5)]:
        assert set(info["priorities"][sample["obs"][:, 0] == value].tolist()) == {priority}
    buffer.update_priority(sample["index"][:1], 0.5)
    with pytest.raises(RuntimeError, match="batch_size"):
        buffer.sample()
    with pytest.raises(ValueError, match="batch dimension"):
        buffer.extend(steps(1)[0])


def test_priorities_that_are_given_count_for_new_items(replay):
    buffer = moolink.torchrl.ReplayBuffer(replay, timeout=20)
    buffer.extend(steps(0, 1).set("td_error", torch.tensor([9.0, 1.0])))
    buffer.extend(steps(2))
    sample, info = buffer.sample(100, return_info=True)
    assert set(info["priorities"][sample["obs"][:, 0] == 2].tolist()) == {9}


def test_shapes_of_priorities(replay):
    buffer = moolink.torchrl.ReplayBuffer(replay, timeout=20)
    keys = buffer.extend(steps(0, 1, 2, 3))
    buffer.update_priority(keys[:0], torch.zeros(0, 1))
    buffer.update_priority(keys.reshape(2, 2), torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]))
    sample, info = buffer.sample(200, return_info=True)
    assert (info["priorities"] == sample["obs"][:, 0].numpy() + 1).all()
    for given in (torch.ones(4), torch.ones(3)):
        with pytest.raises(ValueError, match=r"of shape \(2,\) .* got \(\d,\)"):
            buffer.update_priority(keys[:2], given)
    with pytest.raises(KeyError, match="td_error"):
        buffer.update_tensordict_priority(sample)


def test_a_table_that_is_not_there_is_an_error():
    several = Replay([Table("one", 10), Table("two", 10)])
    for table in (None, "three"):
        buffer = moolink.torchrl.ReplayBuffer(several, table=table)
        with pytest.raises(ValueError, match=f"no table {table!r}; the tables are one, two"):
            len(buffer)


def one_hot_envs(count):
    return [GymWrapper(make(), categorical_action_encoding=False) for _ in range(count)]


@pytest.fixture
def one_thread():
    """For small networks, whose threads would only wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_collector_fills_it_and_dqn_learns_from_it(one_thread):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        *(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()),
        torch.nn.Linear(64, 2),
    )
    spec = OneHot(2)
    greedy = TensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["action_value"]),
        QValueModule(spec=spec),
    )
    explore = EGreedyModule(spec, eps_init=0.5, eps_end=0.02, annealing_num_steps=3000)
    replay = Replay(Table("steps", 20_000, sampler=Prioritized(0.6)), seed=0)
    buffer = moolink.torchrl.ReplayBuffer(replay, batch_size=64, beta=0.5, timeout=20)
    collector = Collector(
        *one_hot_envs(1),
        TensorDictSequential(greedy, explore),
        frames_per_batch=64,
        total_frames=7_680,
        replay_buffer=buffer,
    )
    collector.set_seed(0)
    loss = DQNLoss(greedy, action_space=spec, delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=0.98)
    target = SoftUpdate(loss, eps=0.98)
    optimizer = torch.optim.Adam(loss.parameters(), 2.5e-3)
    for i, batch in enumerate(collector):
        assert batch is None
        explore.step(64)
        if i < 5:
            continue
        for _ in range(10):
            sample = buffer.sample()
            loss(sample)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            buffer.update_tensordict_priority(sample)
            target.step()
    assert buffer.write_count == 7_680
    collector.shutdown()
    with torch.no_grad():
        lengths = [envs.rollout(500, greedy).shape[0] for envs in one_hot_envs(5)]
    assert sum(lengths) / 5 > 100, lengths  # random play: about 22


def test_a_sample_of_an_empty_table_is_an_error_at_once_or_after_the_timeout(replay):
    buffer = moolink.torchrl.ReplayBuffer(replay, batch_size=1)
    for _ in range(2):
        assert not buffer.can_sample()
        with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
            buffer.sample()
        buffer.extend(steps(1))
        assert buffer.can_sample()
        assert buffer.sample()["obs"].tolist() == [[1, -1]]
        buffer.empty()
    with pytest.raises(moolink.TimeoutError, match="0 items"):
        moolink.torchrl.ReplayBuffer(replay, batch_size=1, timeout=0.1).sample()


def test_items_are_read_by_place_and_by_key(replay):
    buffer = moolink.torchrl.ReplayBuffer(replay, timeout=20)
    assert len(buffer[:]) == 0
    keys = buffer.extend(steps(0, 1, 2, 3))
    values = torch.arange(4.0)
    assert torch.equal(buffer[:]["obs"], torch.stack([values, -values], 1))
    assert torch.equal(buffer["next", "done"][:, 0], values > 2)
    assert buffer[1]["obs"].tolist() == [1, -1]
    assert buffer[-1]["next", "done"].tolist() == [True]
    assert buffer[keys[[3, 0]]]["obs"][:, 0].tolist() == [3, 0]
    assert buffer[[2, 1]]["obs"][:, 0].tolist() == [2, 1]
    assert buffer[values > 1]["obs"][:, 0].tolist() == [2, 3]
    assert [step["obs"][0].item() for step in buffer.storage] == [0, 1, 2, 3]
    assert (int(keys[0]) in buffer.storage, 3 in buffer.storage, 4 in buffer.storage) == (1, 1, 0)
    assert (buffer.storage.max_size, buffer.writer._cursor) == (100, 4)
    with pytest.raises(IndexError):
        buffer[4]
    replay.remove(keys[:1].numpy())
    assert buffer[0]["obs"].tolist() == [1, -1]
    with pytest.raises((KeyError, moolink.RemoteError), match=str(int(keys[0]))):
        buffer[keys]
    for change in (
        lambda: buffer.__setitem__(0, steps(1)[0]),
        lambda: buffer.set_("obs", torch.zeros(3, 2)),
        lambda: buffer.set_at_("obs", torch.zeros(1, 2), 0),
        lambda: buffer.update_(steps(1, 2, 3)),
        lambda: buffer.set_storage(None),
        lambda: buffer.set_sampler(None),
        lambda: buffer.set_writer(None),
        lambda: buffer.share(),
    ):
        with pytest.raises(TypeError, match=r"do not change|keeps its table|ReplayServer"):
            change()


def test_items_made_of_several_steps_are_read(replay):
    writer = replay.writer(3)
    for i in range(5):
        writer.append({"x": torch.full((2,), float(i))})
        if i > 1:
            x = writer.history["x"]
            writer.create_item({"all": x[-3:], "last": x[-1]})
    writer.flush()
    data = moolink.torchrl.ReplayBuffer(replay)[:]
    assert data["all"][..., 0].tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert data["last"].tolist() == [[2, 2], [3, 3], [4, 4]]


def test_transforms_prefetching_and_collate(replay):
    buffer = moolink.torchrl.ReplayBuffer(
        replay, batch_size=3, prefetch=2, timeout=20, collate_fn=lambda data: data.clone()
    )
    buffer.append_transform(lambda data: data.set("twice", 2 * data["obs"]))
    buffer.extend(steps(1, 2))
    for batch in (buffer.sample(), next(iter(buffer)), buffer.next(), buffer[:]):
        assert torch.equal(batch["twice"], 2 * batch["obs"])
    buffer.shutdown()


def test_items_that_are_no_tensordicts_are_transformed_whole(replay):
    buffer = moolink.torchrl.ReplayBuffer(
        replay, transform=lambda data: torch.utils._pytree.tree_map(lambda x: 2 * x, data)
    )
    buffer.add(
        {"a": torch.ones(3), "b": {"c": (torch.ones(2), [torch.ones(1)])}, 30: torch.ones(())}
    )
    data = buffer.sample(2)
    assert data["a"].tolist() == [[2, 2, 2], [2, 2, 2]]
    assert data["b"]["c"][1][0].tolist() == [[2], [2]]
    assert data[30].tolist() == [2, 2]


def test_a_factory_makes_the_transform_at_once():
    buffer = moolink.torchrl.ReplayBuffer(
        storage=ListStorage,
        transform_factory=lambda: lambda data: data.set("twice", 2 * data["obs"]),
    )
    buffer.extend(steps(1, 2))
    assert buffer.storage.max_size == 2**32 - 1  # TorchRL's lists have no limit
    batch = buffer.sample(3)
    assert torch.equal(batch["twice"], 2 * batch["obs"])


def test_arguments_with_torchrl_s_defaults_are_taken():
    defaults = {
        "shared": False,
        "checkpointer": None,
        "sample_unit": None,
        "service_backend": "direct",
    }
    moolink.torchrl.ReplayBuffer(**defaults, consume_after_n_samples=None, compilable=True)
    for refused in ({"shared": True}, {"consume_after_n_samples": 2}, {"sizes": None}):
        with pytest.raises(TypeError, match=f"no {next(iter(refused))}"):
            moolink.torchrl.ReplayBuffer(**refused)


def test_states_are_saved_and_loaded(replay, tmp_path):
    buffer = moolink.torchrl.ReplayBuffer(replay, timeout=20)
    buffer.extend(steps(0, 1, 2).set("td_error", torch.tensor([1.0, 2.0, 4.0])))
    state = buffer.state_dict()
    buffer.dumps(tmp_path / "saved")
    for load in (lambda other: other.load_state_dict(state), lambda o: o.loads(tmp_path / "saved")):
        other = moolink.torchrl.ReplayBuffer(Replay(Table("t", 10, sampler=Prioritized(1.0))))
        other.extend(steps(9))
        load(other)
        assert torch.equal(other[:]["obs"], buffer[:]["obs"])
        assert other.storage.state_dict()["priorities"].tolist() == [1, 2, 4]
    file = tmp_path / "saved" / "storage" / "items.pt"
    whole = file.read_bytes()
    draws = random.Random(1)
    flipped = []
    for _ in range(50):
        data = bytearray(whole)
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
        flipped.append(bytes(data))
    for damaged in (b"", whole[:100], whole[: len(whole) // 2], whole[:-1], whole + b"x", *flipped):
        file.write_bytes(damaged)
        with pytest.raises(moolink.FileError, match=rf"{file} (is|has) ") as caught:
            other.loads(tmp_path / "saved")
        assert caught.value.path == str(file)
    assert len(other) == 3


def test_a_save_that_fails_leaves_the_former_file(tmp_path, monkeypatch):
    buffer = moolink.torchrl.ReplayBuffer(Replay(Table("t", 10)))
    buffer.extend(steps(0, 1))
    buffer.dumps(tmp_path)
    save = torch.save

    def fail_at_the_end(state, file):
        save(state, file)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", fail_at_the_end)
    buffer.extend(steps(2))
    with pytest.raises(KeyboardInterrupt):
        buffer.dumps(tmp_path)
    assert [path.name for path in (tmp_path / "storage").iterdir()] == ["items.pt"]
    buffer.loads(tmp_path)
    assert len(buffer) == 2


@pytest.mark.parametrize("nothing", [[], ()])
def test_an_extension_by_no_items_has_no_keys(replay, nothing):
    buffer = moolink.torchrl.ReplayBuffer(replay, timeout=20)
    for extend in (buffer.extend, buffer.writer.extend):
        keys = extend(nothing)
        assert (keys.shape, keys.dtype) == ((0,), torch.int64)
    assert len(buffer) == 0


def test_a_table_as_torchrl_s_components_describe_it():
    buffer = moolink.torchrl.PrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=lambda: ListStorage(4), batch_size=2
    )
    buffer.extend(steps(0, 1, 2, 3, 4))
    assert buffer[:]["obs"][:, 0].tolist() == [1, 2, 3, 4]
    buffer.update_priority(buffer.extend(steps(5)), 3.0)
    _, info = buffer.sample(100, return_info=True)
    of = info["priorities"] == 3
    assert info["probabilities"][of][0] / info["probabilities"][~of][0] == pytest.approx(3**0.6)
    weights = info["priority_weight"]
    assert weights[of][0] / weights[~of][0] == pytest.approx(3**-0.24)
    storage = LazyTensorStorage(4)
    sized = moolink.torchrl.ReplayBuffer(storage=storage, sampler=RandomSampler())
    sized.extend(steps(0, 1, 2, 3, 4))
    assert (len(sized), sized.write_count) == (4, 5)
    plain = moolink.torchrl.ReplayBuffer(batch_size=2)
    plain.extend([torch.tensor([1]), torch.tensor([1])])
    assert plain.sample().tolist() == [[1], [1]]
    for refused in (
        {"storage": LazyTensorStorage(4, ndim=2)},
        {"storage": TensorStorage(torch.zeros(3))},
        {"sampler": SamplerWithoutReplacement()},
        {"writer": TensorDictMaxValueWriter()},
        {"replay": Replay(Table("t", 1)), "generator": torch.Generator()},
        {"replay": Replay(Table("t", 1)), "storage": storage},
    ):
        with pytest.raises(TypeError):
            moolink.torchrl.ReplayBuffer(**refused)


@pytest.mark.parametrize(
    "made",
    [
        moolink.torchrl.ReplayBuffer,
        functools.partial(moolink.torchrl.PrioritizedReplayBuffer, alpha=1.0, beta=1.0),
    ],
)
def test_a_generator_determines_the_samples(made):
    def samples(generator):
        buffer = made(storage=ListStorage(10), batch_size=100, generator=generator)
        buffer.extend(steps(*range(10)))
        return buffer.sample()["obs"][:, 0].tolist()

    generator = torch.Generator().manual_seed(1)
    first, second = samples(generator), samples(generator)
    assert first != second
    assert samples(generator.manual_seed(1)) == first
    assert samples(generator) == second
