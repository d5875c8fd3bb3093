"""Other libraries' interfaces on moolink, for programs that were written for them."""
