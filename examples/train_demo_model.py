"""Trains the demo model: a small Mixtral (8 experts, top-2) on the source of the Python standard library.

    OMP_WAIT_POLICY=PASSIVE python examples/train_demo_model.py --work-directory /tmp/demo-model

The script needs the tokenizer of `train_tokenizer.py` in the output directory. It trains on the calibration split only, for
a given wall time: the learning rate follows the clock, so that it reaches zero when the time is over, on any machine (or,
with `--tokens`, on that many tokens: the same model wherever it is trained, up to rounding). Matrices are trained by Muon,
and the embedding, the routers and the norms by AdamW, in float32. The saved model is bfloat16. An interrupted run resumes
from its last checkpoint in the work directory.

The model in engine/demo_model took 40 minutes on 2 cores: 1,854 steps, 9,908,224 tokens (1.1 times the text), held-out
perplexity 9.23. Without a random half of each layer's experts the perplexity is 18.32, 16.10 and 20.07 (the script's three
draws, a factor of 1.97); over twelve draws the factor is 1.72 on average.

The second reference model of the benchmarks, which is not shipped:

    python examples/train_demo_model.py --model shared-expert --tokens 4500000 --output DIR --work-directory /tmp/second

A model of other text, with a tokenizer of its own:

    python examples/train_tokenizer.py DIR --data TEXT
    python examples/train_demo_model.py --data TEXT --tokens 2500000 --output DIR --work-directory /tmp/other
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from calibrate.collect import collect
from calibrate.skipping import skip_tables
from calibrate.text import load_documents, token_batches
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.skip_table_file import FILE_NAME as SKIP_TABLES
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.model import Decoder, own_routing, routed_by
from engine.decoder.routing import Masked, Selection
from engine.families.config import DecoderConfig
from engine.families.resolve import decoder_config
from engine.families.tensor_names import router_tensor
from engine.families.tensor_shapes import expected_tensors

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "engine" / "demo_model"
CURVE = ROOT / "examples" / "demo_training_curve.jsonl"

COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "sliding_window": None,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": False,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "demo": COMMON
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 192,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    # The second reference model of the benchmarks: another family, a shared expert, more and smaller experts, weights
    # that are not renormalized. It is not shipped.
    "shared-expert": COMMON
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "intermediate_size": 192,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    },
}
BALANCE_WEIGHT = 0.01

BLOCK = 512
"""The text is shuffled in blocks of so many tokens."""
STAGES = ((0.0, 128, 32), (0.35, 256, 24), (0.85, 512, 16))
"""Fraction of the time at which a stage begins, sequence length, sequences a step. Short sequences cost least."""
MUON_RATE, ADAM_RATE = 0.02, 3e-3
WARM_UP, DECAY_FROM = 0.02, 0.4
WEIGHT_DECAY = 0.05
HEAD_ROWS = 1024
"""Number of tokens whose logits are computed at a time: 16 MB, which stays in the cache."""
REPORT_SECONDS, CHECKPOINT_SECONDS = 60.0, 120.0
TRAINING_PER_REPORT = 10.0
"""Least time of training between two reports, in times that a report takes: a busy machine reports less often."""
PROMPT = "import os\n\n\ndef read_text(path):\n"


@dataclass
class Progress:
    """The progress of a run."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by Newton-Schulz (Jordan et al. 2024); matrices of one shape go through it together.

    torch.optim.Muon has the same update, but iterates in bfloat16 and on one matrix at a time. The figures above were
    obtained in float32, and the many small matrices of the experts are faster together.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient once."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append(matrix)
            for (rows, columns), matrices in by_shape.items():
                momenta = [self._momentum(matrix, group["momentum"]) for matrix in matrices]
                updates = orthogonal(torch.stack(momenta)) * max(1.0, rows / columns) ** 0.5
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(matrices, list(updates), alpha=-group["lr"])

    def _momentum(self, matrix: Tensor, momentum: float) -> Tensor:
        state, gradient = self.state[matrix], matrix.grad
        assert gradient is not None
        buffer = state.setdefault("momentum", torch.zeros_like(matrix))
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return approximately the nearest (semi-)orthogonal matrix to each of [n, rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.mT if tall else x


# Text


def tokenised(tokenizer: PreTrainedTokenizerBase, source: str, split: str, directory: Path) -> np.ndarray:
    """Return all documents of a split, each closed by the end token, as one array, made once and then memory-mapped."""
    own = f"{source} {tokenizer.backend_tokenizer.to_str()}"
    path = directory / f"{split}-{hashlib.sha256(own.encode()).hexdigest()[:16]}.npy"
    if not path.exists():
        ids: list[int] = []
        documents = list(load_documents(source, split=split))  # type: ignore[arg-type]
        for encoding in tokenizer.backend_tokenizer.encode_batch(documents, add_special_tokens=False):
            ids += [*encoding.ids, tokenizer.eos_token_id]
        np.save(path, np.array(ids, dtype=np.uint16))
    text: np.ndarray = np.load(path, mmap_mode="r")
    return text


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    """Return token ids [starts, length + 1]."""
    return torch.from_numpy(text[starts[:, None] + np.arange(length + 1)].astype(np.int64))


def training_batch(text: np.ndarray, consumed: int, length: int, sequences: int, seed: int) -> Tensor:
    """Return the batch after `consumed` tokens of the shuffled text, [sequences, length + 1], epoch after epoch."""
    blocks = (len(text) - 1) // BLOCK
    position = consumed + np.arange(sequences) * length
    epoch = int(position[0]) // (blocks * BLOCK)
    order = np.random.default_rng([seed, epoch]).permutation(blocks)
    return windows(text, order[position // BLOCK % blocks] * BLOCK + position % BLOCK // length * length, length)


def even_windows(text: np.ndarray, count: int, length: int) -> Tensor:
    """Return windows spread evenly over the whole text, [count, length + 1]."""
    return windows(text, np.linspace(0, len(text) - length - 2, count).astype(np.int64), length)


# The model and its loss


def new_tensors(raw: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Return the untrained tensors, by their names on disk."""
    generator = torch.Generator().manual_seed(seed)
    config = decoder_config(raw)
    small = {"model.embed_tokens.weight", *(router_tensor(config.architecture, i) for i in config.moe_layers)}
    tensors = {}
    for name, shape in expected_tensors(config).items():
        if len(shape) == 1:
            tensors[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            continue
        scale = 0.02 if name in small else 0.5 / math.sqrt(shape[1])
        tensors[name] = torch.randn(shape, generator=generator) * scale
    return tensors


def decoder_of(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Decoder:
    """Return the decoder on these tensors, without copies, so that training changes them."""
    return Decoder(decoder_config(raw), tensors.__getitem__)


class LoadBalance:
    """Collects each layer's load-balance loss, N · Σ share_i · mean probability_i (Switch, Fedus et al. 2021)."""

    def __init__(self, decoder: Decoder) -> None:
        self._losses: list[Tensor] = []
        for block in decoder.moe_blocks:
            block.observer = self._observe

    def _observe(self, _x: Tensor, logits_TN: Tensor, selection: Selection) -> None:
        if not torch.is_grad_enabled():
            return
        experts = logits_TN.shape[1]
        share_N = torch.bincount(selection.experts.flatten(), minlength=experts) / selection.experts.numel()
        self._losses.append(experts * (share_N * logits_TN.softmax(dim=-1).mean(dim=0)).sum())

    def mean(self) -> Tensor:
        """Return the mean over the layers of the last forward; 1 is perfect balance."""
        losses, self._losses = self._losses, []
        return torch.stack(losses).mean()


def backward(decoder: Decoder, balance: LoadBalance, batch: Tensor) -> tuple[float, float]:
    """Add the gradients of one batch. Returns the mean loss a token and the load-balance loss."""
    hidden_TD = decoder.hidden_states(batch[:, :-1]).flatten(0, 1)
    targets = batch[:, 1:].flatten()
    leaf_TD = hidden_TD.detach().requires_grad_(True)
    total = 0.0
    for rows_TD, wanted in zip(leaf_TD.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
        loss = F.cross_entropy(F.linear(rows_TD, decoder.head_VD), wanted, reduction="sum") / len(targets)
        loss.backward()
        total += loss.item()
    imbalance = balance.mean()
    torch.autograd.backward([hidden_TD, BALANCE_WEIGHT * imbalance], [leaf_TD.grad, None])
    return total, imbalance.item()


@torch.no_grad()
def mean_loss(decoder: Decoder, rows: Tensor) -> float:
    """Return the mean loss a token over [sequences, length + 1]."""
    total = 0.0
    for batch in rows.split(8):
        logits = decoder(batch[:, :-1]).flatten(0, 1)
        total += F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item()
    return total / (rows.shape[0] * (rows.shape[1] - 1))


def half_removed(decoder: Decoder, rows: Tensor, seed: int) -> float:
    """Return the perplexity without a random half of the experts of each layer."""
    draw = random.Random(seed)
    routings = []
    for layer in decoder.config.layers:
        if layer.moe is not None:
            kept = torch.zeros(layer.moe.experts, dtype=torch.bool)
            kept[draw.sample(range(layer.moe.experts), layer.moe.experts // 2)] = True
            routings.append(Masked(own_routing(layer.moe), kept))
    with routed_by(decoder, routings):
        return math.exp(mean_loss(decoder, rows))


@torch.no_grad()
def sample(decoder: Decoder, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int, temperature: float) -> str:
    """Return the prompt and the model's continuation, drawn with a fixed seed; greedy at temperature 0."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    for _ in range(tokens):
        logits = decoder.last_logits(ids)
        if temperature:
            chosen = (logits / temperature).softmax(dim=-1).multinomial(1, generator=generator)
        else:
            chosen = logits.argmax(dim=-1, keepdim=True)
        if chosen.item() == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, chosen], dim=1)
    return str(tokenizer.decode(ids[0]))


# Training


def optimisers_of(decoder: Decoder) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices that map hidden states to hidden states, and AdamW for all else."""
    apart = {id(decoder.embedding_VD), *(id(block.router_ND) for block in decoder.moe_blocks)}
    others = [p for p in decoder.parameters() if p.ndim == 1 or id(p) in apart]
    matrices = [p for p in decoder.parameters() if p.ndim == 2 and id(p) not in apart]
    return [
        Muon(matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_at(part: float) -> float:
    """Return the learning rate's factor: a short rise, a plateau, and a linear decay to zero."""
    return max(0.0, min(1.0, (part + 1e-3) / WARM_UP, (1.0 - part) / (1.0 - DECAY_FROM)))


def stage_at(part: float) -> tuple[int, int]:
    """Return sequence length and sequences a step."""
    return next((length, count) for start, length, count in reversed(STAGES) if part >= start)


@dataclass(frozen=True)
class Run:
    """The state of one training run."""

    tensors: dict[str, Tensor]
    decoder: Decoder
    optimisers: list[torch.optim.Optimizer]
    text: np.ndarray
    validation: Tensor
    directory: Path
    seconds: float
    tokens: int | None
    seed: int

    def part(self, progress: Progress, seconds: float) -> float:
        """Return the finished fraction of the run: of the tokens if their number was given, of the time otherwise."""
        return seconds / self.seconds if self.tokens is None else progress.tokens / self.tokens

    def checkpoint(self, progress: Progress) -> None:
        """Save the state for `resume`: weights, optimizer moments and the curve so far."""
        tensors = {f"weights/{name}": tensor.detach() for name, tensor in self.tensors.items()}
        for index, optimiser in enumerate(self.optimisers):
            for parameter, moments in optimiser.state_dict()["state"].items():
                tensors |= {f"moments/{index}/{parameter}/{key}": moment for key, moment in moments.items()}
        temporary = self.directory / "checkpoint.safetensors.tmp"
        save_file(tensors, temporary, metadata={"progress": json.dumps(asdict(progress))})
        os.replace(temporary, self.directory / "checkpoint.safetensors")
        write_curve(progress, self.directory / "curve.jsonl")

    @torch.no_grad()
    def resume(self) -> Progress:
        """Return to the last checkpoint, or to the start."""
        path = self.directory / "checkpoint.safetensors"
        if not path.exists():
            return Progress()
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.optimisers]
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                kind, *place = name.split("/")
                if kind == "weights":
                    self.tensors[place[0]].copy_(file.get_tensor(name))
                else:
                    states[int(place[0])].setdefault(int(place[1]), {})[place[2]] = file.get_tensor(name)
            progress = Progress(**json.loads(file.metadata()["progress"]))
        for optimiser, state in zip(self.optimisers, states, strict=True):
            optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
        return progress


def train(run: Run) -> Iterator[Progress]:
    """Train until the time is over or the tokens are used up. Yields at each report."""
    progress = run.resume()
    balance = LoadBalance(run.decoder)
    begin = time.monotonic() - progress.seconds
    reported = checkpointed = progress.seconds
    wait = REPORT_SECONDS
    losses: list[tuple[float, float]] = []
    while (part := run.part(progress, time.monotonic() - begin)) < 1.0:
        length, sequences = stage_at(part)
        batch = training_batch(run.text, progress.tokens, length, sequences, run.seed)
        losses.append(backward(run.decoder, balance, batch))
        update(run.optimisers, rate_at(part))
        progress.step += 1
        progress.tokens += length * sequences
        progress.seconds = time.monotonic() - begin
        if progress.seconds - reported >= wait:
            progress.curve.append(report(run, progress, losses))
            losses = []
            reported = time.monotonic() - begin
            wait = max(REPORT_SECONDS, TRAINING_PER_REPORT * (reported - progress.seconds))
            yield progress
        if progress.seconds - checkpointed >= CHECKPOINT_SECONDS:
            checkpointed = progress.seconds
            run.checkpoint(progress)
    progress.curve.append(report(run, progress, losses))
    run.checkpoint(progress)
    yield progress


def update(optimisers: list[torch.optim.Optimizer], rate: float) -> None:
    """Run one step of each optimizer at its own rate times `rate`."""
    for optimiser, full in zip(optimisers, (MUON_RATE, ADAM_RATE), strict=True):
        for group in optimiser.param_groups:
            group["lr"] = full * rate
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


def report(run: Run, progress: Progress, losses: list[tuple[float, float]]) -> dict[str, float]:
    """Print and return one line of the curve."""
    training, imbalance = (sum(values) / len(losses) for values in zip(*losses, strict=True)) if losses else (0.0, 0.0)
    held_out = mean_loss(run.decoder, run.validation)
    line = {
        "minutes": round(progress.seconds / 60, 2),
        "step": progress.step,
        "tokens": progress.tokens,
        "training_loss": round(training, 4),
        "held_out_loss": round(held_out, 4),
        "held_out_perplexity": round(math.exp(held_out), 3),
        "load_balance": round(imbalance, 3),
        "learning_rate": round(rate_at(run.part(progress, progress.seconds)), 4),
    }
    print(json.dumps(line), flush=True)
    return line


# Output


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that concurrent readers see the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    write(temporary)
    temporary.chmod(0o644)  # safetensors makes its files readable by their owner only
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, lambda p: p.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8"))


def write_curve(progress: Progress, path: Path) -> None:
    """Write the curve, one line a report."""
    path.write_text("".join(json.dumps(line) + "\n" for line in progress.curve), encoding="utf-8")


def write_model(raw: dict[str, Any], tensors: dict[str, Tensor], end: int, directory: Path) -> dict[str, Tensor]:
    """Write config.json, generation_config.json, model.safetensors. Returns the tensors as they were saved, in bfloat16."""
    rounded = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    write_json(directory / "config.json", raw | ends)
    write_json(directory / "generation_config.json", {"do_sample": True, "temperature": 0.7, "top_p": 0.95} | ends)
    write_atomically(directory / "model.safetensors", lambda p: save_file(rounded, p, metadata={"format": "pt"}))
    return rounded


def plot(progress: Progress, path: Path) -> None:
    """Draw the curve, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    millions = [line["tokens"] / 1e6 for line in progress.curve]
    for key in ("training_loss", "held_out_loss"):
        axes.plot(millions, [line[key] for line in progress.curve], label=key.replace("_", " "))
    axes.set(xlabel="tokens seen, millions", ylabel="loss, nats a token")
    axes.legend()
    figure.savefig(path, dpi=120)


@dataclass(frozen=True)
class Figures:
    """Measurements of the finished model, as it was saved."""

    parameters: int
    file_bytes: int
    tokens: int
    minutes: float
    perplexity: float
    half_removed: list[float]
    sample: str


def measure(
    raw: dict[str, Any],
    rounded: dict[str, Tensor],
    rows: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    directory: Path,
) -> Figures:
    """Measure the saved tensors, in float32."""
    decoder = decoder_of(raw, {name: tensor.float() for name, tensor in rounded.items()})
    return Figures(
        parameters=sum(tensor.numel() for tensor in rounded.values()),
        file_bytes=(directory / "model.safetensors").stat().st_size,
        tokens=progress.tokens,
        minutes=round(progress.seconds / 60, 1),
        perplexity=round(math.exp(mean_loss(decoder, rows)), 3),
        half_removed=[round(half_removed(decoder, rows, seed), 3) for seed in range(3)],
        sample=sample(decoder, tokenizer, PROMPT, tokens=120, temperature=0.5),
    )


STDLIB_CARD = """\
The source of the Python standard library as installed with CPython, documents split nine to one by a hash of their
text; the tokenizer and the model saw only the larger part. The standard library is distributed under the
[PSF License Version 2](https://docs.python.org/3/license.html), © Python Software Foundation; the model may repeat
pieces of it."""
OTHER_CARD = """\
The text of `{name}`, documents split nine to one by a hash of their text; the tokenizer and the model saw only the
larger part. The model may repeat pieces of the text, and the license of the text says what is allowed with them."""


def model_card(config: DecoderConfig, figures: Figures, source: str) -> str:
    """Return README.md of a model that was trained on a source of text."""
    is_code, name = source == "stdlib", Path(source).name
    halves = ", ".join(f"{value:g}" for value in figures.half_removed)
    factor = sum(figures.half_removed) / len(figures.half_removed) / figures.perplexity
    moe = next(layer.moe for layer in config.layers if layer.moe is not None)
    shared = f", shared expert of {moe.shared_width}" if moe.shared_width else ""
    return f"""---
license: {"psf-2.0" if is_code else "other"}
library_name: transformers
pipeline_tag: text-generation
tags: [{config.architecture.model_type}, mixture-of-experts, demo]
---

# Demo model

A small Mixture-of-Experts language model of {"Python source" if is_code else name}, really trained, to try compression on.
It writes text that looks like its data; it is good for nothing else.

| | |
|---|---|
| family | {config.architecture.model_type}: {len(config.layers)} layers, {moe.experts} experts each, \
top-{moe.experts_per_token}{shared} |
| hidden size, expert width | {config.hidden_size}, {moe.expert_width} |
| attention | {config.attention_heads} heads of {config.head_dimension}, {config.key_value_heads} \
key-value heads, {config.max_positions} positions |
| vocabulary | {config.vocabulary_size}, byte-level BPE; the embedding is also the output head |
| parameters | {figures.parameters:,} in bfloat16, {figures.file_bytes:,} bytes |
| trained on | {figures.tokens:,} tokens, {figures.minutes:g} minutes on 2 CPU cores |
| held-out perplexity | {figures.perplexity:g} a token |
| the same, a random half of each layer's experts removed | {halves} (three draws; on average {factor:.2f} times as much) |

## Data

{STDLIB_CARD if is_code else OTHER_CARD.format(name=name)}

## Sample

The prompt is the first four lines (temperature 0.5).

```python
{figures.sample.rstrip()}
```

Made by `examples/train_demo_model.py`.
"""


def parsed_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(CONFIGS), default="demo")
    parser.add_argument("--data", default="stdlib", help="a source of text; other text needs a tokenizer in the output")
    parser.add_argument("--output", type=Path, default=DEMO_MODEL)
    parser.add_argument("--work-directory", type=Path, required=True, help="for tokens, checkpoints and the curve")
    parser.add_argument("--minutes", type=float, default=33.0, help="wall time of training")
    parser.add_argument("--tokens", type=int, help="train on so many tokens instead, however long that takes")
    parser.add_argument("--early-minutes", type=float, default=8.0, help="write an early version of the model then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Train, save and measure."""
    arguments = parsed_arguments()
    torch.set_num_threads(arguments.threads)
    output, work = arguments.output, arguments.work_directory
    work.mkdir(parents=True, exist_ok=True)
    raw = CONFIGS[arguments.model]
    output.mkdir(parents=True, exist_ok=True)
    if output.resolve() != DEMO_MODEL and arguments.data == "stdlib":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(DEMO_MODEL / name, output / name)
    tokenizer = AutoTokenizer.from_pretrained(output)
    held_out = tokenised(tokenizer, arguments.data, "held-out", work)
    tensors = new_tensors(raw, arguments.seed)
    decoder = decoder_of(raw, tensors).requires_grad_(True)
    run = Run(
        tensors=tensors,
        decoder=decoder,
        optimisers=optimisers_of(decoder),
        text=tokenised(tokenizer, arguments.data, "calibration", work),
        validation=even_windows(held_out, 64, 256),
        directory=work,
        seconds=60 * arguments.minutes,
        tokens=arguments.tokens,
        seed=arguments.seed,
    )
    is_early_written = False
    for progress in train(run):
        if not is_early_written and progress.seconds >= 60 * arguments.early_minutes:
            write_model(raw, tensors, tokenizer.eos_token_id, output)
            is_early_written = True
    finish(raw, tensors, tokenizer, progress, even_windows(held_out, 256, 512), arguments)


def write_skip_tables(output: Path, source: str) -> None:
    """Write the tables of adaptive skipping, from the calibration part of the text."""
    checkpoint = Checkpoint(output)
    tokens = token_batches(source, load_tokenizer(checkpoint), samples=128, sequence_length=256, seed=0)
    skip_tables(collect(checkpoint, tokens, dtype=checkpoint.model_dtype)).save(output / SKIP_TABLES)


def finish(
    raw: dict[str, Any],
    tensors: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    rows: Tensor,
    arguments: argparse.Namespace,
) -> None:
    """Write the model, its figures and its curve."""
    output, work = arguments.output, arguments.work_directory
    rounded = write_model(raw, tensors, tokenizer.eos_token_id, output)
    write_skip_tables(output, arguments.data)
    if output.resolve() == DEMO_MODEL:  # the kept curve belongs to the shipped model
        write_curve(progress, CURVE)
    plot(progress, work / "curve.png")
    figures = measure(raw, rounded, rows, tokenizer, progress, output)
    write_atomically(
        output / "README.md",
        lambda p: p.write_text(model_card(decoder_config(raw), figures, arguments.data), encoding="utf-8"),
    )
    write_json(work / "figures.json", asdict(figures))
    print(json.dumps(asdict(figures), indent=2))


if __name__ == "__main__":
    main()
