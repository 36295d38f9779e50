"""The command `compress generate`."""

from dataclasses import fields

from compress.commands.command import Figures, Given, Revision, command
from compress.commands.output import progress_bar
from compress.report.columns import number, size
from engine.generation.options import GENERATE, GenerateOptions, OpenOptions


def generate(given: Given) -> Figures:
    """Continue a text with MODEL, also about images, then report what it cost.

    MODEL is a checkpoint directory, a GGUF file, a hub id, or 'demo', the built-in model (the default).
    """
    from engine.files.image_file import pictures_of
    from engine.generation.generate import Engine

    options = given.make(GenerateOptions)
    images = pictures_of(options.images)
    opened = {each.name: getattr(options, each.name) for each in fields(OpenOptions)}
    engine = Engine.open(**opened, images=bool(images), progress=progress_bar)
    generations = engine.generate(
        options.prompts, max_new_tokens=options.tokens, sampling=options.sampling, stop=options.stop, images=images
    )
    texts = [generation.text for generation in generations]
    for prompt, text in zip(options.prompts, texts, strict=True):
        given.say(f"{prompt}\n{text}\n" if images else f"{prompt}{text}\n")
    reasons = [generation.finish_reason for generation in generations]
    own = {"text": texts, "finish_reason": reasons}
    figures = {**{key: each[0] if len(each) == 1 else each for key, each in own.items()}, **_figures(engine.report())}
    _show(given, figures)
    return figures


FIGURES = (
    "prompt_tokens",
    "generated_tokens",
    "time_to_first_token_seconds",
    "tokens_per_second",
    "peak_memory_bytes",
    "resident_memory_bytes",
    "weights_resident_bytes",
    "kv_cache_bytes",
    "other_memory_bytes",
    "load_seconds",
    "experts_skipped_share",
    "experts_skipped_share_per_layer",
    "weights_read_bytes_per_token",
    "draft_acceptance_rate",
    "tokens_per_target_forward",
    "expert_cache",
)


def _figures(report: object) -> Figures:
    return {name: getattr(report, name) for name in FIGURES}


def _show(given: Given, figures: Figures) -> None:
    given.say(
        f"{figures['generated_tokens']} tokens, {number(figures['tokens_per_second'], 1)} tokens/s, first after "
        f"{figures['time_to_first_token_seconds']:.2f} s, loaded in {figures['load_seconds']:.2f} s, "
        f"peak memory {size(figures['peak_memory_bytes'])} (resident: weights {size(figures['weights_resident_bytes'])}, "
        f"KV cache {size(figures['kv_cache_bytes'])}, other {size(figures['other_memory_bytes'])}), "
        f"experts skipped {figures['experts_skipped_share']:.0%}"
    )
    if (cache := figures["expert_cache"]) is not None:
        given.say(
            f"experts found in memory {number(cache['expert_hit_rate'], 2)}, read for each token "
            f"{size(cache['expert_bytes_read_per_token'])}, share of the time waiting for them "
            f"{number(cache['waiting_for_experts_share'], 2)}"
        )
        if (cost := cache["miss_cost"]) is not None:
            given.say(
                f"measured with --miss-threshold {cost['threshold']:g} and room for {cost['memory_share']:.0%} of the "
                f"experts: {number(cost['reads_saved'], 2)} of the reads saved, "
                f"perplexity times {cost['perplexity_ratio']:.3f}"
            )
    if figures["tokens_per_target_forward"] is not None:
        given.say(
            f"drafted tokens kept {number(figures['draft_acceptance_rate'], 2)}, "
            f"{figures['tokens_per_target_forward']:.2f} tokens for each forward of the model"
        )


COMMAND = command("generate", generate, GenerateOptions, Revision, first=GENERATE)
