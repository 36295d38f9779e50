"""Options of `compress serve`, without torch and without the packages of a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.batching.options import LOAD, QueueOptions
from engine.errors import OptionError
from engine.generation.options import MACHINE, MEMORY, OWN_LAYERS, OpenOptions
from engine.options import check, like, option
from engine.replies.table import AUTO, NONE, REASONING_FORMS, TOOL_FORMS
from engine.server.connections.hosts import is_local, plain_host

DEFAULT_MODEL = "demo"
KEY_VARIABLE = "COMPRESS_API_KEY"
ADDRESS, ACCESS, REPLIES, SEVERAL = "Address", "Who may ask", "Tools and reasoning", "Several models"


@dataclass(frozen=True)
class ServeOptions:
    """Options of the server: model, address and limits. Raises OptionError for invalid values."""

    models: tuple[str, ...] = option(
        (),
        group="",
        flag="model",
        is_argument=True,
        several="repeated",
        help="Directories, GGUF files, hub ids or 'demo'; none for 'demo'.",
    )
    models_dir: Path | None = option(
        None,
        group=SEVERAL,
        metavar="DIRECTORY",
        help="Serve every model in this directory too, each loaded by the first request that names it.",
    )
    memory_limit: int | None = option(
        None,
        group=MACHINE,
        is_size=True,
        above=0,
        unset="none",
        help="Most memory, such as 16GB: of one model, whose experts are read from disk when they do not fit; of several "
        "models, the least recently used ones leave for another one.",
    )
    miss_threshold: float = like(OpenOptions, "miss_threshold")
    load_mode: str = like(OpenOptions, "load_mode", MEMORY)
    host: str = option("127.0.0.1", group=ADDRESS, help="Address to listen on; 0.0.0.0 for all.")
    port: int = option(8000, group=ADDRESS, minimum=0, maximum=65535, help="Port to listen on; 0 for a free one.")
    api_keys: tuple[str, ...] = option(
        (),
        group=ACCESS,
        flag="api-key",
        several="repeated",
        help="Key that clients have to send; may be given several times. Others on this machine can read a command line; "
        f"they cannot read the variable {KEY_VARIABLE}, which holds one key per line.",
    )
    """Empty for no access control. Cached prompts are not shared between keys."""
    allow_anonymous: bool = option(False, group=ACCESS, help="Let other machines in without a key.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        group=ACCESS,
        flag="allowed-host",
        several="repeated",
        metavar="NAME",
        unset="a local address: that and localhost; else any",
        help="Name that clients may call the server by; may be given several times.",
    )
    """Host names of the server besides its own; see `engine.server.connections.access.allowed_hosts`."""
    served_model_name: str | None = option(
        None, group=ADDRESS, unset="MODEL, or the name of its directory", help="Name that clients ask for MODEL by."
    )
    tool_parser: str = option(
        AUTO,
        group=REPLIES,
        choices=(AUTO, *TOOL_FORMS, NONE),
        help="Form in which the model writes calls of tools. auto: that of its chat template; none: calls stay text.",
    )
    reasoning_parser: str = option(
        AUTO,
        group=REPLIES,
        choices=(AUTO, *REASONING_FORMS, NONE),
        help="Form in which the model writes its reasoning. auto: that of its chat template; none: it stays text.",
    )
    max_queue: int = like(QueueOptions, "max_queue")
    max_batch_size: int = like(QueueOptions, "max_batch_size")
    max_model_length: int | None = option(
        None,
        group=LOAD,
        flag="max-model-len",
        minimum=1,
        unset="the model's",
        help="Most tokens of prompt and answer together.",
    )
    kv_cache_bytes: int | None = option(
        None,
        group=LOAD,
        flag="kv-cache-memory",
        is_size=True,
        unset="for a full batch, at most a quarter of what is free",
        help="Memory for keys and values, such as 2GB.",
    )
    kv_cache_disk: int | None = option(
        None,
        group=LOAD,
        is_size=True,
        above=0,
        unset="none",
        help="Disk space for keys and values, such as 20GB: prompts stay known beyond memory and across restarts.",
    )
    kv_cache_directory: Path | None = option(
        None,
        group=LOAD,
        metavar="DIRECTORY",
        unset="in the user's cache directory",
        help="Directory for --kv-cache-disk. One server at a time uses it.",
    )
    request_timeout: float | None = option(600.0, group=LOAD, above=0, help="Seconds after which a request is given up.")
    skip_threshold: float = like(
        OpenOptions,
        "skip_threshold",
        minimum=0,
        help="Skip unneeded experts: 0 for none, 1 for the calibrated rule. A request may ask for less.",
    )
    skip_rule: str = like(OpenOptions, "skip_rule")
    device: str = like(OpenOptions, "device")
    dtype: str = like(OpenOptions, "dtype")
    threads: int | None = like(OpenOptions, "threads")
    kv_cache_dtype: str = like(OpenOptions, "kv_cache_dtype")
    images: bool = option(
        False,
        group=MACHINE,
        help="Take images in messages: transformers then runs the whole model, also one that our own decoder would run "
        "faster. Without it, images are taken where transformers runs the model anyway.",
    )
    draft: str | None = like(
        OpenOptions,
        "draft",
        help="A smaller model with the same tokenizer that drafts tokens where that is faster. The text remains MODEL's.",
    )
    draft_tokens: int = like(OpenOptions, "draft_tokens")

    def __post_init__(self) -> None:
        check(self)
        if not all(key.strip() and key.isascii() and key.isprintable() for key in self.api_keys):
            raise OptionError("an API key is empty or has characters that a header cannot hold; use printable ASCII")
        for host in self.allowed_hosts:
            if not plain_host(host):
                raise OptionError(
                    f"the allowed host {host!r:.80} is neither a name nor an address; give one, without a port"
                )
        if self.is_exposed and not self.allow_anonymous:
            raise OptionError(
                f"other machines can reach {self.host}, and without a key anybody may use the server; give --api-key "
                f"(or {KEY_VARIABLE}), or --allow-anonymous"
            )
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise OptionError("the served model name is empty; leave it out, or give a name")
        if self.served_model_name is not None and self.is_several:
            raise OptionError("several models have the names of their directories; leave out --served-model-name")
        if self.kv_cache_directory is not None and self.kv_cache_disk is None:
            raise OptionError("--kv-cache-directory is for --kv-cache-disk; give its SIZE too, or leave out the directory")
        if self.miss_threshold > 0 and (self.memory_limit is None or self.is_several):
            raise OptionError("--miss-threshold is for one model with --memory-limit; give both, or leave it out")
        if self.draft is not None and self.is_several:
            raise OptionError("--draft is for a server of one model; give one model, or leave out --draft")
        if self.draft == OWN_LAYERS:
            raise OptionError(
                f"--draft {OWN_LAYERS} is for one prompt at a time, in `compress generate`; give the server a smaller model"
            )

    @property
    def is_several(self) -> bool:
        """Whether the server has several models, which are loaded when they are first asked for."""
        return len(self.models) > 1 or self.models_dir is not None

    @property
    def model(self) -> str:
        """The model, or the first one of several."""
        return self.models[0] if self.models else DEFAULT_MODEL

    def of_one(self, name: str, model: str) -> ServeOptions:
        """Return the options of a server that has only this one of the models."""
        return replace(self, models=(model,), models_dir=None, memory_limit=None, served_model_name=name)

    @property
    def name(self) -> str:
        """Name by which clients request the model."""
        path = Path(self.model)
        return self.served_model_name or (path.resolve().name if path.is_dir() else self.model)

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can reach the server without a key."""
        return not is_local(self.host) and not self.api_keys


def keys_from(given: Sequence[str]) -> tuple[str, ...]:
    """Return the given keys, or else those of the environment. Raises OptionError for an empty variable."""
    if given or KEY_VARIABLE not in os.environ:
        return tuple(given)
    keys = os.environ[KEY_VARIABLE].splitlines()
    if not all(keys) or not keys:
        raise OptionError(f"{KEY_VARIABLE} is set and has no key, or an empty line; unset it to serve without a key")
    return tuple(keys)
