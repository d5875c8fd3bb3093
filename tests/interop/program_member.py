"""A member that trains a line with a compiled step, whose gradients all members reduce.

It prints the number of members that a step was among, and the slope, where they change.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp

import moolink
import moolink.jax as mj


def main(name: str, broker: str, steps: int) -> None:
    """Runs that many steps; a step that fails because the members changed is run again."""
    with moolink.Rpc(name) as rpc:
        rpc.connect(broker)
        group = moolink.Group(rpc, "group")
        group.set_timeout(3.0)

        @jax.jit
        def step(slope: Any, x: Any, token: Any) -> Any:
            gradient = jax.grad(lambda s: ((s * x - 3 * x) ** 2).mean())(slope)
            reduced, _ = mj.all_reduce(
                group, "step", {"gradient": gradient, "members": jnp.float32(1)}, token=token
            )
            return slope - 0.1 * reduced["gradient"] / reduced["members"], reduced["members"]

        slope, done, printed, changed = jnp.float32(0), 0, "", True
        while done < steps:
            changed = group.update() or changed
            if not group.active():
                continue
            try:
                if changed:  # all go on from the same slope
                    slope = group.all_reduce("slope", slope, op="mean").result()
                    changed = False
                with mj.translate_errors():
                    slope, members = jax.block_until_ready(
                        step(slope, jnp.linspace(0, 1, 1000), mj.token(group))
                    )
            except (moolink.GroupChanged, moolink.Closed, moolink.TimeoutError):
                changed = True
                continue
            done += 1
            if (line := f"{members:g} {slope:.3f}") != printed:
                print(line, flush=True)
                printed = line


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
