"""A pool's requests to its workers and their progress, in shared words.

Each worker has a ring of requests, which it serves in order, and a count of those it has served of
each batch. While neither side sleeps, neither makes a system call:

- A worker that finds its ring empty says that it sleeps, looks again, and reads its doorbell. The
  pool puts a request into the ring and then rings the doorbell of a worker that sleeps.
- A waiter of the pool says of how many served requests it wants to hear (the batch's goal), looks
  again, and polls the batch's bell. A worker counts a request as served and then rings the bell if
  the goal is reached.

In both cases each side writes its own word before it reads the other's, in one order for all: at
least one of them sees the other's, and no wake-up is lost. The counts are the truth and live as
long as the pool: a worker that is started again goes on with the first request not counted.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from moolink._core import SharedWords

_CLOSING = 0
_COUNT_BITS, _FIRST_BITS = 28, 32


class Command(enum.IntEnum):
    """The request for a range of rows; the arguments of all but STEP come in a message."""

    STEP = 0
    RESET = 1
    CALL = 2


_COMMANDS = tuple(Command)


class Board:
    """The shared words of one pool, seen by the pool or by a worker."""

    def __init__(
        self, words: npt.NDArray[np.uint64], workers: int, batches: int, num_envs: int
    ) -> None:
        self._words = SharedWords(words)
        self._workers = workers
        self._batches = batches
        self._goals = 8
        self._lines = self._goals + _line(batches)
        self._line_size = _line(4 + batches)
        ring = self._lines + workers * self._line_size
        # Where each worker's words begin: pushed, sleeping, current, sent, served of each batch.
        self._of = list(range(self._lines, ring, self._line_size))
        self._capacity = _capacity(num_envs)
        self._rings = [ring + i * self._capacity for i in range(workers)]
        self._current = [words[self._of[i] + 2 : self._of[i] + 3].data for i in range(workers)]

    @staticmethod
    def words(workers: int, batches: int, num_envs: int) -> int:
        """Returns how many words a board needs."""
        lines = workers * (_line(4 + batches) + _capacity(num_envs))
        return 8 + _line(batches) + lines

    # The pool's side.

    def close(self) -> None:
        """Tells the workers to end, when they look next."""
        self._words.store(_CLOSING, 1)

    def push(self, worker: int, first: int, count: int, command: Command = Command.STEP) -> bool:
        """Asks `worker` to treat `count` rows from `first`; returns whether it has to be woken."""
        entry = first | count << _FIRST_BITS | command << (_FIRST_BITS + _COUNT_BITS)
        return self._words.push(self._of[worker], self._rings[worker], self._capacity, entry)

    def served_by(self, worker: int, batch: int) -> int:
        """Returns how many requests about `batch` a worker has served."""
        return self._words.load(self._of[worker] + 4 + batch)

    def position(self, worker: int) -> int:
        """Returns how many requests a worker has served."""
        return self._words.sum(self._of[worker] + 4, 1, self._batches)

    def pushed(self, worker: int) -> int:
        """Returns how many requests were made of a worker."""
        return self._words.load(self._of[worker])

    def ask(self, batch: int, goal: int, bell: int) -> bool:
        """Makes the batch's bell ring when `goal` requests are served; returns whether they are.

        Silences a bell that rang for a smaller goal or too early. A caller that waits for the same
        goal too looks at the board next.
        """
        return self._words.ask(
            self._goals + batch,
            goal,
            self._lines + 4 + batch,
            self._line_size,
            self._workers,
            bell,
        )

    def current(self, worker: int) -> int | None:
        """Returns the row of the environment that a worker runs, None if it runs none."""
        word = self._words.load(self._of[worker] + 2)
        return word - 1 if word else None

    def sent(self, worker: int) -> int:
        """Returns how many messages with results a worker has sent."""
        return self._words.load(self._of[worker] + 3)

    def revive(self, worker: int, sent: int) -> None:
        """Puts the words of a dead worker right for its next life."""
        line = self._of[worker]
        self._words.store(line + 1, 0)
        self._words.store(line + 2, 0)
        self._words.store(line + 3, sent)

    # A worker's side.

    def closing(self) -> bool:
        """Tells whether the workers are to end."""
        return self._words.load(_CLOSING) != 0

    def request(self, worker: int, position: int) -> tuple[Command, int, int] | None:
        """Returns the request at `position`: the command, the first row, the number of rows.

        Returns None if there is no request there yet.
        """
        if self._words.load(self._of[worker]) == position:
            return None
        word = self._words.load(self._rings[worker] + position % self._capacity)
        count = word >> _FIRST_BITS & ((1 << _COUNT_BITS) - 1)
        command = word >> (_FIRST_BITS + _COUNT_BITS)
        return _COMMANDS[command], word & ((1 << _FIRST_BITS) - 1), count

    def sleep(self, worker: int, sleeping: bool) -> None:
        """Says whether the worker is about to read its doorbell; look again after it."""
        self._words.store(self._of[worker] + 1, sleeping)

    def serve(self, worker: int, batch: int) -> bool:
        """Counts a request as served; returns whether the batch's bell has to be rung."""
        return self._words.serve(
            self._of[worker] + 4 + batch,
            self._goals + batch,
            self._lines + 4 + batch,
            self._line_size,
            self._workers,
        )

    def count_message(self, worker: int) -> None:
        """Counts a message with results as sent."""
        index = self._of[worker] + 3
        self._words.store(index, self._words.load(index) + 1)

    def current_word(self, worker: int) -> memoryview:
        """Returns one word: 1 + the row of the environment that the worker runs, 0 for none."""
        return self._current[worker]


def _line(words: int) -> int:
    """Rounds up to whole cache lines."""
    return -(-words // 8) * 8


def _capacity(num_envs: int) -> int:
    """Requests that can be under way: one an environment, as a power of two."""
    return 1 << max(1, num_envs - 1).bit_length()
