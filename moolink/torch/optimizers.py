"""States of torch's optimizers in a form that members in other frameworks understand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from moolink.data import nodes
from moolink.internal.optimizer_kinds import require_same_kind

# Names of the running means, here and in each optimizer.
MOMENTS: dict[type[torch.optim.Optimizer], dict[str, str]] = {
    torch.optim.Adam: {"mean": "exp_avg", "mean_of_squares": "exp_avg_sq"},
    torch.optim.AdamW: {"mean": "exp_avg", "mean_of_squares": "exp_avg_sq"},
    torch.optim.RMSprop: {"mean_of_squares": "square_avg"},
    torch.optim.SGD: {"momentum": "momentum_buffer"},
}


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Returns the state of Adam, AdamW, RMSprop or SGD for members of any framework.

    ``count`` is the number of updates; ``moments`` has ``mean``, ``mean_of_squares`` or
    ``momentum``, lists of tensors in the order of the parameters, by reference; ``groups`` has
    torch's hyperparameters, which other frameworks ignore; ``keeps`` names the moments that the
    optimizer keeps once it has made an update. None: another optimizer, or one with more
    (``amsgrad``, ``centered``).
    """
    names = MOMENTS.get(type(optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state.get(p, {}) for p in parameters]
    used = {key for state in states for key, value in state.items() if value is not None}
    if names is None or not used <= {"step", *names.values()}:
        return None
    moments = {
        name: [s.get(key, torch.zeros_like(p)) for p, s in zip(parameters, states, strict=True)]
        for name, key in names.items()
        if key in used
    }
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    count = max((int(state.get("step", 0)) for state in states), default=0)
    return {"count": count, "moments": moments, "groups": groups, "keeps": list(names)}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Copies a state from :func:`optimizer_state` of this or another framework.

    Raises:
        ValueError: the state is that of another optimizer, or of other parameters.
    """
    names, moments = MOMENTS.get(type(optimizer), {}), state["moments"]
    require_same_kind(state, set(names), type(optimizer).__name__)
    own = optimizer.state_dict()
    indices = [index for group in own["param_groups"] for index in group["params"]]
    if any(len(moment) != len(indices) for moment in moments.values()):
        raise ValueError(f"the state that came is not of {len(indices)} parameters")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, moment in moments.items():
        for p, value in zip(parameters, moment, strict=True):
            if tuple(value.shape) != tuple(p.shape):
                raise ValueError(
                    f"{name} of the state that came is of shape {tuple(value.shape)}, and the "
                    f"parameter of {tuple(p.shape)}"
                )
    states: dict[int, dict[str, Any]] = {index: {} for index in indices} if moments else {}
    for name, moment in moments.items():
        for index, value in zip(indices, moment, strict=True):
            states[index][names[name]] = torch.as_tensor(value).clone()
            states[index]["step"] = torch.tensor(float(state["count"]))
    groups = state.get("groups") or [{} for _ in own["param_groups"]]
    merged = [mine | dict(theirs) for mine, theirs in zip(own["param_groups"], groups, strict=True)]
    optimizer.load_state_dict({"state": states, "param_groups": merged})


def plain_tree(tree: Any) -> Any:
    """The tree with plain dicts, lists and tuples, which the codec can encode. Named fields (of
    namedtuples, dataclasses and registered pytrees) become the keys of dicts."""
    if isinstance(tree, Mapping):
        return {key: plain_tree(value) for key, value in tree.items()}
    node = nodes.apart(tree)
    if node is None or tree is None:
        return tree
    parts = [plain_tree(part) for part in node.parts]
    if type(tree) in (list, tuple):
        return type(tree)(parts)
    return {str(key): part for key, part in zip(node.keys, parts, strict=True)}


def tree_like(mine: Any, plain: Any) -> Any:
    """The plain tree with the types of this peer's tree (such as ``Counter``)."""
    if isinstance(mine, dict) and isinstance(plain, dict):
        values = {k: tree_like(mine.get(k), v) for k, v in plain.items()}
        if type(mine) is dict:
            return values
        same_kind = copy.copy(mine)
        same_kind.clear()
        same_kind.update(values)
        return same_kind
    node = nodes.apart(mine)
    if node is None or mine is None:
        return plain
    theirs = plain
    if isinstance(plain, dict):
        theirs = [plain[key] for key in map(str, node.keys) if key in plain]
    if not isinstance(theirs, list | tuple) or len(theirs) != len(node.parts):
        return plain  # the optimizer's or the scheduler's own load_state_dict() checks it
    return node.rebuild([tree_like(m, p) for m, p in zip(node.parts, theirs, strict=True)])
