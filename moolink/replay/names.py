"""The functions of a replay's server."""

DESCRIBE = "moolink.replay/{}/describe"
EXTEND = "moolink.replay/{}/extend"
SAMPLE = "moolink.replay/{}/sample"
UPDATE = "moolink.replay/{}/update"
REMOVE = "moolink.replay/{}/remove"
RESET = "moolink.replay/{}/reset"
STATS = "moolink.replay/{}/stats"
WRITE = "moolink.replay/{}/write"
END = "moolink.replay/{}/end"

ALL = (DESCRIBE, EXTEND, SAMPLE, UPDATE, REMOVE, RESET, STATS, WRITE, END)
