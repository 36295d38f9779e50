"""`compress serve` with a step that never ends: `python tests/support/hanging_server.py engine|loop ARGUMENTS…`.

engine: a step of the engine never returns. loop: no request leaves the event loop.
"""

import sys
import time

import cli
from engine.batching.scheduler import Scheduler
from engine.server.connections.connection import RequestGate


def hang(*arguments):
    print("hanging", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.01)


if __name__ == "__main__":
    which = sys.argv.pop(1)
    if which == "engine":
        Scheduler.step = hang
    else:
        RequestGate._check = hang
    cli.main()
