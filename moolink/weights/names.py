"""The functions by which publishers and subscribers call each other."""

# Of a publisher.
NEXT = "moolink.weights/{}/next"
SOURCE = "moolink.weights/{}/source"
CHUNK = "moolink.weights/{}/chunk"
PARTS_NEXT = "moolink.weights/{}/parts/next"
PARTS = "moolink.weights/{}/parts"
# Of a parameter server.
PUSH = "moolink.parameters/{}/push"
# Of a subscriber, for others.
COPY_CHUNK = "moolink.weights/{}/copy/chunk"
COPY = "moolink.weights/{}/copy"
