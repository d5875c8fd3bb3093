"""A member that sums large arrays again and again, and writes down what came of it.

Each line of its file: the number of members at the call, the result's smallest and largest element.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import moolink

ELEMENTS = 1_000_000  # 4 MB: many chunks


def main(name: str, broker: str, path: Path) -> None:
    """Runs until it is killed."""
    data = np.ones(ELEMENTS, np.float32)
    out = np.empty_like(data)
    with moolink.Rpc(name) as rpc, path.open("w", buffering=1) as lines:
        rpc.connect(broker)
        group = moolink.Group(rpc, "group")
        group.set_timeout(3.0)
        while True:
            group.update()
            if not group.active():
                continue
            members = len(group.members())
            try:
                out[:] = -1
                group.all_reduce("x", data, out=out).result()
            except (moolink.GroupChanged, moolink.Closed, moolink.TimeoutError):
                continue
            lines.write(f"{members} {out.min():g} {out.max():g}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
