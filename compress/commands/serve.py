"""The command `compress serve`."""

import json
import sys
from collections.abc import Sequence

import click

from compress.commands.command import Figures, Given, Revision, command
from engine.server.options import ServeOptions, keys_from


def serve(given: Given) -> Figures:
    """Serve MODEL over HTTP to clients of OpenAI and Anthropic, with a page to try it on.

    MODEL is a checkpoint directory, a GGUF file, a hub id, or 'demo', the built-in model (the default). With several,
    or with --models-dir, requests name the model, and the first one that names it loads it. With --json, one object with
    `url` and `model` is printed as soon as requests are taken.
    """
    from engine.server.serve import serve as run

    options = given.make(ServeOptions, api_keys=keys_from(given.values["api_key"]))

    def ready(url: str, names: Sequence[str]) -> None:
        served = f"{names[0]} is" if len(names) == 1 else f"{', '.join(names)} are"
        given.say(f"{served} served at {url}/v1, and a page at {url}/")
        if given.common.json:
            click.echo(json.dumps({"url": url, "model": names[0]} | ({"models": names} if options.is_several else {})))
            sys.stdout.flush()

    run(options, ready)
    return {}


COMMAND = command("serve", serve, ServeOptions, Revision)
