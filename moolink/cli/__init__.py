"""The ``moolink`` executable."""
