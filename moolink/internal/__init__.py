"""Internal helpers of moolink. Programs do not need them."""
