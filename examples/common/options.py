"""Options of the learners: dataclasses whose fields are the command line's options.

The defaults come from the preset of the chosen `--env-id`, and from the process's launcher:
`moolink run`, `moolink launch`, Slurm, torchrun or mpirun (`moolink.launch.place` reads their
variables). The command line wins over both.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import moolink
from moolink.internal.extras import needed_by
from moolink.launch import place

with needed_by("examples.common", "examples"):
    import tyro

ATARI = "ALE/"  # prefix of the ids of ALE's environments
# Those that make another environment of an Atari id.
ATARI_OPTIONS = (
    "repeat_action_probability",
    "no_op_max",
    "full_action_space",
    "max_frames",
    "episodic_life",
)


class OptionError(ValueError):
    """Options contradict each other or the things they name; the message gives the remedy."""


@dataclass
class Options:
    """The options of every learner."""

    env_id: str = "ALE/Breakout-v5"
    """An environment as `gymnasium.make` and `gymnasium.make_vec` know it (`CartPole-v1`,
    `module:Id-v0`), or `module:function` that makes one or a parallel environment of PettingZoo. A
    function with a parameter `num_envs` makes a vector environment of any library that
    `moolink.drive` takes."""
    mode: Literal["train", "evaluate"] = "train"
    """`evaluate` plays episodes from a run's checkpoint, and prints and writes statistics of their
    returns. The environment and the network are those of the run."""
    total_steps: int = 1_000_000
    """Length of the job in steps of all peers' environments. The learning rate falls linearly to 0
    over it."""
    max_seconds: float | None = None
    """Stop after this many seconds of learning, all peers at the same round. The start does not
    count."""
    seed: int = 0
    """Seed of the parameters, equal on all peers, and with the peer's index of its actions."""
    save_dir: Path | None = None
    """Folder of the run: checkpoint, options.json, learning curve (CSV and PNG), TensorBoard's
    files; written by the group's leader. Default: the newest run of the same network in
    runs/ENV/LEARNER, or a new folder there if that run has all its steps."""
    resume: bool = True
    """Go on from the run's checkpoint. `--no-resume` begins a new run; in a `--save-dir` that has
    one it replaces that."""
    result_json: Path | None = None
    """The leader writes the final return, steps and seconds here, for programs that search."""
    wandb_project: str | None = None
    """Also log to this project of Weights & Biases; needs `pip install wandb`."""
    log_interval: float = 5.0
    """Seconds between two lines of progress, which are also the rows of the learning curve."""
    checkpoint_interval: float = 60.0
    """Seconds between two checkpoints. The last one is written when the job ends."""
    episodes: int = 100
    """Number of episodes of an evaluation."""
    greedy: bool = True
    """Evaluate with the likeliest actions; else with sampled ones, as in training. The presets of
    policy gradients for Atari sample."""

    num_envs: int = 32
    """Environments of this peer. The default shares them out among the peers."""
    env_processes: int = 0
    """Worker processes that step them; 0: this process."""
    seed_envs: bool = False
    """Also seed the environments, which otherwise seed themselves."""
    frame_size: int = 42
    """Height and width of Atari frames."""
    repeat_action_probability: float | None = None
    """Sticky actions: in each frame an Atari game repeats its last action with this probability.
    Default: the id's, which is 0.25 for `-v5`."""
    no_op_max: int | None = None
    """An Atari game begins with a random number of up to this many frames without an action.
    Default: the id's, else 30."""
    full_action_space: bool = False
    """All 18 actions in each Atari game, not those alone that have an effect in it."""
    max_frames: int | None = None
    """An Atari episode is cut off after this many frames. Default: the id's, which is 108,000 (30
    minutes of play) for `-v5`."""
    episodic_life: bool = False
    """A lost life ends the return in Atari, but not the game. The presets for Atari turn it on."""
    env_threads: int | None = None
    """Threads of Atari emulators in each group of environments. Default: this peer's cores."""
    clip_reward: bool = False
    """Learn from the sign of the rewards. Reported returns are never changed."""

    hidden_size: int = 128
    """Width of the network's dense layers."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU where there is one."""
    torch_threads: int | None = None
    """Threads of a tensor operation in torch. Default: half of this peer's cores."""

    learning_rate: float = 1e-3
    """At step 0."""
    adam_eps: float = 1e-8
    """Epsilon of Adam."""
    max_grad_norm: float = 0.5
    """A round's gradient is scaled down to this norm."""
    discount: float = 0.99
    """Gamma."""

    connect: str | None = None
    """HOST:PORT of a broker. Default: the job's, else a broker of this process's own."""
    group: str | None = None
    """Name of the group. Default: the job's, else the environment's."""
    name: str | None = None
    """Name of this peer, unique among the broker's. Default: of the job and the peer's place in it,
    else of host and process."""
    peer_index: int = 0
    """Place of this peer in the job: different seeds for different peers."""
    num_peers: int = 1
    """Number of peers the job is meant for; they may come and go nevertheless."""
    cores: int = 1
    """Cores this peer may use. Default: its share of those it may run on."""

    @property
    def is_atari(self) -> bool:
        """Whether the environment is a game that ALE's vector environment plays."""
        return self.env_id.rpartition(":")[2].startswith(ATARI)

    @property
    def env_name(self) -> str:
        """Of the environment, for paths and groups."""
        return re.sub(r"\W+", "-", self.env_id.removeprefix(ATARI)).strip("-")

    @property
    def learner(self) -> str:
        """Of the program, for paths: `torch.impala`, or the name of a script of the user's."""
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        name = (
            Path(getattr(main, "__file__", None) or "learner").stem if spec is None else spec.name
        )
        return re.sub(r"[^\w.]+", "-", name.removeprefix("examples."))

    @property
    def run_dir(self) -> Path:
        """The run's folder, or that of all runs of this learner while none is chosen."""
        return self.save_dir or Path("runs") / self.env_name / self.learner

    @property
    def group_name(self) -> str:
        return self.group or self.env_name

    @property
    def peer_name(self) -> str:
        return self.name or f"{socket.gethostname()}-{os.getpid()}"

    def broker(self) -> str:
        """The broker's address. Called by the main thread when the peer is about to connect. A peer
        that is alone gets a broker of its own; under torchrun, mpirun or Slurm the first process
        starts one."""
        mine = place()
        if self.connect is None or self.connect == mine.broker:
            return mine.start_broker()
        return self.connect

    @property
    def acting_seed(self) -> int:
        """Of this peer's environments and actions: no two peers play the same games."""
        return self.seed * 1_000_003 + self.peer_index * 10_007

    def rate(self, totals: Mapping[str, int]) -> float:
        """The learning rate falls linearly to 0 with the steps that the rounds counted, so it does
        not depend on batch sizes or on how many peers there are."""
        return self.learning_rate * max(0.0, 1.0 - totals.get("steps", 0) / self.total_steps)

    def validate(self) -> None:
        """Raises OptionError, naming the option and the remedy, where options contradict."""
        for name in ("total_steps", "num_envs", "episodes", "hidden_size"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise OptionError(f"{option} is {getattr(self, name)}; it must be at least 1")
        for name in () if self.is_atari else ATARI_OPTIONS:
            if getattr(self, name) is not None and getattr(self, name) is not False:
                option = "--" + name.replace("_", "-")
                raise OptionError(f"{option} is for Atari: for ids such as ALE/Pong-v5")
        for name, least in (("max_frames", 1), ("no_op_max", 0), ("max_seconds", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                option = "--" + name.replace("_", "-")
                raise OptionError(f"{option} is {value}; it must be at least {least}")
        repeat = self.repeat_action_probability
        if repeat is not None and not 0 <= repeat < 1:
            raise OptionError(
                f"--repeat-action-probability is {repeat}; it must be at least 0 and less than 1"
            )

    def preset(self) -> None:
        """Changes the defaults to those for the environment."""

    def as_dict(self) -> dict[str, Any]:
        """All options and the learner's name as JSON values, for the run's files."""
        options = {"learner": self.learner, **dataclasses.asdict(self)}
        return {k: str(x) if isinstance(x, Path) else x for k, x in options.items()}


@dataclass
class GroupOptions(Options):
    """The options of learners whose peers reduce gradients in a group."""

    normalize: bool = False
    """Subtract the running mean of float observations and divide them by their deviation."""
    normalize_reward: bool = False
    """Divide rewards by the deviation of discounted returns."""
    lstm: bool = False
    """Give the network a memory: an LSTM after the dense layer."""
    initial_std: float = 1.0
    """Initial standard deviation of actions in Box spaces, whose bounds are scaled to -1 and 1."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""
    parallel_gradients: int = 1
    """Rounds that may be under way at once."""
    virtual_batch_size: int | None = None
    """Batch size of a round, in the unit of the contributions'; equal on all peers: a peer that
    joins takes the group's. Default: one contribution of each peer."""

    @property
    def own_batch_size(self) -> int:
        """Of a contribution of this peer."""
        raise NotImplementedError

    @property
    def round_size(self) -> int:
        return self.virtual_batch_size or self.own_batch_size * self.num_peers

    def validate(self) -> None:
        super().validate()
        if not self.initial_std > 0:
            raise OptionError(f"--initial-std is {self.initial_std}; it must be above 0")


@dataclass
class ImpalaOptions(GroupOptions):
    """IMPALA: every peer acts and learns, off-policy data is corrected by V-trace."""

    deterministic: bool = False
    """For one seed, each round has the same bits in every run and for any number of peers up to
    `--units`. Then `--num-envs` and `--batch-size` are those of a unit."""
    units: int = 4
    """Groups of environments that the peers of a `--deterministic` job share. A round is one
    contribution of each."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of layers; parameters stay float32."""
    num_groups: int = 2
    """The environments step in this many groups: while one steps, another is being inferred for."""
    unroll_length: int = 20
    """T, the number of steps of an unroll."""
    batch_size: int = 8
    """Environments in one contribution, which holds batch_size x unroll_length steps. The default
    shares 8 out among the peers."""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """RMSProp is the paper's: use it with `--loss sum`."""
    rmsprop_decay: float = 0.99
    """Decay of RMSProp's mean of squares (momentum is 0)."""
    rmsprop_eps: float = 0.01
    """Epsilon of RMSProp, added to the root. The paper has 0.01 for Atari (arXiv 1802.01561, table
    G.1); its TensorFlow optimizer adds it inside the root."""
    loss: Literal["mean", "sum"] = "mean"
    """`mean` over time and batch (moolib), or `sum` over both (the paper)."""
    vtrace_lambda: float = 0.95
    """Mixes n-step returns in V-trace's traces; 1 is the paper's."""
    clip_rho: float = 1.0
    """Clips the importance weights of the temporal differences and of the policy gradient."""
    clip_c: float = 1.0
    """Clips the importance weights of the traces."""

    @property
    def envs_per_group(self) -> int:
        return self.num_envs // self.num_groups

    @property
    def parts(self) -> int:
        """Contributions that a group's unroll is cut into."""
        return self.envs_per_group // self.batch_size

    @property
    def own_batch_size(self) -> int:
        return self.batch_size

    @property
    def job_units(self) -> int | None:
        """The accumulator's `units`."""
        return self.units if self.deterministic else None

    @property
    def round_size(self) -> int:
        return self.batch_size * self.units if self.deterministic else super().round_size

    @property
    def seeds_envs(self) -> bool:
        return self.seed_envs or self.deterministic

    def group_seed(self, group: int) -> int:
        """Of a group of environments and its actions: no two groups of the job play alike."""
        if self.deterministic:
            return self.seed * 1_000_003 + group * 10_007
        return self.acting_seed + group * self.envs_per_group

    def validate(self) -> None:
        super().validate()
        if self.deterministic:
            self._validate_units()
        for name in ("num_groups", "unroll_length", "batch_size"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise OptionError(f"{option} is {getattr(self, name)}; it must be at least 1")
        if self.num_envs % (self.num_groups * self.batch_size):
            raise OptionError(
                f"--num-envs {self.num_envs} must be a multiple of --num-groups x --batch-size "
                f"= {self.num_groups * self.batch_size}: each group's unroll is cut into "
                "contributions of batch_size environments"
            )

    def _validate_units(self) -> None:
        if not self.num_peers <= self.units <= 128:
            raise OptionError(
                f"--units is {self.units}; it must be at least the number of peers, "
                f"{self.num_peers}, and at most 128"
            )
        if self.num_groups != 1 or self.parallel_gradients != 1 or self.virtual_batch_size:
            raise OptionError(
                "--deterministic needs one group for each unit, one contribution of each unit "
                "in a round, and one round at a time: leave out --num-groups, "
                "--virtual-batch-size and --parallel-gradients"
            )

    def preset(self) -> None:
        """Changes the defaults to those for the environment, shared out among the peers or, with
        `--deterministic`, among the units."""
        if self.deterministic:
            self.num_groups = 1
        if self.is_atari:
            self.total_steps, self.hidden_size = 2_000_000, 256
            # Rounds of 4 unrolls instead of 8 cost a tenth of the speed, and need fewer steps.
            self.batch_size = 4
            self.entropy_cost, self.clip_reward, self.episodic_life = 0.005, True, True
            self.greedy = False  # the likeliest action may never serve the ball
            if self.frame_size >= 64:
                self.num_envs = 64  # inference for few frames of this size is slow
        elif self.env_id.endswith("Catch-v0"):
            self.total_steps, self.entropy_cost = 400_000, 0.005
        elif self.env_id.startswith("CartPole"):
            self.total_steps, self.num_envs, self.normalize_reward = 300_000, 16, True
            self.learning_rate, self.max_grad_norm, self.entropy_cost = 3e-3, 40.0, 0.003
        shares = self.units if self.deterministic else self.num_peers
        self.batch_size = max(1, self.batch_size // shares)
        batches = self.num_groups * self.batch_size
        self.num_envs = max(batches, self.num_envs // shares // batches * batches)


@dataclass
class PpoOptions(GroupOptions):
    """PPO: rounds of minibatches over rollouts of the peers, each with the newest parameters."""

    num_envs: int = 8
    """Environments of this peer. The default shares 8 out among the peers."""
    rollout_length: int = 128
    """T, the number of steps of a rollout."""
    epochs: int = 4
    """Times that each rollout is learned from."""
    minibatches: int = 4
    """Contributions that a rollout is cut into, in each epoch. With `--lstm` each holds whole
    environments."""
    gae_lambda: float = 0.95
    """Mixes n-step returns in the advantages."""
    clip: float = 0.2
    """Policy ratios are clipped to 1 - clip ... 1 + clip."""

    @property
    def own_batch_size(self) -> int:
        return self.num_envs * self.rollout_length // self.minibatches

    def validate(self) -> None:
        super().validate()
        whole = self.num_envs if self.lstm else self.num_envs * self.rollout_length
        if whole % self.minibatches:
            raise OptionError(
                f"--minibatches {self.minibatches} must divide "
                f"{'--num-envs' if self.lstm else '--num-envs x --rollout-length'} = {whole}"
            )
        if (steps := self.num_envs * self.rollout_length) < 2 * self.minibatches:
            raise OptionError(
                f"--minibatches {self.minibatches} with --num-envs x --rollout-length = {steps} "
                "leaves fewer than two steps in each: its advantages cannot be normalised"
            )

    def preset(self) -> None:
        """Changes the defaults to those for the environment, shared out among the peers."""
        self.learning_rate, self.adam_eps = 3e-4, 1e-5
        if self.is_atari:
            self.total_steps, self.hidden_size = 10_000_000, 256
            self.learning_rate, self.clip = 2.5e-4, 0.1
            self.clip_reward = self.episodic_life = True
            self.greedy = False
        elif self.env_id.startswith("CartPole"):
            self.total_steps, self.learning_rate, self.rollout_length = 100_000, 2.5e-3, 64
        self.num_envs = max(1, self.num_envs // self.num_peers)


Kind = TypeVar("Kind", bound=Options)


def defaults(kind: type[Kind], environ: Mapping[str, str], **given: Any) -> Kind:
    """The options of a learner without a command line, but for those `given`."""
    try:
        mine = place(environ)
    except (ValueError, moolink.Error) as error:
        raise SystemExit(f"error: {error}") from None
    num_peers = given.pop("num_peers", mine.count)
    shares_cores = mine.source == "alone" and not environ.get("MOOLINK_CORES")
    is_named = mine.source != "alone" or environ.get("MOOLINK_PEER_NAME")
    options = kind(
        **given,
        num_peers=num_peers,
        connect=mine.broker,
        group=mine.group,
        name=mine.name if is_named else None,
        peer_index=mine.index,
        cores=max(1, mine.cores // num_peers) if shares_cores else mine.cores,
    )
    options.preset()
    return options


def parse(
    kind: type[Kind],
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Kind:
    """Reads the command line. Exits with a message, as is usual there, when it is wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The preset depends on these, and must be known before the other options are read.
    given: dict[str, Any] = {}
    if (env_id := _option(arguments, "--env-id")) is not None:
        given["env_id"] = env_id
    known = {field.name for field in dataclasses.fields(kind)}
    for name in ("num_peers", "frame_size", "units"):
        option = "--" + name.replace("_", "-")
        if name in known and (text := _option(arguments, option)) is not None:
            given[name] = _integer(option, text)
    if "deterministic" in known and "--deterministic" in arguments:
        given["deterministic"] = True
    try:
        of_run = _of_run(kind, arguments, env_id or kind.env_id)
        of_preset = {name: of_run[name] for name in ("env_id", "frame_size") if name in of_run}
        default = defaults(kind, environ, **({"env_id": kind.env_id} | of_preset | given))
        for name in of_run.keys() - given.keys():
            setattr(default, name, of_run[name])
        options = tyro.cli(kind, default=default, args=arguments)
        options.validate()
    except (OptionError, moolink.FileError) as error:
        raise SystemExit(f"error: {error}") from None
    return options


def _of_run(kind: type[Options], arguments: Sequence[str], env_id: str) -> dict[str, Any]:
    """For an evaluation, the options of the run that it plays."""
    if _option(arguments, "--mode") != "evaluate":
        return {}
    from examples.common.folder import played  # which needs this module

    save_dir = _option(arguments, "--save-dir")
    return played(kind(env_id=env_id), None if save_dir is None else Path(save_dir))


def _option(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option, as tyro reads it: of the last one."""
    found = None
    for index, spelled in enumerate(arguments):
        option, equals, value = spelled.partition("=")
        argument = option.replace("_", "-") + equals + value  # tyro takes both
        if argument.startswith(name + "="):
            found = argument[len(name) + 1 :]
        elif argument == name and index + 1 < len(arguments):
            found = arguments[index + 1]
    return found


def _integer(what: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise SystemExit(f"error: {what} is {text!r}; it must be a whole number >= {least}")
    return int(text)
