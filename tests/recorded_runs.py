"""The commands and requests that tests/recorder.py records, all on the small built-in model and with fixed seeds."""

from __future__ import annotations

import shlex
from typing import Any

INSTRUCTIONS = [
    {"instruction": f"Add {number} to x.", "input": f"x = {number * 3}", "output": f"x += {number}  # {number * 4}"}
    for number in range(64)
]
"""Prompts with responses, which commands read from {here}/prompts.jsonl."""

CALIBRATION = "--samples 4 --sequence-length 96 --evaluation-samples 2"
PRUNE = f"prune demo --sparsity 0.5 {CALIBRATION}"
MERGE = f"merge demo --experts 4 {CALIBRATION}"
DENSIFY = f"densify demo {CALIBRATION}"
DENSE_TRAINING = "--distill-steps 3 --finetune-steps 3 --batch-size 2 --validation-samples 0"
# The best state is kept. This student was pruned at random and is so far from the teacher that the last state is the best.
STUDENT = "--student {here}/prune-random --steps 3 --batch-size 2 --validation-samples 2"
TEACH = f"distill --teacher demo {STUDENT} --samples 4 --evaluation-samples 2"
DISTILL = f"{TEACH} --sequence-length 64 --recipe"
METHODS = ("naee", "frequency", "probability", "reap", "man", "mc-moe", "fisher", "taylor", "random")

COMMANDS = {
    "calibrate": "calibrate demo --samples 4 --sequence-length 96",
    "prune-diep": f"{PRUNE} --method diep --epochs 2",
    **{f"prune-{method}": f"{PRUNE} --method {method}" for method in METHODS},
    "prune-uniform": f"{PRUNE} --method reap --uniform",
    "prune-merge": f"{PRUNE} --method frequency --merge cka",
    "prune-4-bits": f"{PRUNE} --bits 4",
    "prune-recover": f"{PRUNE} --method random --recover-steps 3",
    "prune-distill": f"{PRUNE} --method probability --distill-steps 3",
    "prune-statistics": f"{PRUNE} --method man --scope layer --statistics {{here}}/calibrate.safetensors",
    "prune-memory-limit": f"{PRUNE} --method taylor --memory-limit 2GB",
    "prune-naee-greedy": f"{PRUNE} --method naee --naee-limit 10",
    "prune-diep-paper": f"{PRUNE} --method diep --relaxation paper --epochs 2",
    "prune-diep-routed": f"{PRUNE} --method diep --relaxation routed --epochs 2",
    "merge-m-smoe": f"{MERGE} --method m-smoe",
    "merge-s-smoe": f"{MERGE} --method s-smoe",
    "merge-hc-smoe": f"{MERGE} --method hc-smoe",
    "merge-ream": f"{MERGE} --method ream",
    "densify": f"{DENSIFY} {DENSE_TRAINING}",
    "densify-reap": f"{DENSIFY} --select reap",
    "densify-average": f"{DENSIFY} --select average",
    "densify-random": f"{DENSIFY} --select random",
    "quantize-8": "quantize demo --bits 8 --evaluation-samples 0",
    "quantize-4": f"quantize demo --bits 4 {CALIBRATION}",
    "quantize-activation-aware": f"quantize demo --bits 4 --activation-aware {CALIBRATION}",
    "distill-sft": f"{DISTILL.replace('--teacher demo ', '')} sft",
    "distill-kd": f"{DISTILL} kd",
    "distill-gkd": f"{DISTILL} gkd",
    "distill-all": f"{DISTILL} all",
    "distill-ka": f"{DISTILL} ka --ka-probability 0.5",
    "distill-sar": f"{DISTILL} sar --router-learning-rate 0.001",
    "distill-layer-mse": f"{DISTILL} layer-mse",
    "distill-prompts": f"{TEACH} --data {{here}}/prompts.jsonl --max-length 128 --max-prompt-length 96 --teacher-cache 8",
    "export-float32": "export demo",
    "export-float16": "export demo --precision float16",
    "export-int8": "export demo --precision int8",
    "export-int4": "export {here}/prune-fisher --precision int4",
    "export-skipping": "export {here}/prune-fisher --skip-threshold 1",
    "export-portable-float32": "export demo --experts portable",
    "export-portable-float16": "export demo --experts portable --precision float16",
    "export-genai-float32": "export demo --format onnx-genai",
    "export-genai-float16": "export demo --format onnx-genai --precision float16",
    "export-genai-int8": "export demo --format onnx-genai --precision int8",
    "export-genai-int4": "export demo --format onnx-genai --precision int4",
}
"""Commands that write a result, which is recorded with their figures. `{here}` has the results of earlier commands."""

