"""Dense encoder-decoders made from a mixture: token accuracy by number of FFNs and training, against scratch.

    python benchmarks/encoder_decoder.py [--ffns 1,2] [--steps 400] [--teacher-steps 2000] [--threads 1]

The mixture is a toy that this script trains first, on the pairs that `--data stdlib` of `compress densify` names: restore
case and punctuation of a line of code. A row is one dense model: untrained, after `--steps` of layer distillation, and
after as many steps of fine-tuning; `scratch` is the same dense architecture from random weights, trained for the same total
of steps on the pairs alone. The mixture itself is trained for that many more steps, because the densified models begin where
its training ended. Each finished figure is a line of results/NAME.jsonl and is not computed again. Interrupted trainings
are resumed.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from results import BUILD, RESULTS, markdown, remember, remembered, save
from torch import Tensor, nn

from calibrate.pairs import STDLIB, Pairs, text_pairs, tokenised
from compress.dense.dense_plan import choose
from compress.dense.encoder_decoder import (
    Usage,
    dense_row,
    dense_student,
    layer_errors,
    planned,
    saved_tensors,
    usage,
    without_padding,
)
from compress.dense.encoder_decoder_training import PairLoss, measure, train
from compress.options.training import DenseTrainingOptions, LossWeights, TrainingOptions
from compress.training.training import Batch, Trainer
from engine.checkpoint.tokenizer import load_tokenizer_of
from engine.families.encoder_decoders import ENCODER_DECODERS, ROUTER_OF_BLOCK
from engine.families.results import as_dense_encoder_decoder
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint

FAMILY = next(row for row in ENCODER_DECODERS.values() if row.dense_sibling)
SIZES = {
    "vocab_size": 264,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_heads": 4,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "num_experts": 8,
    "expert_capacity": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
BALANCE = 0.02
"""Weight of the load-balancing loss in the training of the mixture."""
SCRATCH = "scratch"
DENSIFIED = "densified"
CONTROL = "control"
STAGES = ("untrained", "distilled", "fine-tuned")
COUNTS = {"training": 1 << 20, "validation": 128, "calibration": 512, "held-out": 1024}
LENGTH = 48


class TeacherLoss(PairLoss):
    """Cross-entropy, and the load-balancing loss of the Switch Transformer paper (eq. 4) over all sparse layers."""

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        routed: dict[str, Any] = {}
        routers = {name: self.student.get_submodule(f"{block}.{ROUTER_OF_BLOCK}") for name, block in self.blocks.items()}
        handles = [
            router.register_forward_hook(lambda module, inputs, output, name=name: routed.__setitem__(name, output))
            for name, router in routers.items()
        ]
        terms = super().__call__(batch)
        for handle in handles:
            handle.remove()
        pairs = self.pairs.take(batch.group_G)
        losses = []
        for name, (used_BLN, _, logits_BLN) in routed.items():
            used_TN, logits_TN = (without_padding(part, name, pairs) for part in (used_BLN, logits_BLN))
            shares_N, probabilities_N = used_TN.float().mean(0), logits_TN.softmax(-1).mean(0)
            losses.append(used_TN.shape[1] * (shares_N * probabilities_N).sum())
        return terms | {"balance": BALANCE * torch.stack(losses).mean()}

    @property
    def blocks(self) -> Mapping[str, str]:
        """Prefix of each sparse layer's MoE block."""
        return {name: self.checkpoint.block(name) for name in self.checkpoint.experts}


