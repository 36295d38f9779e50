"""Several processes that work on one model together, started by `torchrun`.

In a single process, nothing here has an effect.

All processes run the same code on the same files. Each has its own sequences, and the results are summed here. Only the
first process writes files and prints messages. Only numbers and JSON are exchanged.

`sharded` gives each process a shard of every tensor (FSDP2). FSDP sums the gradients of shards; every other tensor
operation of training works on shards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder, DecoderLayer
from engine.errors import OptionError
from engine.passes import heap
from engine.passes.memory_budget import UNLIMITED, MemoryBudget

T = TypeVar("T")
BUCKET_ELEMENTS = 1 << 24
"""Approximate number of elements in one buffer of an all-reduce of gradients."""
PATIENCE = timedelta(days=7)
"""Timeout of collective operations: the other processes wait while the first one writes."""
FAILED = "moe-compress/failed"
"""Key in the processes' store that holds the rank of the first process that failed."""


def started_together() -> bool:
    """Return whether torchrun started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


_store: Any = None


def meet() -> None:
    """Connect to the other processes' store, if there are any, so that only the first failure is reported."""
    global _store
    if started_together() and _store is None:
        _store, _, _ = next(rendezvous("env://", timeout=PATIENCE))


def is_first_to_fail() -> bool:
    """Return whether this process is the one to report the error; the others fail as a consequence."""
    own = os.environ.get("RANK", "0")
    if _store is None:
        return own == "0"
    try:
        return bool(_store.compare_set(FAILED, "", own).decode() == own)
    except RuntimeError:
        return False  # the store ended with the process that held it


def join(device: str) -> str:
    """Join the process group, if there is one, and return the device of this process."""
    if not started_together():
        return device
    backend = "cpu:gloo"
    if device.startswith("cuda"):
        place = int(os.environ["LOCAL_RANK"])
        if place >= torch.cuda.device_count():
            raise OptionError(
                f"at least {place + 1} processes on a machine with {torch.cuda.device_count()} GPUs; lower --nproc-per-node"
            )
        device, backend = f"cuda:{place}", "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        meet()
        dist.init_process_group(
            backend, store=_store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), timeout=PATIENCE
        )
    return device


def leave() -> None:
    """Destroy the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def count() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Return whether this is the process that reads, writes and prints for all."""
    return rank() == 0


def told(value: Any = None, teller: int = 0) -> Any:
    """Return one process's JSON value in all processes; by default the value of the first process."""
    if count() == 1:
        return value
    text = json.dumps(value).encode() if rank() == teller else b""
    length = torch.tensor(len(text))
    dist.broadcast(length, teller)
    buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(buffer, teller)
    return json.loads(buffer.numpy().tobytes())


def all_told(value: T) -> list[T]:
    """Return a list of every process's JSON value, in all processes."""
    return [told(value, teller) for teller in range(count())]


def wait() -> None:
    """Wait until all processes have reached this point; no process continues if another one has failed."""
    added_up([0.0])


