"""A process that meets the others of its job: ``python -m tests.launch.meets [fail]``.

With an argument the process of index 1 fails once, so that its launcher starts it again.
"""

from __future__ import annotations

import sys

import numpy as np

import moolink
from moolink.launch import place


def main() -> int:
    mine = place()
    with moolink.Rpc(mine.name) as rpc:
        assert mine.group is not None
        with moolink.Group(rpc, mine.group) as group:
            address = mine.start_broker()
            assert address is not None
            assert mine.start_broker() == address  # a second call starts none
            rpc.connect(address)
            group.wait_for_members(mine.count)
            total = group.all_reduce("sum", np.array([mine.index + 1.0])).result()
            if sys.argv[1:] and mine.index == 1 and not mine.restarted:
                return 1
            sys.stdout.write(f"{mine.source} {mine.index} {mine.count} {total[0]:g}\n")
            sys.stdout.flush()
            group.all_reduce("end", np.zeros(1)).result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