def random_teacher(directory: Path) -> None:
    """Save a mixture with random weights, and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[FAMILY.model_type](**SIZES)).save_pretrained(directory)
    letters = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(directory)


def train_teacher(work: Path, steps: int, learning_rate: float) -> float:
    """Write the trained mixture to work/teacher, and return the seconds of this call."""
    started = time.monotonic()
    if (work / "teacher").is_dir():
        return 0.0
    begun = work / "teacher-begun"
    if not (begun / "config.json").is_file():
        random_teacher(begun)
    checkpoint = EncoderDecoderCheckpoint(begun)
    model, pairs = checkpoint.load(torch.float32), all_pairs(begun)["training"]
    go_on(model, checkpoint, pairs, steps, learning_rate, work / "teacher.safetensors")
    model.save_pretrained(begun)  # type: ignore[operator]
    begun.rename(work / "teacher")
    return time.monotonic() - started


def go_on(
    model: nn.Module, checkpoint: EncoderDecoderCheckpoint, pairs: Pairs, steps: int, learning_rate: float, state: Path
) -> None:
    """Train the mixture, from `state` if it exists."""
    options = TrainingOptions(steps, learning_rate, 32, 32, warm_up_steps=100, clip_norm=1.0, save_every=100)
    loss = TeacherLoss(model, None, checkpoint, pairs, LossWeights(1.0, 0.0, 0.0))
    trainer = Trainer(dict(model.named_parameters()), loss, options, len(pairs), pairs.tokens // len(pairs))
    trainer.run(state_path=state, resume=True)


def all_pairs(directory: Path) -> dict[str, Pairs]:
    """Return every split, tokenized for the mixture."""
    tokenizer, texts = load_tokenizer_of(directory, SIZES["vocab_size"]), text_pairs(STDLIB)
    end = SIZES["eos_token_id"]
    return {split: tokenised(texts, split, count, tokenizer, LENGTH, end, STDLIB) for split, count in COUNTS.items()}


class Benchmark:
    """One set of options, and the file of finished figures."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.lines = RESULTS / f"{arguments.name}.jsonl"
        self.done = remembered(self.lines)
        self.work = BUILD / arguments.name
        self.work.mkdir(parents=True, exist_ok=True)
        seconds = train_teacher(self.work, arguments.teacher_steps, arguments.teacher_learning_rate)
        self.checkpoint = EncoderDecoderCheckpoint(self.work / "teacher")
        self.teacher = self.checkpoint.load(torch.float32)
        self.pairs = all_pairs(self.checkpoint.directory)
        self.usage: Usage = usage(self.teacher, self.checkpoint, self.pairs["calibration"])
        if not self.known(kind="teacher"):
            self.record(self.teacher, seconds, ffns=0, kind="teacher", stage=STAGES[0])

    def known(self, **key: Any) -> bool:
        """Return whether a figure is finished."""
        return any(all(line[name] == value for name, value in key.items()) for line in self.done)

    def record(self, model: nn.Module, seconds: float, errors: list[float] | None = None, **key: Any) -> None:
        """Measure on the held-out pairs and append a line to the file."""
        found = measure(model, self.pairs["held-out"], self.checkpoint.config)
        line = key | {"token_accuracy": found.token_accuracy, "token_accuracy_stderr": found.token_accuracy_error}
        line |= {"perplexity": found.perplexity, "perplexity_stderr": found.losses.standard_error(found.pairs_P)}
        line |= {"seconds": seconds}
        named = dict(model.named_parameters())
        written = saved_tensors(named, self.checkpoint) if key["kind"] == DENSIFIED else named
        line |= {"block_errors": errors, "parameters": sum(tensor.numel() for tensor in written.values())}
        self.done.append(line)
        remember(self.lines, line)
        print(line, flush=True)

    def run(self) -> None:
        """Compute every missing figure."""
        for ffns in self.arguments.ffns:
            for stage in STAGES:
                self.stage(ffns, DENSIFIED, stage)
            self.stage(ffns, SCRATCH, STAGES[2])
            shutil.rmtree(self.work / f"{ffns}-{DENSIFIED}", ignore_errors=True)
            shutil.rmtree(self.work / f"{ffns}-{SCRATCH}", ignore_errors=True)
        if not self.known(kind=CONTROL):
            started, model = time.monotonic(), self.checkpoint.load(torch.float32)
            state, rate = self.work / "control.safetensors", self.arguments.learning_rate
            go_on(model, self.checkpoint, self.pairs["training"], 2 * self.arguments.steps, rate, state)
            self.record(model, time.monotonic() - started, ffns=0, kind=CONTROL, stage=STAGES[2])

    def stage(self, ffns: int, kind: str, stage: str) -> None:
        """Compute one stage of a dense model, from the state of the previous one."""
        if self.known(ffns=ffns, kind=kind, stage=stage):
            return
        started, errors = time.monotonic(), None
        if kind == SCRATCH:
            student = scratch(self.checkpoint, ffns)
        else:
            chosen = choose("usage", self.usage.statistics, ffns)
            plan = planned(chosen, self.usage.statistics, self.teacher, self.checkpoint)
            student = dense_student(plan, self.teacher, self.checkpoint, torch.float32)
            calibration = self.pairs["calibration"].take(slice(64))
            found = layer_errors(student, self.teacher, self.checkpoint, self.usage, calibration)
            errors = [error.whole for error in found]
        options = training_options(self.arguments, stage, kind == SCRATCH)
        if options.steps:
            work = self.work / f"{ffns}-{kind}"
            work.mkdir(exist_ok=True)
            training, validation = self.pairs["training"], self.pairs["validation"]
            train(student, self.teacher, self.checkpoint, training, validation, options, directory=work, resume=True)
        self.record(student, time.monotonic() - started, errors, ffns=ffns, kind=kind, stage=stage)


