"""A peer whose k-th contribution is a one-hot vector of its own, and whose model is their sum.

So the model says which contributions were delivered and how often: every entry must be 0 or 1, and
all peers must hold the same vector at the same version. Storm (storm.py) forks such peers from a
process that has torch imported, and reads the events that they send.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

import torch

import moolink

ENTRIES = 1 << 20  # of the model: contributions of all peers together
THINKING = 0.05  # seconds between contributions, as a backward pass would take


def main(
    broker: str,
    slot: int,
    entries: range,
    crash_at: str | None,
    device: str,
    events: Connection[object, object],
    stay: Connection[object, object],
) -> None:
    """Contributes until the other end of ``stay`` is closed, then leaves in order.

    Args:
        broker: address of the broker.
        slot: number of this peer.
        entries: of the model that are this peer's: one for each contribution that it may make.
        crash_at: crash point at which the process dies, as in MOOLINK_CRASH_AT.
        device: of the model.
        events: takes one dictionary an event.
        stay: its other end is open while the peer is to take part.
    """

    def say(event: str, **values: object) -> None:
        events.send({"event": event, "at": time.monotonic(), **values})

    if crash_at:
        os.environ["MOOLINK_CRASH_AT"] = crash_at
    torch.set_num_threads(1)
    model = torch.zeros(ENTRIES // 64, 64, device=device, requires_grad=True)
    flat = model.detach().view(-1)
    rpc = moolink.Rpc(f"peer-{slot}")
    rpc.connect(broker)
    group = moolink.Group(rpc, "storm")
    accumulator = moolink.Accumulator("model", [model], group=group, checksum_every=1)
    accumulator.set_virtual_batch_size(2)
    k = 0
    total = 0  # delivered contributions by the counters; must equal the model's sum
    next_offer = 0.0
    say("started")
    while not stay.poll():
        accumulator.update()
        if accumulator.wants_state():
            accumulator.set_state({"total": total})
        if accumulator.has_new_state():
            total = accumulator.state()["total"]
            say("state", version=accumulator.model_version(), total=total, sum=int(flat.sum()))
        if accumulator.has_gradients():
            stats = accumulator.get_gradient_stats()
            delivered = model.grad.view(-1) * stats["batch_size"]
            flat += delivered
            total += stats["counters"].get("contributions", 0)
            say(
                "round",
                version=accumulator.model_version(),
                indices=delivered.nonzero().view(-1).tolist(),
                contributors=stats["contributors"],
                batch_size=stats["batch_size"],
                lost=stats["lost"],
                total=total,
                sum=int(flat.sum()),
                worst=float(flat.max()),
            )
            accumulator.zero_gradients()
        elif accumulator.wants_gradients() and k < len(entries) and time.monotonic() >= next_offer:
            next_offer = time.monotonic() + THINKING
            model.grad = torch.zeros_like(model)
            model.grad.view(-1)[entries[k]] = 1.0
            k += 1
            say("offer", k=k)
            accumulator.reduce_gradients(1, counters={"contributions": 1})
        else:
            accumulator.wait(THINKING)
    accumulator.close()
    group.close()
    rpc.close()