def share(items: Sequence[T]) -> Sequence[T]:
    """Return this process's part of the items: consecutive ones, in numbers that differ by at most one, possibly none."""
    begin, end = (len(items) * place // count() for place in (rank(), rank() + 1))
    return items[begin:end]


def own_rows(sequences: int, length: int, *, budget: MemoryBudget = UNLIMITED) -> slice:
    """Return the slice of sequences that this process runs.

    If there are enough batches, these are whole batches as a single process has them, so that each product has the same
    rows and gives bit-identical results. Otherwise they are single sequences, and none if there are more processes than
    sequences.
    """
    every = list(budget.batches(sequences, length))
    if len(every) < count():
        every = [slice(row, row + 1) for row in range(sequences)]
    own = share(every)
    return slice(own[0].start, own[-1].stop) if own else slice(0, 0)


def own_batch_size(batch_size: int, sequences: int, what: str) -> int:
    """Return this process's batch size in training with `batch_size` sequences per step over all processes.

    Raises OptionError if the sequences cannot be shared evenly.
    """
    if count() > 1 and sequences < batch_size:
        raise OptionError(
            f"{what} takes steps of {batch_size} sequences, and there are {sequences} to share; give more text, or run "
            "without torchrun"
        )
    if batch_size % count():
        raise OptionError(
            f"{what} takes steps of {batch_size} sequences, which {count()} processes cannot share evenly; start a number "
            f"that divides {batch_size}"
        )
    return batch_size // count()


def own_directory(directory: Path, rows: slice) -> Path:
    """Return the directory for this process's results for these sequences: a subdirectory if there are several processes."""
    if count() > 1:
        directory /= f"process-{rank()}-sequences-{rows.start}-{rows.stop}"
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over the processes. All tensors must have one dtype and device."""
    if count() == 1:
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat)
        for tensor, piece in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(piece.view_as(tensor))


def added_up(values: Iterable[float]) -> list[float]:
    """Return each number summed over the processes."""
    sums = torch.tensor(list(values), dtype=torch.float64)
    add_up([sums])
    return [float(value) for value in sums.tolist()]


def gathered(own: Tensor | None) -> Tensor:
    """Return the rows of all processes concatenated by rank, on the device of `own`. None: a process without rows."""
    if count() == 1:
        assert own is not None
        return own
    parts = [_sent(own, sender) for sender in range(count())]
    whole = torch.cat([part for part in parts if part is not None])
    return whole if own is None else whole.to(own.device)


def in_turn(items: Sequence[T], compute: Callable[[T], Tensor], *, together: bool = False) -> Iterator[tuple[T, Tensor]]:
    """Yield (item, compute(item)) for all items in order. The processes take turns to compute, and send their results.

    together: a process without an item of its own computes an item of another process, because `compute` needs all
    processes.
    """
    for start in range(0, len(items), count()):
        turn = items[start : start + count()]
        own = compute(turn[min(rank(), len(turn) - 1)]) if together or rank() < len(turn) else None
        for sender, item in enumerate(turn):
            result = own if count() == 1 else _sent(own, sender)
            assert result is not None
            yield item, result


def _sent(own: Tensor | None, sender: int) -> Tensor | None:
    """Return the sender's tensor, on the CPU."""
    mine = own if rank() == sender else None
    header = told(None if mine is None else [list(mine.shape), str(mine.dtype).removeprefix("torch.")], sender)
    if header is None:
        return None
    shape, dtype = header
    tensor = torch.empty(shape, dtype=getattr(torch, dtype)) if mine is None else mine.cpu().contiguous()
    if tensor.numel():
        dist.broadcast(tensor.view(-1).view(torch.uint8), sender)
    return tensor


def check_several() -> None:
    """Raise OptionError if there is only one process."""
    if count() == 1:
        raise OptionError("--shard spreads the model over several processes; start them with torchrun --nproc-per-node N")


def largest(value: float) -> float:
    """Return the largest of the processes' numbers."""
    if count() == 1:
        return value
    highest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return float(highest)


def smallest(value: float) -> float:
    """Return the smallest of the processes' numbers."""
    return -largest(-value)


def sharded(
    checkpoint: Checkpoint,
    make: Callable[[Callable[[int, DecoderLayer], None]], Decoder],
    device: torch.device | str,
    keep_whole: Callable[[DecoderLayer], Collection[nn.Parameter]] = lambda layer: (),
) -> Decoder:
    """Return a decoder of which this process holds its shards (FSDP2); layers are gathered when they are needed.

    make: builds the decoder on its device and passes each layer to the given function before it builds the next one.
    Thus only one layer is whole at a time, besides the embedding and the head, which are whole until all layers are
    built, and in each pass. keep_whole: parameters of a layer that every process keeps. Raises OptionError if there is
    only one process.
    """
    check_several()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    if torch.device(device).type == "cpu":
        heap.give_back_large()  # for the gathered tensors
    kept: set[nn.Parameter] = set()
    common: dict[str, Any] = {
        "mesh": init_device_mesh(torch.device(device).type, (count(),)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "ignored_params": kept,
    }

    def cut_layer(index: int, layer: DecoderLayer) -> None:
        kept.update(keep_whole(layer))
        fully_shard(layer, **common)
        checkpoint.release()

    decoder = make(cut_layer)
    # The embedding and the head stay gathered from the forward pass on: the loss uses them after it.
    fully_shard(decoder, reshard_after_forward=False, **common)
    register_fsdp_forward_method(decoder, "hidden_states")
    # An expert that no token of this process uses takes part with a zero gradient, because other processes may use it.
    fully_sharded: Any = decoder
    fully_sharded.set_reduce_scatter_unused_params(True)
    return decoder


def load_decoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str, shard: bool) -> Decoder:
    """Return the checkpoint's decoder, whole or `sharded`. A sharded decoder has plain weights in place of low-bit ones."""
    config = checkpoint.config
    if not shard:
        return Decoder(config, checkpoint.weights(dtype, device))
    return sharded(checkpoint, lambda made: Decoder(config, checkpoint.source(dtype, device), made), device)


def is_spread(decoder: object) -> bool:
    """Return whether a decoder is `sharded`."""
    return hasattr(decoder, "reshard")


def let_go(decoder: Decoder) -> None:
    """Free gathered parameters after forward passes without a backward pass: they would not see the next update."""
    reshard: Any = getattr(decoder, "reshard", None)
    if reshard is not None:
        reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process holds only a shard of the tensor."""
    return count() > 1 and hasattr(tensor, "to_local")


def piece(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, sharing its memory; the tensor itself if it is whole."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(own: Tensor, like: Tensor) -> Tensor:
    """Return the full tensor from every process's shard. `like`: a tensor that is sharded in the same way, or not at all."""
    if not is_sharded(like):
        return own
    from torch.distributed.tensor import DTensor

    layout: Any = like
    own = own.to(piece(like).device)
    made = DTensor.from_local(own, layout.device_mesh, layout.placements, shape=like.shape, stride=like.stride())
    return made.full_tensor()


def cut(full: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a full tensor: the inverse of `whole`."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    layout: Any = like
    full = full.to(piece(like).device)
    return distribute_tensor(full, layout.device_mesh, layout.placements, src_data_rank=None).to_local()


def _buckets(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
