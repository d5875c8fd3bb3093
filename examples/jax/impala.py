"""IMPALA in JAX: every peer acts and learns; gradients are reduced through a moolink group.

    moolink run -n 2 -m examples.jax.impala                              two peers and a broker
    moolink run -n 2 -m examples.jax.impala --env-id CartPole-v1         any Gymnasium environment
    python -m examples.jax.impala --connect HOST:PORT --group G          one more peer
    moolink run -n 2 -m examples.jax.impala --deterministic              the same bits each time
    python -m examples.jax.impala --mode evaluate                        play from the checkpoint

The twin of `examples/torch/impala.py`: the same options, files, numbers and checkpoints, and peers
of both may learn one model in one group. What is computed are pure functions, compiled once: `act`,
the gradients of `impala_loss`, and the optimizer's step in `accumulator.steps()`. Beside this file,
the algorithm is in `networks.py` and `vtrace.py`; the twin lists the other files.

Time is the first axis of all arrays, the batch the second. `x_t` is x at time t, `x_tm1` at t - 1
and `x_tp1` at t + 1. T is the length of an unroll, E the number of environments that step together,
B that of a contribution, N the number of parts of an action.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import moolink.jax
from examples.common import acting
from examples.common.environments import Environments, Step, make_envs
from examples.common.evaluation import evaluated
from examples.common.options import ImpalaOptions
from examples.common.run import Left, Run, main, make_group
from examples.jax import common
from examples.jax.common import Parameters
from examples.jax.networks import Net, State
from examples.jax.vtrace import vtrace

# Acting


def act(
    net: Net, p: Parameters, buffers: Parameters, key: jax.Array, count: Any, *inputs: Any
) -> tuple[jax.Array, jax.Array, jax.Array, State]:
    """One step of E environments: actions, logarithms of their probabilities, values, memory."""
    observation, first, state = inputs
    observation = {name: x[None] for name, x in observation.items()}
    policy, value, state = net(p, buffers, observation, first[None], state)
    pi = net.pi(p, policy)
    action = pi.sample(jax.random.fold_in(key, count))
    return action[0], pi.log_prob(action)[0], value[0], state


class Actor(acting.ActingThread):
    """Arrays are immutable: new parameters take the place of the old ones."""

    def __init__(self, o: ImpalaOptions, envs: Environments, net: Net, run: Run) -> None:
        super().__init__(o, envs, run)
        self.parameters: tuple[Parameters, Parameters]  # and buffers
        self.net, self.act = net, jax.jit(partial(act, net))

    def play(self, group: acting.Group) -> Iterator[acting.Unroll | None]:
        """Plays forever in a group of environments, and yields each unroll that is full. One that
        is yielded again is learned from again, and its steps count once.

        Entry t of all but the observation and `first` belongs to the step from observation t to
        t + 1. The batches of `impala_loss` have each recorded quantity under the same name.
        """
        o, E, seed = self.o, group.num_envs, self.o.group_seed(group.number)
        random, count = jax.random.key(seed), np.uint32(0)  # of the actions
        observation = group.reset(seed if o.seeds_envs else None)
        first, state = np.ones(E, np.bool_), self.net.no_memory(E)
        for unroll in itertools.cycle(group.unrolls):
            unroll.state = state  # stored as in R2D2
            for t in range(o.unroll_length):
                unroll.record(t, observation=observation, first=first)
                count += np.uint32(1)
                inputs = observation, first, state
                action, log_prob, _, state = self.act(*self.parameters, random, count, *inputs)
                unroll.record(t, action=action, log_prob=log_prob)
                group.send(action)
                yield None  # another group's turn, while these environments step
                step = group.recv()
                observation, first = step.observation, step.episode_over
                ended = step.terminated | step.truncated
                unroll.record(
                    t,
                    reward=step.reward,
                    discount=np.where(ended, 0.0, o.discount),
                    bootstrap=self.value_beyond_limit(step, random, count, state),
                )
            unroll.record(o.unroll_length, observation=observation, first=first)
            yield unroll

    def value_beyond_limit(
        self, step: Step, random: jax.Array, count: Any, state: State
    ) -> np.ndarray | float:
        """The values of the observations at which a limit cut episodes off, which the learner does
        not see; elsewhere 0."""
        if step.last_observation is None:
            return 0.0
        inputs = step.last_observation, np.zeros_like(step.truncated), state
        _, _, value, _ = self.act(*self.parameters, random, count, *inputs)
        return np.where(step.truncated, np.asarray(value), 0.0)

    def use(self, parameters: tuple[Parameters, Parameters]) -> None:
        self.parameters = parameters

    def __exit__(self, kind: type[BaseException] | None = None, *more: object) -> None:
        self.stopped = True
        if kind is not Left:  # else the process ends now, also if the thread is still compiling
            super().__exit__(kind, *more)


# Learning


def impala_loss(
    net: Net, o: ImpalaOptions, p: Parameters, buffers: Parameters, batch: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """The loss of one contribution, and the mean entropy of the policy in nats. The batch has the
    quantities that `Actor.play` recorded in B environments, [T, B, ...], with T + 1 entries of the
    observation and `first`. Where a step ended an episode the discount is 0.

    `mean`: over time and batch. `sum`: over time and the whole round, as in the paper; a round's
    gradient is the mean of its contributions, hence the factor.
    """
    x, _ = net.features(p, buffers, batch["observation"], batch["first"], batch["state"])
    policy, baseline = net.heads(p, x, batch["observation"])
    pi = net.pi(p, policy[:-1])
    log_pi_a = pi.log_prob(batch["action"])
    reward = jnp.sign(batch["reward"]) if o.clip_reward else batch["reward"]
    targets = vtrace(
        lax.stop_gradient(log_pi_a) - batch["log_prob"],
        batch["discount"],
        reward + o.discount * batch["bootstrap"],
        lax.stop_gradient(baseline[:-1]),
        lax.stop_gradient(baseline[-1]),
        lambda_=o.vtrace_lambda,
        clip_rho=o.clip_rho,
        clip_c=o.clip_c,
    )
    entropy = pi.entropy()
    loss_t = (
        -targets.pg_advantages * log_pi_a
        + o.baseline_cost * 0.5 * jnp.square(targets.vs - baseline[:-1])
        - o.entropy_cost * entropy
    )
    total = loss_t.mean() if o.loss == "mean" else loss_t.sum(0).mean() * o.round_size
    return total, entropy.mean()


def make_optimizer(o: ImpalaOptions) -> optax.GradientTransformation:
    """With a rate of 1: `accumulator.steps()` multiplies by the schedule's."""
    if o.optimizer == "adam":
        return optax.adam(1.0, eps=o.adam_eps)
    return optax.rmsprop(1.0, decay=o.rmsprop_decay, eps=o.rmsprop_eps, eps_in_sqrt=False)


