"""`python -m photon_backend run ...`; the server is started by `python -m photon_backend.serve`."""

from __future__ import annotations

import argparse
import sys

from photon_backend import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m photon_backend", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run.add_arguments(commands.add_parser("run", help="answer one request in this process, without Triton"))
    return run.main(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
