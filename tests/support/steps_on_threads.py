"""Steps of decoding on more threads than processors, which must give the bits of one thread.

`python steps_on_threads.py`, with NUMBA_NUM_THREADS=8, prints `equal` where they do, for one decoder and for two at once.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from conftest import save_reference

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.kernels.compiler.parallel import uses_openmp
from engine.kernels.kernel_choice import DECODING

STEPS = 40
TOKENS = torch.randint(3, 96, (2, STEPS), generator=torch.Generator().manual_seed(5))
WIDE = {"hidden_size": 512, "intermediate_size": 512}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
FAMILIES = {"mixtral": WIDE | HEADS, "deepseek_v3": WIDE | {"moe_intermediate_size": 512}, "qwen3_next": WIDE}
"""Families, with plain attention, with latent attention and a shared expert, and with a state, in sizes with which threads
share the products."""


def decoded(decoder: Decoder, threads: int) -> torch.Tensor:
    """Return the logits after each token."""
    cache = KeyValueCache(decoder.config, len(TOKENS), STEPS, torch.bfloat16)
    choice = DECODING.with_threads(threads)
    with torch.inference_mode():
        steps = TOKENS.split(1, dim=1)
        return torch.stack([decoder.last_logits(token_B1, None, cache, choice) for token_B1 in steps])


def main() -> None:
    """Compare the logits of all families."""
    for family, sizes in FAMILIES.items():
        compare(family, sizes)
    print("equal")


def compare(family: str, sizes: dict[str, int]) -> None:
    """Compare the logits of several numbers of threads, and of two decoders at once."""
    with tempfile.TemporaryDirectory() as directory:
        save_reference(family, Path(directory), **sizes)
        checkpoint = Checkpoint(Path(directory))
        decoders = [Decoder(checkpoint.config, checkpoint.source(torch.bfloat16)) for _ in range(2)]
        expected = decoded(decoders[0], 1)
        assert decoders[0]._step._records is not None, "the step is compiled"
        assert all(torch.equal(decoded(decoders[0], threads), expected) for threads in (2, 3, 8))
        if uses_openmp():  # other layers of Numba end the process where two threads use them
            with ThreadPoolExecutor(2) as pool:
                made = list(pool.map(lambda decoder: decoded(decoder, 8), decoders))
            assert all(torch.equal(each, expected) for each in made)


if __name__ == "__main__":
    main()
