"""Carry out one file of tests/attacks/connections until killed: `python tests/attacker.py FILE HOST PORT`."""

import asyncio
import importlib.util
import sys

if __name__ == "__main__":
    file, host, port = sys.argv[1:]
    specification = importlib.util.spec_from_file_location("attack", file)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.__doc__
    print("attacking", flush=True)
    asyncio.run(module.attack(host, int(port)))
