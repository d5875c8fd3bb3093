"""The functions by which publishers and subscribers call each other."""

# Of a publisher.
NEXT = "moolink.weights/{}/next"
SOURCE = "moolink.weights/{}/source"
CHUNK = "moolink.weights/{}/chunk"
PARTS_NEXT = "moolink.weights/{}/parts/next"
PARTS = "moolink.weights/{}/parts"
PARTS_END = "moolink.weights/{}/parts/end"
OF_PUBLISHER = (NEXT, SOURCE, CHUNK, PARTS_NEXT, PARTS, PARTS_END)
# Of a parameter server.
PUSH = "moolink.parameters/{}/push"
# Of a subscriber, for others.
COPY_CHUNK = "moolink.weights/{}/copy/chunk"
COPY = "moolink.weights/{}/copy"
