"""The networks as data, which each framework makes in its own way; and their layout.

The layout is torch's: convolutions [out, in, height, width], dense layers [out, in], and the
features of the last convolution in the order (channels, height, width).
"""

from __future__ import annotations

# (channels, kernel, stride) of each convolution, and the width of the layer after them.
NETS: dict[str, tuple[tuple[tuple[int, int, int], ...], int]] = {
    "small": (((16, 6, 3), (32, 3, 2)), 256),
    "shallow": (((16, 8, 4), (32, 4, 2)), 256),
    "mlp": ((), 128),
}


def parameter_names(kind: str) -> list[str]:
    """Names of a network's parameters in checkpoints, in the order in which gradients are reduced.

    Layer i of `torso` counts the rectifiers between convolutions, as `torch.nn.Sequential` does.
    """
    convolutions, _ = NETS[kind]
    layers = [f"torso.{2 * i}" for i in range(len(convolutions))]
    layers += ["hidden", "policy", "baseline"]
    return [f"{layer}.{array}" for layer in layers for array in ("weight", "bias")]
