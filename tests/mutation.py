"""Good bytes, bent: for tests of those who read what others write."""

from __future__ import annotations

import random


def bent(good: bytes, dice: random.Random) -> bytes:
    """The bytes with one to three changes, each of a bit, a byte, a run or the end."""
    words = bytearray(good)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(words))
        kind = dice.randrange(6)
        if kind == 0:
            words[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            words[at] = dice.choice([0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)])
        elif kind == 2:
            del words[max(at, 1) : at + dice.randint(1, 8)]  # one byte is always left
        elif kind == 3:
            words[at:at] = words[at : at + dice.randint(1, 8)]
        elif kind == 4:
            words[at:at] = dice.randbytes(dice.randint(1, 50))
        else:
            del words[at + 1 :]
    return bytes(words)
