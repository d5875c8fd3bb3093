"""A worker process of a pool: makes its environments and serves the requests made of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from moolink.env_pool import channel, generators
from moolink.env_pool.board import Command
from moolink.env_pool.environment import Environment, EnvironmentFailed, Layouts, derive_seed
from moolink.env_pool.memory import PoolMemory, PoolShape, rows_of
from moolink.env_pool.runner import Runner
from moolink.env_pool.vector_runner import VectorRunner

RECREATIONS = 3  # times in a row that an environment is made anew without a step in between


class Worker:
    """The process: its environments in all batches, and the loop that serves the pool."""

    def __init__(
        self,
        setup: channel.Setup,
        start: channel.Start,
        create_env: Callable[..., Any],
        link: channel.Channel,
    ) -> None:
        self._setup = setup
        self._index = start.worker
        self._life = start.life
        self._create_env = create_env
        self._link = link
        self._doorbell = setup.doorbells[start.worker]

    def run(self) -> None:
        """Makes the environments, tells the pool, serves until it closes."""
        environments: dict[int, Environment] = {}
        seed = self._setup.seed
        entropy = () if seed is None else (seed, self._index, self._life)
        generators.seed_globals(*entropy)
        try:
            self._make(environments)
            generators.seed_torch_if_new(*entropy)
            if self._life > 0:
                self._link.discard_unread()  # Meant for an earlier life; the pool sends it again.
            self._tell(self._describe(list(environments.values())))
            mapped = self._link.receive()
            self._serve(mapped.shape, environments)
        except EnvironmentFailed as error:
            self._tell(error.report)
        except EOFError:
            return  # The pool closed before we were ready.
        finally:
            for environment in environments.values():
                environment.close()

    def _tell(self, message: object) -> None:
        # A pool that has closed does not listen any more.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._link.send(message)

    def _make(self, environments: dict[int, Environment]) -> None:
        setup = self._setup
        for batch in range(setup.batches):
            rows = rows_of(self._index, setup.workers, setup.batch_size)
            index, stop = (batch * setup.batch_size + row for row in (rows.start, rows.stop))
            while index < stop:
                seed = None if setup.seed is None else derive_seed(setup.seed, index, self._life)

                self._tell(channel.Making(os.getpid(), index))

                def create(index: int = index) -> Any:
                    return self._create_env(*([index] if setup.passes_index else []))

                made = environments[index] = Environment(create, index, seed)
                if index + (made.rows or 1) > stop:
                    raise made.failed(_too_many(made.rows, stop - index))
                index += made.rows or 1

    def _describe(self, environments: list[Environment]) -> channel.Made:
        """Describes the spaces, which all environments of this worker must share."""
        first = environments[0]
        with first.reporting():
            layouts = Layouts(first, self._setup.behaviour)
        declared = dataclasses.replace(self._setup.behaviour, infer=False)
        if not layouts.warning:
            for environment in environments[1:]:
                if environment.rows != first.rows:
                    raise environment.failed(_other_rows(environment, first))
                with environment.reporting():
                    Layouts(environment, declared).require_same(layouts, first.index)
        return channel.Made(
            os.getpid(),
            layouts.observation,
            layouts.action,
            _pickled(_face(first.env)),
            _pickled(_spaces(environments)),
            layouts.warning,
            first.rows,
        )

    def _serve(self, shape: PoolShape, environments: dict[int, Environment]) -> None:
        memory = PoolMemory(shape, self._setup.memory, create=False)
        board, worker, batch_size = memory.board, self._index, shape.batch_size
        for row, environment in environments.items():
            environment.interrupted = self._life > 0 and bool(memory.begun[row])
            environment.due = environment.interrupted or self._setup.behaviour.first_step_resets
        current = board.current_word(worker)
        kind = Runner if next(iter(environments.values())).rows is None else VectorRunner
        runner = kind(shape, memory, self._setup.behaviour, environments, current, self._failed)
        # The requests of a worker's earlier lives are served, but for one that it died in.
        position = board.position(worker)
        shared_actions = shape.action is not None
        while not board.closing():
            request = board.request(worker, position)
            if request is None:
                self._sleep(memory, position)
                continue
            command, first, count = request
            if command is Command.STEP:
                runner.step(first, count, None if shared_actions else self._given())
            elif command is Command.RESET:
                arguments = self._arguments()
                self._seed_globals(arguments)
                runner.reset(range(first, first + count), arguments)
            else:
                runner.call(range(first, first + count), self._arguments())
            current[0] = 0
            if runner.results:
                self._send(runner, memory, first)
            position += 1
            batch = first // batch_size
            if board.serve(worker, batch):
                os.eventfd_write(self._setup.bells[batch], 1)

    def _sleep(self, memory: PoolMemory, position: int) -> None:
        """Waits for a request after `position`, or for the end of the pool."""
        board, worker = memory.board, self._index
        board.sleep(worker, True)
        if position == board.pushed(worker) and not board.closing():
            os.read(self._doorbell, 8)  # eventfd_read would end with a signal
        board.sleep(worker, False)

    def _arguments(self) -> channel.Arguments:
        arguments: channel.Arguments = self._link.receive()
        return arguments

    def _seed_globals(self, reset: channel.Arguments) -> None:
        """Seeds the global generators with a reset's first seed, so that it can be repeated."""
        for seed, _ in reset.of_row.values():
            if isinstance(seed, int | np.integer):
                generators.seed_globals(int(seed), self._index)
                return

    def _given(self) -> dict[int, Any]:
        return self._arguments().of_row

    def _send(self, runner: Runner | VectorRunner, memory: PoolMemory, row: int) -> None:
        """Sends the results that have no place in the shared memory."""
        results, runner.results = runner.results, channel.Results()
        try:
            self._tell(results)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            environment = runner.environments[row]
            environment.doing = "sending the environments' results"
            raise environment.failed(error) from error
        memory.board.count_message(self._index)

    def _failed(self, environment: Environment, error: EnvironmentFailed) -> None:
        environment.failures += 1
        if not self._setup.recreates or environment.failures > RECREATIONS:
            raise error
        report = error.report
        self._tell(channel.Recreated(report.environment, report.doing, report.traceback))
        environment.recreate()


