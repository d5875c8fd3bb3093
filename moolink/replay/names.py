"""The functions of a replay's server, and how long a call waits there."""

DESCRIBE = "moolink.replay/{}/describe"
EXTEND = "moolink.replay/{}/extend"
SAMPLE = "moolink.replay/{}/sample"
UPDATE = "moolink.replay/{}/update"
REMOVE = "moolink.replay/{}/remove"
RESET = "moolink.replay/{}/reset"
STATS = "moolink.replay/{}/stats"
WRITE = "moolink.replay/{}/write"
ITEMS = "moolink.replay/{}/items"
END = "moolink.replay/{}/end"

TURN = 5.0  # seconds for which one call waits at the server; the client makes the next one

ALL = (DESCRIBE, EXTEND, SAMPLE, UPDATE, REMOVE, RESET, STATS, WRITE, ITEMS, END)
