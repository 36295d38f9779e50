"""Carry out one file of tests/attacks/connections until killed: `python tests/support/attacker.py FILE HOST PORT`."""

import asyncio
import sys
from pathlib import Path

from attacks_for_tests import load_attack

if __name__ == "__main__":
    file, host, port = sys.argv[1:]
    module = load_attack(Path(file))
    assert module.__doc__
    print("attacking", flush=True)
    asyncio.run(module.attack(host, int(port)))
