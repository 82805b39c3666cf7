"""Run a module that may have few files open: `python -m few_files LIMIT MODULE ARGUMENTS`."""

import resource
import runpy
import sys

if __name__ == "__main__":
    _, limit, *sys.argv = sys.argv
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
