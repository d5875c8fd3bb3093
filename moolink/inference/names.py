"""The functions by which actors call inference servers."""

INFER = "moolink.inference/{}/infer"
LOAD = "moolink.inference/{}/load"
END = "moolink.inference/{}/end"
