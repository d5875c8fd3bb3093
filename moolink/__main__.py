"""``python -m moolink`` is the ``moolink`` executable."""

import sys

from moolink.cli.main import main

sys.exit(main())