READING_COMMANDS = {
    "evaluate": "evaluate demo --samples 4 --sequence-length 96",
    "evaluate-memory-limit": "evaluate {here}/prune-fisher --samples 4 --sequence-length 96 --memory-limit 2GB",
    "evaluate-rouge-l": "evaluate demo --data {here}/prompts.jsonl --split all --samples 4 --max-length 96 "
    "--max-prompt-length 64 --metric rouge-l --seeds 2",
    "evaluate-export": "evaluate {here}/export-int8 --samples 2 --sequence-length 64",
    "plan-run": "plan-run demo --method diep --device h100",
    "plan-run-naee": "plan-run demo --method naee --device a100",
    "inspect": "inspect demo",
    "inspect-pruned": "inspect {here}/prune-fisher --checksums",
    "inspect-quantized": "inspect {here}/quantize-4",
    "inspect-export": "inspect {here}/export-int4",
}

PROMPTS = ("import os\n", "def read_text(path):\n", "class Stack:\n    def push(self, item):\n", "for i in range(10):\n    ")
GENERATE = " ".join(("generate {model} --tokens 24", *(f"--prompt {shlex.quote(prompt)}" for prompt in PROMPTS)))
GENERATIONS = {
    **{
        f"generate-{dtype}{'-skipping' if threshold else ''}-{kernels}": (
            f"{GENERATE.format(model='demo')} --dtype {dtype} --skip-threshold {threshold}",
            kernels,
        )
        for dtype in ("bfloat16", "float32")
        for threshold in (0, 1)
        for kernels in ("compiled", "torch")
    },
    "generate-pruned": (GENERATE.format(model="{here}/prune-fisher"), "compiled"),
    "generate-dense": (GENERATE.format(model="{here}/densify"), "compiled"),
    "generate-8-bits": (GENERATE.format(model="{here}/quantize-8"), "compiled"),
    "generate-4-bits": (GENERATE.format(model="{here}/quantize-4"), "compiled"),
    "generate-4-bits-torch": (GENERATE.format(model="{here}/quantize-4"), "torch"),
    "generate-export": (GENERATE.format(model="{here}/export-skipping"), "compiled"),
    "generate-sampled": (f"{GENERATE.format(model='demo')} --temperature 0.8 --top-p 0.9 --top-k 40 --seed 3", "compiled"),
    "generate-drafted": (f"generate demo -p {PROMPTS[1]!r} -n 24 --draft {{here}}/prune-fisher", "compiled"),
}

