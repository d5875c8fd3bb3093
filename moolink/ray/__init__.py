"""moolink and Ray: a tensor transport between actors, and jobs whose processes actors run."""

from moolink.internal.extras import needed_by

with needed_by("moolink.ray", "ray"):
    from moolink.ray.launching import command, launch
    from moolink.ray.transport import NAME, Place, TensorTransport, register

__all__ = ["NAME", "Place", "TensorTransport", "command", "launch", "register"]
