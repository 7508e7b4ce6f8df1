"""Starts stratafl commands as real processes without the seconds that importing torch takes: it has
imported everything, forks for each command, and stays single-threaded so that forking is safe.

It reads one JSON list per line, [output file, folder to be in, arguments...], and answers each with
the child's number, then with its exit status. Arguments that begin with "python" are a program of
the user's.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback

import torch

from stratafl.cli.main import main
from stratafl.data.catalog import prepare


def child(output: str, folder: str, arguments: list[str]) -> None:
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.chdir(folder)
    try:
        if arguments[0] == "python":
            sys.argv = arguments[1:]
            runpy.run_path(sys.argv[0], run_name="__main__")
            raise SystemExit
        sys.argv = ["stratafl", *arguments]
        main()
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(int(ended.code or 0))


def serve() -> None:
    torch.set_num_threads(1)
    prepare.load("digits")
    for line in sys.stdin:
        output, folder, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                child(output, folder, arguments)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(99)  # an exception nobody expected; its traceback is in the output
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
