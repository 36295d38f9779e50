"""Statistics of the first layer for multi-token prediction, from one more pass of the text through the model.

Each position gives the layer the decoder's hidden state and the embedding of the next token (engine/decoder/prediction.py).

Shape suffixes: S sequences, B sequences of a batch, L positions, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from calibrate.collect import SIMILARITY_TOKENS, LayerCollector
from calibrate.statistics import LayerStatistics
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.prediction_layer import PredictionTensors
from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.model import Outer, embedded, positions_for
from engine.decoder.prediction import PredictionLayer
from engine.families.rotary_embedding import Rotary
from engine.passes import processes
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.streaming import stream_layers


@torch.no_grad()
def prediction_statistics(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    budget: MemoryBudget = UNLIMITED,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> LayerStatistics:
    """Return the statistics of the layer's experts on token sequences.

    Every position but the last one of a sequence is read. Raises CheckpointError where the layer is not complete.
    """
    tensors = PredictionTensors(checkpoint)
    config, source = tensors.config, tensors.source(dtype, device)
    rows = processes.own_rows(*tokens_SL.shape, budget=budget)
    own_SL, length = tokens_SL[rows].to(device), tokens_SL.shape[1] - 1
    states = stream_layers(
        checkpoint, own_SL, lambda index, layer: None, dtype=dtype, device=device, budget=budget, progress=progress
    )
    outer, layer = Outer(checkpoint.config, checkpoint.source(dtype, device)), PredictionLayer(config, source)
    block = layer.layer.feed_forward
    assert isinstance(block, MoeBlock), "prediction_config chooses a layer with experts"
    budget.relieve_between_experts(layer.layer, Expert, checkpoint.release)
    chosen = torch.randperm(len(tokens_SL) * length, generator=torch.Generator().manual_seed(seed))
    sample_T = chosen[:SIMILARITY_TOKENS].sort().values - rows.start * length
    collector = LayerCollector(block, sample_T.to(device))
    embedding_VD = checkpoint.source(dtype, device)("model.embed_tokens.weight")
    positions = positions_for(config, Rotary(checkpoint.config), own_SL[:1, 1:], None, 0, dtype)
    with states:
        for batch in budget.batches(*own_SL.shape):
            states_BLD = outer.hidden_states(states[batch].to(device))[:, :-1]
            embedded_BLD = embedded(checkpoint.config, own_SL[batch, 1:], embedding_VD)
            layer.run(layer.inputs(embedded_BLD, states_BLD, True), positions)
    statistics, _ = collector.statistics()
    block.observer = block.expert_observer = None
    checkpoint.release()
    return statistics
