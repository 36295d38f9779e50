"""Options of measuring speed: of models side by side, and of a running server under load. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import OptionError
from engine.generation.options import MEMORY, OpenOptions
from engine.options import check, declared, declared_part, like, option
from engine.server.options import KEY_VARIABLE

MEASURE, LOAD = "What to measure", "Load test of a server"
FORMATS = ("md", "csv", "json", "jsonl")
BACKEND_NAMES = ("torch", "transformers", "onnx")
"""The keys of BACKENDS (backends.py), which needs torch."""


@dataclass(frozen=True)
class LoadOptions:
    """Options of the load test, with the names that other serving benchmarks use.

    Raises OptionError for invalid values.
    """

    server: str = field(metadata=declared(group=LOAD, help="URL of a running server to measure instead of a model."))
    api_key: str | None = option(None, group=LOAD, envvar=KEY_VARIABLE, help="API key of the server.")
    num_prompts: int = option(100, group=LOAD, minimum=1, help="Number of requests.")
    max_concurrency: int | None = option(None, group=LOAD, minimum=1, unset="all", help="Most requests at once.")
    request_rate: float | None = option(
        None,
        group=LOAD,
        above=0,
        unset="all at once",
        help="Requests per second, at random intervals (a Poisson process).",
    )
    random_input_len: int = option(128, group=LOAD, minimum=1, help="Tokens of a prompt.")
    random_output_len: int = option(128, group=LOAD, minimum=1, help="Tokens of an answer.")
    ignore_eos: bool = option(False, group=LOAD, help="Let answers go on to their full length.")
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
        if not self.server.startswith(("http://", "https://")):
            raise OptionError(f"the server is {self.server!r}; give its URL, like http://127.0.0.1:8000")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """One run of `compress bench`."""

    models: tuple[str, ...] = option((), group="", is_argument=True, several="repeated", help="Models to measure.")
    prompt_tokens: int = option(512, group=MEASURE, short="-p", help="Tokens of the prefill test; 0 for none.")
    generated_tokens: int = option(128, group=MEASURE, short="-n", help="Tokens of the decode test; 0 for none.")
    repetitions: int = option(5, group=MEASURE, short="-r", minimum=1, help="Repetitions of each test.")
    depth: int = option(0, group=MEASURE, short="-d", help="Tokens that are in the cache before each test.")
    batch: int = option(1, group=MEASURE, short="-b", minimum=1, help="Sequences at once.")
    output_format: str = option("md", group="Output", short="-o", choices=FORMATS, help="Format of the printed rows.")
    skip_threshold: float = like(OpenOptions, "skip_threshold")
    skip_min_experts: int = like(OpenOptions, "skip_min_experts")
    skip_rule: str = like(OpenOptions, "skip_rule")
    backend: tuple[str, ...] = option(
        (),
        group=MEASURE,
        several="repeated",
        choices=BACKEND_NAMES,
        unset="torch; onnx for an exported model",
        help="torch is the engine's own decoder; may be given several times.",
    )
    concurrency: tuple[int, ...] = option(
        (),
        group=MEASURE,
        several="commas",
        minimum=1,
        metavar="N",
        help="Instead send so many requests at once through the scheduler of `compress serve`, for one model.",
    )
    kv_cache_dtype: str = like(OpenOptions, "kv_cache_dtype")
    memory_limit: int | None = like(OpenOptions, "memory_limit")
    miss_threshold: float = like(OpenOptions, "miss_threshold")
    load_mode: str = like(OpenOptions, "load_mode", MEMORY)
    load: LoadOptions | None = field(default=None, metadata=declared_part(LoadOptions))
    device: str = like(OpenOptions, "device")
    dtype: str = like(OpenOptions, "dtype")
    threads: int | None = like(OpenOptions, "threads")
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