SERVERS = {
    "serve": ("serve demo", "compiled"),
    "serve-torch": ("serve demo", "torch"),
    "serve-float32": ("serve demo --dtype float32", "compiled"),
    "serve-float32-torch": ("serve demo --dtype float32", "torch"),
    "serve-4-bits": ("serve {here}/quantize-4 --kv-cache-dtype int8 --skip-threshold 1", "compiled"),
    "serve-export": ("serve {here}/export-skipping", "compiled"),
}
"""Commands that start a server. The first server gets all requests below, the others only those for log-probabilities."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"max_tokens": 12, "temperature": 0}
MESSAGES = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "Open a file."}]

SCORED: dict[str, tuple[str, Any]] = {
    "prompt": (COMPLETIONS, {"prompt": PROMPTS[2], "logprobs": 20, "echo": True, **GREEDY}),
    "prompts": (COMPLETIONS, {"prompt": list(PROMPTS[:2]), "logprobs": 5, **GREEDY}),
    "chat": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, **GREEDY}),
}

ALONE: dict[str, tuple[str, Any]] = {
    "completion": (COMPLETIONS, {"prompt": "x = [", **GREEDY}),
    "completion-streamed": (COMPLETIONS, {"prompt": "y = {", "stream": True, "logprobs": 2, **GREEDY}),
    "completion-seeds": (COMPLETIONS, {"prompt": ["def a(", "def b("], "n": 2, "seed": 5, "max_tokens": 12}),
    "completion-stop": (COMPLETIONS, {"prompt": "import sys\n", "stop": ["import", "\n\n"], "max_tokens": 32, "seed": 1}),
    "completion-penalties": (
        COMPLETIONS,
        {"prompt": "a = 1\n", "presence_penalty": 1.0, "frequency_penalty": 0.5, **GREEDY},
    ),
    "completion-no-tokens": (COMPLETIONS, {"prompt": "lambda x: x", "max_tokens": 0, "echo": True, "logprobs": 1}),
    "completion-token-ids": (COMPLETIONS, {"prompt": [[5, 6, 7], [8, 9]], **GREEDY}),
    "chat": (CHAT, {"messages": MESSAGES[1:], **GREEDY}),
    "chat-streamed": (
        CHAT,
        {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, **GREEDY},
    ),
    "chat-stop": (CHAT, {"messages": MESSAGES[1:], "stop": "(", "max_tokens": 32, "seed": 2, "top_p": 0.9}),
    "tokenize": ("/tokenize", {"prompt": PROMPTS[1]}),
    "detokenize": ("/detokenize", {"tokens": [40, 41, 42]}),
    "models": ("/v1/models", None),
}
"""Requests that are sent one after the other."""

TOGETHER: dict[str, tuple[str, Any]] = {
    f"{kind}-{number}{'-streamed' if streamed else ''}": (
        path,
        {
            **(
                {"prompt": f"{number}: {text}"}
                if path == COMPLETIONS
                else {"messages": [{"role": "user", "content": f"{number}: {text}"}]}
            ),
            **({"temperature": 0} if number % 2 else {"seed": number, "temperature": 0.7}),
            **({"stop": ["\n\n"]} if number > 4 else {}),
            "max_tokens": 16 + number,
            "stream": streamed,
        },
    )
    for number, (text, kind, path, streamed) in enumerate(
        (text, kind, path, streamed)
        for text in PROMPTS[:2]
        for kind, path in (("completion", COMPLETIONS), ("chat", CHAT))
        for streamed in (False, True)
    )
}
"""Requests that are sent at the same moment. Their prompts begin differently, so that none is read from the cache of
another. They request no log-probabilities, because products of several rows may differ from those of one row in the last
bits."""

REFUSED: dict[str, tuple[str, Any]] = {
    "no-json": (COMPLETIONS, "{prompt"),
    "wrong-type": (COMPLETIONS, {"prompt": 3}),
    "no-prompt": (COMPLETIONS, {"max_tokens": 3}),
    "another-model": (COMPLETIONS, {"prompt": "a", "model": "another"}),
    "too-long": (COMPLETIONS, {"prompt": "a", "max_tokens": 100_000}),
    "unsupported": (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
    "temperature": (CHAT, {"messages": MESSAGES, "temperature": 3}),
    "role": (CHAT, {"messages": [{"role": "nobody", "content": "a"}]}),
    "top-logprobs": (CHAT, {"messages": MESSAGES, "top_logprobs": 2}),
    "format": (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}),
    "skipping": (COMPLETIONS, {"prompt": "a", "skip_threshold": 1}),
    "path": ("/v1/nothing", None),
    "method": (COMPLETIONS, None),
}
