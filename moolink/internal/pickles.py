"""Pickles between peers: code that others send and this process runs, so never by accident."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moolink.internal import logs

if TYPE_CHECKING:
    from moolink.tokens import Identity

AllowPickle = bool | Literal["insecure"]

_told: set[str] = set()  # the descriptions in warnings that were logged


def check(allowed: AllowPickle, proof: Identity) -> None:
    """Checks an Rpc's option ``allow_pickle``. If pickles are allowed, a warning in the log names
    the peers that can run code here, once for holders of the token and once for all processes.

    Raises:
        ValueError: it is none of its values, or True at a peer that asks others for no token.
    """
    if allowed not in (True, False, "insecure"):
        raise ValueError(f'allow_pickle is True, False or "insecure", not {allowed!r}')
    if not allowed:
        return
    if allowed != "insecure" and not proof.keys:
        raise ValueError(
            "allow_pickle=True needs a token: this peer is insecure, and any process that reaches "
            'its port could run code here. Use a token, or say allow_pickle="insecure" where you '
            "trust every process that reaches it"
        )
    _tell("any holder of the token" if proof.keys else "any process that reaches its port")


def _tell(who: str) -> None:
    if who in _told:
        return
    _told.add(who)
    logs.logger.warning(
        "pickles from peers are allowed in this process (allow_pickle): %s can run code here", who
    )