def scratch(checkpoint: EncoderDecoderCheckpoint, ffns: int) -> nn.Module:
    """Return the dense architecture with transformers' random weights."""
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    config = as_dense_encoder_decoder(checkpoint.raw_config, ffns * SIZES["d_ff"])
    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    made = CONFIG_MAPPING[dense_row(checkpoint.row).model_type](**values)
    model: nn.Module = AutoModelForSeq2SeqLM.from_config(made).eval()
    return model


def training_options(arguments: argparse.Namespace, stage: str, from_scratch: bool) -> DenseTrainingOptions:
    """Return options with the total steps up to a stage. From scratch, all steps are on the pairs alone."""
    steps = arguments.steps
    common = DenseTrainingOptions(learning_rate=arguments.learning_rate, batch_size=32, micro_batch_size=32)
    if from_scratch:
        return replace(common, finetune_steps=2 * steps)
    return replace(common, distill_steps=steps * (stage != STAGES[0]), finetune_steps=steps * (stage == STAGES[2]))


def table(figures: dict[str, Any]) -> str:
    """Return token accuracy, with perplexity in brackets, by row and stage."""
    done, steps = figures["lines"], figures["steps"]
    cells = {(line["ffns"], line["kind"], line["stage"]): line for line in done}
    teacher = next(line for line in done if line["kind"] == "teacher")

    def cell(line: dict[str, Any] | None) -> str:
        if line is None:
            return "–"
        accuracy, error = (f"{100 * line[name]:.1f}" for name in ("token_accuracy", "token_accuracy_stderr"))
        return f"{accuracy} ± {error} % ({line['perplexity']:.3f} ± {line['perplexity_stderr']:.3f})"

    rows = []
    for ffns in dict.fromkeys(line["ffns"] for line in done if line["ffns"]):
        for kind in (SCRATCH, DENSIFIED):
            own = [cells.get((ffns, kind, stage)) for stage in STAGES]
            parameters = next(line["parameters"] for line in own if line)
            name = f"{ffns} {'FFN' if ffns == 1 else 'FFNs'}, {kind}"
            rows.append([name, f"{parameters:,}", *map(cell, own)])
    further = next((line for line in done if line["kind"] == CONTROL), None)
    control = f", and {cell(further)} after {2 * steps} more" if further else ""
    note = (
        f"Token accuracy under teacher forcing on {figures['pairs']:,} held-out pairs, in brackets perplexity; the "
        f"mixture ({teacher['parameters']:,} parameters, {figures['experts']} experts) has {cell(teacher)} after "
        f"{figures['teacher_steps']:,} steps{control}. From scratch: {2 * steps} steps on the pairs alone. One seed.\n\n"
    )
    header = ["", "parameters", "untrained", f"{steps} distillation steps", f"+ {steps} fine-tuning steps"]
    return note + markdown(header, rows)


TABLES = {"encoder_decoder": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ffns", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--teacher-steps", type=int, default=2000)
    parser.add_argument("--teacher-learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="encoder_decoder", choices=TABLES)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    benchmark = Benchmark(arguments)
    benchmark.run()
    figures = {"steps": arguments.steps, "teacher_steps": arguments.teacher_steps, "pairs": COUNTS["held-out"]}
    save(arguments.name, figures | {"experts": SIZES["num_experts"], "lines": benchmark.done})


if __name__ == "__main__":
    main()
