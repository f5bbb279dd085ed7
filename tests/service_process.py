"""The `headrace` script in a forked process: folder, environment and streams as the test wants them.

Run by `conftest.ServiceProcess`, which puts ARGV, CWD, STDOUT, STDERR and ENVIRONMENT into the globals.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from headrace.service.__main__ import main


def become(wanted: dict[str, Any]) -> None:
    os.chdir(wanted["CWD"])
    os.environ.clear()
    os.environ.update(wanted["ENVIRONMENT"])
    for number, name in ((1, "STDOUT"), (2, "STDERR")):
        descriptor = os.open(wanted[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["headrace", *wanted["ARGV"]]


become(globals())
sys.exit(main())
