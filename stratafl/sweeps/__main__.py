"""Process of a sweep: `python -m stratafl.sweeps FILE` executes one run, and without a file it is
the server that forks a process for each."""

import sys
from pathlib import Path

if len(sys.argv) > 1:
    from stratafl.sweeps.task import main

    sys.exit(main(Path(sys.argv[1])))
from stratafl.sweeps.server import serve

serve()
