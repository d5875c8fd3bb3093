"""Random generators that workers inherit: without seeds of their own, all would draw alike.

Workers are forked after the user's module was loaded, so every generator that exists by then has
one state in all of them.
"""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import numpy as np

_SEED_BITS = 64  # The system gives 128 bits. A seed of more than this was not chosen by a person.
_TORCHS_SEED = 67280421310721  # torch's default seed


def drawn_from_the_system() -> list[Any]:
    """Finds numpy's bit generators that this process made without a seed."""
    found = []
    for one in gc.get_objects():
        if issubclass(type(one), np.random.BitGenerator):
            entropy = getattr(one.seed_seq, "entropy", None)
            if isinstance(entropy, int) and entropy.bit_length() > _SEED_BITS:
                found.append(one)
    return found


def branch(bit_generators: list[Any], worker: int, life: int) -> None:
    """Gives each inherited generator a stream of this worker, derived from its own seed."""
    for one in bit_generators:
        sequence = one.seed_seq
        key = (*sequence.spawn_key, worker, life)
        derived = np.random.SeedSequence(sequence.entropy, spawn_key=key)
        one.state = type(one)(derived).state


def seed_globals(*entropy: int) -> None:
    """Seeds the global generators of `random` and numpy, and of torch if it is loaded.

    Args:
        entropy: numbers from which to derive the seeds; none: the system gives them.
    """
    sequence = _sequence(entropy)
    random.seed(int(sequence.generate_state(1, np.uint64)[0]))
    np.random.seed(sequence.generate_state(8)[4:])
    _seed_torch(sequence)


def seed_torch_if_new(*entropy: int) -> None:
    """Seeds torch if it was loaded since, and still has its default seed."""
    # Another thread may be importing it: then it has no generator yet.
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "initial_seed") and torch.initial_seed() == _TORCHS_SEED:
        _seed_torch(_sequence(entropy))


def _sequence(entropy: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence([abs(part) for part in entropy] or None)


def _seed_torch(sequence: np.random.SeedSequence) -> None:
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "manual_seed"):
        torch.manual_seed(int(sequence.generate_state(5, np.uint64)[4] >> np.uint64(1)))
