"""Configuration of a learner: dataclasses whose fields are the command line's options.

The defaults come from two places: the preset of the chosen `--env`, and the environment variables
that `moolink run` sets for each peer it starts (`MOOLINK_BROKER`, `MOOLINK_GROUP`,
`MOOLINK_PEER_INDEX`, `MOOLINK_PEER_NAME`, `MOOLINK_NUM_PEERS`, `MOOLINK_CORES`). An option given on
the command line always wins.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

Net = Literal["small", "shallow", "mlp"]
# Height and width of the frames that each network is made for.
FRAME_SIZE: Mapping[str, int] = {"small": 42, "shallow": 84}


class ConfigError(ValueError):
    """The options contradict each other or what they name; the message says what to change."""


@dataclass
class JobConfig:
    """What is learned, for how long, and where the results go."""

    env: str = "breakout"
    """`catch`, or an Atari game by its ROM's name in snake case: pong, breakout, space_invaders."""
    mode: Literal["train", "evaluate"] = "train"
    """`evaluate` plays greedily from the checkpoint in the save directory and prints returns."""
    total_steps: int = 2_000_000
    """Length of the job in agent steps of the whole group (an Atari step is 4 frames). The learning
    rate falls linearly to 0 over it."""
    max_seconds: float | None = None
    """Stop after this many seconds, all peers at the same round."""
    seed: int = 0
    """Seed of the parameters, equal on all peers, and with the peer's index of its actions."""
    save_dir: Path | None = None
    """Checkpoint, learning_curve.csv and .png; written by the group's leader. Default: runs/ENV."""
    resume: bool = True
    """Go on from the checkpoint in the save directory if there is one."""
    log_interval: float = 5.0
    """Seconds between two lines of progress, which are also the rows of the learning curve."""
    checkpoint_interval: float = 60.0
    """Seconds between two checkpoints. The last one is written when the job ends or is told to."""
    episodes: int = 100
    """Number of episodes of an evaluation."""


@dataclass
class ActorConfig:
    """How this peer acts in its environments."""

    num_envs: int = 32
    """Environments of this peer. The default shares 32 out among the peers, or 64 with the shallow
    net. More are stepped a little faster, and what they have done is older when it is learned from.
    """
    num_groups: int = 2
    """The environments step in this many groups: while one steps, another is being inferred for."""
    unroll_length: int = 20
    """T, the number of steps of an unroll."""
    seed_envs: bool = False
    """Also seed the emulators, which otherwise seed themselves. Takes 0.1 s each at the start."""
    max_frames_per_episode: int = 108_000
    """An Atari episode is cut off after this many frames (30 minutes of play)."""
    env_threads: int | None = None
    """Emulator threads (or processes) of each group. Default: this peer's cores."""
    env_pool: bool = False
    """Step the games in the worker processes of moolink.EnvPool and not in ALE's threads."""


@dataclass
class LearnerConfig:
    """How this peer computes gradients and how all of them are applied."""

    net: Net = "small"
    """`small` on 42x42 frames, `shallow` on 84x84 frames (IMPALA's: 16c8s4 32c4s2 fc256), `mlp`."""
    batch_size: int = 8
    """Environments in one contribution, which holds batch_size x unroll_length steps. The default
    shares 8 out among the peers."""
    virtual_batch_size: int | None = None
    """Environments in one round; equal on all peers. Default: batch_size x the number of peers."""
    parallel_gradients: int = 1
    """Rounds that may be under way at once. With 1 no peer is twice in one round."""
    loss: Literal["mean", "sum"] = "mean"
    """`mean` over time and batch (moolib), or `sum` over both (the IMPALA paper)."""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """RMSProp is the paper's: use it with `--loss sum`."""
    learning_rate: float = 1e-3
    """At step 0."""
    adam_eps: float = 1e-8
    """Epsilon of Adam."""
    rmsprop_decay: float = 0.99
    """Decay of RMSProp's mean of squares (momentum is 0)."""
    rmsprop_eps: float = 0.01
    """Epsilon of RMSProp, added to the root. The paper adds 0.1 inside it."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm. The paper's value for the summed loss is 40."""
    discount: float = 0.99
    """Gamma."""
    vtrace_lambda: float = 0.95
    """Mixes n-step returns in V-trace's traces; 1 is the paper's."""
    clip_rho: float = 1.0
    """Clips the importance weights of the temporal differences and of the policy gradient."""
    clip_c: float = 1.0
    """Clips the importance weights of the traces."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""
    entropy_cost: float = 0.005
    """Weight of the entropy bonus. The paper's is 0.01."""
    clip_reward: bool = True
    """Learn from the sign of the rewards. Reported returns are never clipped."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of convolutions and products; the learner's parameters stay float32."""
    torch_threads: int | None = None
    """Threads of one tensor operation in torch (JAX has its own). Default: half of this peer's
    cores."""


@dataclass
class GroupConfig:
    """How this peer finds the others."""

    connect: str | None = None
    """HOST:PORT of a broker. Default: MOOLINK_BROKER, else a broker of this process's own."""
    group: str | None = None
    """Name of the group. Default: MOOLINK_GROUP, else impala-ENV."""
    name: str | None = None
    """Name of this peer, unique among the broker's peers. Default: MOOLINK_PEER_NAME, else from the
    host and process."""
    peer_index: int = 0
    """Place of this peer in the job: different seeds for different peers."""
    num_peers: int = 1
    """Number of peers the job is meant for; they may come and go nevertheless."""
    cores: int = 1
    """Cores this peer may use. Default: its share of those it may run on."""


