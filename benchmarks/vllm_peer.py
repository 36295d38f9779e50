"""A process with vLLM beside a benchmark. Its Python needs vLLM only, and may be another one.

Its argument is a JSON object: `model`, and `tests` with prompt tokens, new tokens and sequences by name. For each line with
a name it answers `{"rate": …}`, tokens per second of the prompt where one token is new, and else of the new tokens.
"""

from __future__ import annotations

import json
import random
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    given = json.loads(sys.argv[1])
    longest = max(prompt + new for prompt, new, _ in given["tests"].values())
    model = LLM(model=given["model"], dtype="bfloat16", max_model_len=longest, enable_prefix_caching=False)
    draw = random.Random(0)
    for line in sys.stdin:
        prompt, new, sequences = given["tests"][line.strip()]
        prompts = [{"prompt_token_ids": [draw.randrange(3, 32000) for _ in range(prompt)]} for _ in range(sequences)]
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        model.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        print(json.dumps({"rate": (prompt if new == 1 else new) * sequences / seconds}), flush=True)


if __name__ == "__main__":
    main()
