"""Comparison of an exported encoder-decoder with transformers, which is the engine's own runtime of such models.

Both models process the same calls, because expert capacity is per call: the source, several target tokens at once, then
single tokens.

Shape suffixes: S sequences, B batch, L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.export.parity import LENGTHS, STEPS, Allowed, StepDifference, check_steps, compared, in_batch, sequences, when
from engine.checkpoint.tokenizer import load_tokenizer_of
from engine.kernels.stored.quantized_weight import quantise
from engine.onnx.encoder_decoder_runtime import OnnxEncoderDecoder
from engine.onnx.quantize import Packing
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint

AT_ONCE = (1, 1, 5, 9)
"""Number of each prompt's target tokens that are processed at once."""


@dataclass(frozen=True)
class SourcePrompt:
    """A source, and the target that is decoded for it."""

    name: str
    source_L: Tensor
    target_L: Tensor
    """The target with its start token."""
    at_once: int


def round_weights(model: nn.Module, packings: Mapping[str, Packing]) -> None:
    """Replace the model's weights by the values of their low-bit encodings."""
    stored = model.state_dict()
    for name, packing in packings.items():
        stored[name].copy_(quantise(stored[name], *packing).dequantised(torch.float32))


def check_encoder_decoder_parity(
    model: nn.Module,
    checkpoint: EncoderDecoderCheckpoint,
    exported: OnnxEncoderDecoder,
    allowed: Allowed,
    progress: Callable[[Iterable[list[SourcePrompt]]], Iterable[list[SourcePrompt]]] = iter,
) -> dict[str, float]:
    """Return the largest |difference| of each output over all prompts and steps. Raises ExportError beyond the limits."""
    prompts = _prompts(checkpoint)
    batches = [*([prompt] for prompt in prompts), [prompts[1], prompts[3]]]  # the last batch is padded
    steps = [step for batch in progress(batches) for step in _steps(batch, model, checkpoint.config, exported)]
    check_steps(steps, allowed)
    return {
        output: max(step.largest for step in steps if step.output == output)
        for output in dict.fromkeys(step.output for step in steps)
    }


def _prompts(checkpoint: EncoderDecoderCheckpoint) -> list[SourcePrompt]:
    config, written = checkpoint.config, max(AT_ONCE) + STEPS
    vocabulary = int(config.vocab_size)
    tokens_SL, names = sequences(
        vocabulary, max(LENGTHS) + written, lambda: load_tokenizer_of(checkpoint.directory, vocabulary)
    )
    start = torch.tensor([getattr(config, "decoder_start_token_id", None) or config.pad_token_id or 0])
    return [
        SourcePrompt(name, tokens_L[:length], torch.cat([start, tokens_L[length : length + written]]), at_once)
        for name, tokens_L, length, at_once in zip(names, tokens_SL, LENGTHS, AT_ONCE, strict=True)
    ]


@torch.inference_mode()
def _steps(batch: list[SourcePrompt], model: Any, config: Any, exported: OnnxEncoderDecoder) -> Iterator[StepDifference]:
    """Yield the differences of these prompts, with sources padded on the right."""
    lengths = [len(prompt.source_L) for prompt in batch]
    source_BL = torch.full((len(batch), max(lengths)), config.pad_token_id or 0)
    real_BL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    for index, prompt in enumerate(batch):
        source_BL[index, : lengths[index]] = prompt.source_L
    places = [f"a {prompt.name} prompt of {len(prompt.source_L)} tokens" + in_batch(len(batch)) for prompt in batch]
    encoded = model.get_encoder()(input_ids=source_BL, attention_mask=real_BL.long())
    target = exported.read(source_BL, real_BL)
    for index, place in enumerate(places):
        found_LD, expected_LD = (states[index, : lengths[index]] for states in (target.states_BSD, encoded[0]))
        yield compared("last_hidden_state", f"encoder of {place}", found_LD.float(), expected_LD)
    target_BL = torch.stack([prompt.target_L for prompt in batch])
    first, past = max(prompt.at_once for prompt in batch), None
    for step in range(STEPS + 1):
        tokens_BL = target_BL[:, :first] if step == 0 else target_BL[:, first + step - 1 : first + step]
        outputs = model(
            encoder_outputs=encoded,
            attention_mask=real_BL.long(),
            decoder_input_ids=tokens_BL,
            past_key_values=past,
            use_cache=True,
        )
        past, found_BLV = outputs.past_key_values, exported.write(tokens_BL, target)
        for index, place in enumerate(places):
            yield compared("logits", f"{when(step)} of {place}", found_BLV[index].float(), outputs.logits[index])