@dataclass
class Config:
    """IMPALA: actors and learner in each peer, gradients reduced through a moolink group."""

    job: JobConfig = field(default_factory=JobConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    group: GroupConfig = field(default_factory=GroupConfig)

    @property
    def save_dir(self) -> Path:
        return self.job.save_dir or Path("runs") / self.job.env

    @property
    def group_name(self) -> str:
        return self.group.group or f"impala-{self.job.env}"

    @property
    def peer_name(self) -> str:
        return self.group.name or f"{socket.gethostname()}-{os.getpid()}"

    @property
    def actor_seed(self) -> int:
        """Seed of this peer's environments and actions: no two peers play the same games."""
        return self.job.seed * 1_000_003 + self.group.peer_index * 10_007

    @property
    def envs_per_group(self) -> int:
        return self.actor.num_envs // self.actor.num_groups

    @property
    def env_threads(self) -> int:
        return self.actor.env_threads or self.group.cores

    @property
    def torch_threads(self) -> int:
        return self.learner.torch_threads or max(1, self.group.cores // 2)

    @property
    def virtual_batch_size(self) -> int:
        return self.learner.virtual_batch_size or self.learner.batch_size * self.group.num_peers

    def validate(self) -> None:
        """Raises ConfigError, naming the option and what to do, where options contradict."""
        actor, learner = self.actor, self.learner
        if (self.job.env == "catch") != (learner.net == "mlp"):
            raise ConfigError("--net mlp belongs to --env catch, and the others to Atari games")
        for name, value in (
            ("--total-steps", self.job.total_steps),
            ("--num-groups", actor.num_groups),
            ("--unroll-length", actor.unroll_length),
            ("--batch-size", learner.batch_size),
            ("--episodes", self.job.episodes),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if actor.env_pool and self.job.env == "catch":
            raise ConfigError("--env-pool is for Atari games; Catch is one array of this process")
        if actor.num_envs % (actor.num_groups * learner.batch_size):
            raise ConfigError(
                f"--num-envs {actor.num_envs} must be a multiple of --num-groups x --batch-size "
                f"= {actor.num_groups * learner.batch_size}: each group's unroll is cut into "
                "contributions of batch_size environments"
            )

    def as_dict(self) -> dict[str, Any]:
        """All options as JSON values, for the checkpoint."""
        return {
            section.name: {
                name: str(value) if isinstance(value, Path) else value
                for name, value in dataclasses.asdict(getattr(self, section.name)).items()
            }
            for section in dataclasses.fields(self)
        }


def default_config(
    env: str, num_peers: int, environ: Mapping[str, str], net: str = LearnerConfig.net
) -> Config:
    """The preset for `env` and `net`, fitted to the peer that `environ` describes.

    The job's environments and its virtual batch of 8 are shared out among the peers. With a number
    of them that divides 8 a round is made of as much data as with one.
    """
    config = Config()
    config.job.env = env
    if env == "catch":
        config.job.total_steps = 400_000
        config.learner.net = "mlp"
    elif net == "shallow":
        config.actor.num_envs = 64  # inference for few frames of this size is slow
    config.learner.batch_size = max(1, config.learner.batch_size // num_peers)
    batches = config.actor.num_groups * config.learner.batch_size
    config.actor.num_envs = max(batches, config.actor.num_envs // num_peers // batches * batches)
    index = _integer("MOOLINK_PEER_INDEX", environ.get("MOOLINK_PEER_INDEX", "0"), least=0)
    cores = max(1, len(os.sched_getaffinity(0)) // num_peers)
    config.group = GroupConfig(
        connect=environ.get("MOOLINK_BROKER"),
        group=environ.get("MOOLINK_GROUP"),
        name=environ.get("MOOLINK_PEER_NAME"),
        peer_index=index,
        num_peers=num_peers,
        cores=_integer("MOOLINK_CORES", environ.get("MOOLINK_CORES", str(cores))),
    )
    return config


def parse(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Reads the command line. Exits with a message, as is usual there, when it is wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The preset depends on these three, and must be known before the other options are read.
    env = _option(arguments, "--env", JobConfig.env)
    num_peers = _option(arguments, "--num-peers", environ.get("MOOLINK_NUM_PEERS", "1"))
    net = _option(arguments, "--net", LearnerConfig.net)
    default = default_config(env, _integer("the number of peers", num_peers), environ, net)
    config = tyro.cli(tyro.conf.OmitArgPrefixes[Config], default=default, args=arguments)
    try:
        config.validate()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    return config


def _option(arguments: Sequence[str], name: str, default: str) -> str:
    for index, spelled in enumerate(arguments):
        option, equals, value = spelled.partition("=")
        argument = option.replace("_", "-") + equals + value  # tyro takes both
        if argument.startswith(name + "="):
            return argument[len(name) + 1 :]
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
    return default


def _integer(what: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise SystemExit(f"error: {what} is {text!r}; it must be a whole number >= {least}")
    return int(text)