def train(o: ImpalaOptions) -> None:
    """Learns, until the job's steps or seconds are over, or until a signal comes."""
    common.configure(o, one_thread=o.deterministic)
    envs = make_envs(o, o.envs_per_group)
    run = Run(o, envs)
    net = Net(envs, o)
    p, buffers = common.parameters_of(net, envs, o, run.saved)
    optimizer = make_optimizer(o)
    optimizer_state = optimizer.init(p)
    if run.saved is not None:
        optimizer_state = moolink.jax.load_optimizer_state(optimizer_state, run.saved["optimizer"])
    gradients_of = jax.jit(jax.value_and_grad(partial(impala_loss, net, o), has_aux=True))

    with (
        make_group(o) as (group, connect),
        moolink.jax.Accumulator(
            "impala",
            p,
            buffers,
            group=group,
            max_grad_norm=o.max_grad_norm,
            on_nonfinite="raise",
            units=o.job_units,
        ) as accumulator,
        Actor(o, envs, net, run) as actor,
        run.joined(group, accumulator, partial(common.snapshot, accumulator)),
    ):
        run.begin(connect)
        for step in accumulator.steps(
            optimizer, optimizer_state=optimizer_state, learning_rate=o.rate, **run.callbacks()
        ):
            if not run.turn(step):
                continue
            p, buffers = step.parameters, accumulator.buffers()
            actor.take_parameters((p, buffers), step.version, accumulator.own_units)
            if actor.ident is None:  # not before: a newcomer's parameters come from the leader
                actor.start()
            batch = actor.next_batch(0.01, step.unit)
            if batch is None:
                continue
            (loss, entropy), gradients = gradients_of(p, buffers, batch.data)
            jax.block_until_ready(gradients)  # arrays are read without a copy
            actor.release(batch)
            counters = {"steps": batch.new_steps, **run.counters()}
            step.reduce(gradients, batch_size=o.batch_size, counters=counters)
            run.metrics = {"loss": loss, "entropy": entropy}


def evaluate(o: ImpalaOptions) -> None:
    """Plays episodes from the checkpoint, and reports their returns."""
    common.configure(o)
    with evaluated(o) as evaluation:
        net = Net(evaluation.envs, o)
        p, buffers = common.parameters_of(net, evaluation.envs, o, evaluation.saved)
        state = net.no_memory(evaluation.envs.num_envs)

        @jax.jit
        def act(
            observation: Any, first: jax.Array, state: State, key: jax.Array
        ) -> tuple[jax.Array, State]:
            observation = {name: x[None] for name, x in observation.items()}
            policy, _, state = net(p, buffers, observation, first[None], state)
            pi = net.pi(p, policy)
            return (pi.mode() if o.greedy else pi.sample(key))[0], state

        key = jax.random.key(o.seed)
        while not evaluation.is_over():
            key, now = jax.random.split(key)
            action, state = act(evaluation.observation, evaluation.first, state, now)
            evaluation.step(np.asarray(action).astype(evaluation.envs.actions.dtype))


if __name__ == "__main__":
    sys.exit(main(ImpalaOptions, train, evaluate))