def _too_many(rows: int | None, left: int) -> ValueError:
    return ValueError(
        f"create_env made a vector environment of {rows} rows, but this worker has only {left} "
        "left: num_envs must be num_workers times a multiple of the rows of one"
    )


def _other_rows(environment: Environment, first: Environment) -> ValueError:
    has, had = (
        "is a single one" if rows is None else f"has {rows} rows"
        for rows in (environment.rows, first.rows)
    )
    return ValueError(
        f"environment {environment.index} {has}, and environment {first.index} {had}: create_env "
        "must make all of them with as many rows"
    )


def _face(env: Any) -> channel.Face:
    spec = getattr(env, "spec", None)
    return channel.Face(
        dict(getattr(env, "metadata", None) or {}),
        getattr(env, "render_mode", None),
        spec if _pickled(spec) else None,
    )


def _spaces(environments: list[Environment]) -> list[tuple[Any, ...]]:
    """The spaces of each environment, or one pair if they are all equal."""
    spaces = [
        (environment.space("observation"), environment.space("action"))
        for environment in environments
        for _ in range(environment.rows or 1)
    ]
    return spaces if any(pair != spaces[0] for pair in spaces) else spaces[:1]


def _pickled(value: Any) -> bytes:
    """Pickles a value that only some programs need; empty if it cannot be pickled."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return b""


def main(
    setup: channel.Setup,
    start: channel.Start,
    create_env: Callable[..., Any],
    link: channel.Channel,
) -> None:
    """Runs a worker in this process, which was forked for it, and ends the process."""
    status = 1
    try:
        Worker(setup, start, create_env, link).run()
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here; the pool reports its death
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: exit handlers of the server's modules belong to the server.
        os._exit(status)
