"""Learners written in PyTorch."""

import moolink.torch  # noqa: F401 - without torch it names the extra
