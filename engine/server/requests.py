"""Conversion of a body that was read into requests to the engine."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from engine.batching.request import Request
from engine.generation.generate import Engine
from engine.generation.options import SamplingOptions
from engine.onnx.runtime import OnnxDecoder
from engine.replies.reply import ReplyForm
from engine.server.reading.body_reader import ReadingSettings
from engine.server.reading.image_parts import unpacked
from engine.server.reading.reading_process import Data, packed_bytes, unpack_tokens
from engine.server.reading.text_reader import tokenizer_settings


@dataclass(frozen=True)
class Asked:
    """Requests to the engine from one body: each prompt `choices` times, with different seeds."""

    requests: tuple[Request, ...]
    choices: int
    echoes: tuple[str, ...] = ()
    """Text of each prompt, if the answers repeat it."""
    stream: bool = False
    include_usage: bool = False
    form: ReplyForm | None = None
    """How replies are taken apart; None for text that is given on as it is."""
    repeated: dict[str, Any] = field(default_factory=dict)
    """Fields of the body that an answer in another form than a chat's repeats."""


def asked(header: dict[str, Any], data: Data) -> Asked:
    """Return the requests of a body, from the reply of the process that read it. Raises OptionError for invalid options."""
    read = header["read"]
    seed = secrets.randbits(62) if read["seed"] is None else read["seed"]
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in read["request"].items()
    }
    options = read["sampling"] | {"logit_bias": tuple(map(tuple, read["sampling"]["logit_bias"]))}
    form = None if read["form"] is None else ReplyForm(**read["form"])
    requests: list[Request] = []
    prompts = unpack_tokens(data, header["counts"])
    images = unpacked(header["images"], memoryview(data)[packed_bytes(header["counts"]) :])
    for prompt, new_tokens in zip(prompts, read["new_tokens"], strict=True):
        request = Request(prompt=tuple(prompt), max_new_tokens=new_tokens, images=images, **fields)
        for _ in range(read["choices"]):
            sampling = SamplingOptions(**options, seed=(seed + len(requests)) % 2**63)
            requests.append(replace(request, sampling=sampling))
    shown = {name: read[name] for name in ("stream", "include_usage", "repeated")}
    return Asked(tuple(requests), read["choices"], tuple(read["echoes"]), form=form, **shown)


def reading_settings(
    engine: Engine, *, model_name: str, max_model_length: int, max_queue: int, skip_threshold: float, **parsers: str
) -> ReadingSettings:
    """Return the settings of the processes that read bodies. `skip_threshold`: the server's own.

    parsers: `tool_parser` and `reasoning_parser` of ReadingSettings.
    """
    directory, config = engine.checkpoint.files_directory, engine.checkpoint.config
    exported = isinstance(engine.decoder, OnnxDecoder)  # the engine itself refuses other thresholds than the exported one
    return ReadingSettings(
        tokenizer_settings(engine.tokenizer, directory, config.vocabulary_size),
        model_name=model_name,
        max_model_length=max_model_length,
        max_queue=max_queue,
        most_skip_threshold=None if exported else skip_threshold,
        images_refusal=engine.images_refusal,
        **parsers,
    )
