"""Several processes that work on one model together, as `torchrun` starts them; in a process alone all of this does nothing.

All of them run the same code on the same files. Each has its own sequences, and what comes of them is added up here. What is
written, and what is said, is the first one's. Nothing but numbers and JSON goes between them.

`sharded` leaves each process a piece of every tensor (FSDP2), whose gradients FSDP adds up; whatever else a training does
with tensors it does with pieces.
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
from engine.passes.memory_budget import batches

T = TypeVar("T")
BUCKET_ELEMENTS = 1 << 24
"""Gradients are added up in buffers of about so many elements."""
PATIENCE = timedelta(days=7)
"""The others wait while the first process writes."""
FAILED = "moe-compress/failed"
"""The key in the processes' store under which stands who failed first."""


def started_together() -> bool:
    """Whether torchrun started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


_store: Any = None


def meet() -> None:
    """Find the others, if there are any: from here on the first that fails can say it for all."""
    global _store
    if started_together() and _store is None:
        _store, _, _ = next(rendezvous("env://", timeout=PATIENCE))


def is_first_to_fail() -> bool:
    """Whether this process is the one that is to say what went wrong: others fail of the same, or of its end."""
    own = os.environ.get("RANK", "0")
    if _store is None:
        return own == "0"
    try:
        return bool(_store.compare_set(FAILED, "", own).decode() == own)
    except RuntimeError:
        return False  # the store went with the process that had it


def join(device: str) -> str:
    """Enter the group, if there is one; the device of this process."""
    if not started_together():
        return device
    backend = "cpu:gloo"
    if device.startswith("cuda"):
        place = int(os.environ["LOCAL_RANK"])
        if place >= torch.cuda.device_count():
            raise OptionError(
                f"{place + 1} processes or more on a machine with {torch.cuda.device_count()} GPUs; lower --nproc-per-node"
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
    """Take the group apart."""
    if dist.is_initialized():
        dist.destroy_process_group()


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this is the process that reads, writes and speaks for all."""
    return rank() == 0


def told(value: Any = None, teller: int = 0) -> Any:
    """One process's value, which is JSON, in all of them; the first one's unless another is named."""
    if count() == 1:
        return value
    text = json.dumps(value).encode() if rank() == teller else b""
    length = torch.tensor(len(text))
    dist.broadcast(length, teller)
    buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(buffer, teller)
    return json.loads(buffer.numpy().tobytes())


def all_told(value: T) -> list[T]:
    """Every process's value, which is JSON, in all of them."""
    return [told(value, teller) for teller in range(count())]


def wait() -> None:
    """Until all have come this far; not one comes through where another has failed."""
    added_up([0.0])


def share(items: Sequence[T]) -> Sequence[T]:
    """This process's part of them: consecutive ones, as many as the others have, or one more or less; perhaps none."""
    begin, end = (len(items) * place // count() for place in (rank(), rank() + 1))
    return items[begin:end]


def own_rows(sequences: int, length: int) -> slice:
    """Which of so many sequences this process runs.

    Whole batches as a process alone has them, where there are enough, so that each product is of the same rows and gives
    the same bits; single sequences otherwise, and none where there are fewer than processes.
    """
    every = list(batches(sequences, length))
    if len(every) < count():
        every = [slice(row, row + 1) for row in range(sequences)]
    own = share(every)
    return slice(own[0].start, own[-1].stop) if own else slice(0, 0)


def own_batch_size(batch_size: int, sequences: int, what: str) -> int:
    """Of a training whose steps are of so many sequences in all. Raises OptionError where they cannot be shared evenly."""
    if count() > 1 and sequences < batch_size:
        raise OptionError(
            f"{what} takes steps of {batch_size} sequences, and there are {sequences} to share; give more text, or leave "
            "torchrun"
        )
    if batch_size % count():
        raise OptionError(
            f"{what} takes steps of {batch_size} sequences, which {count()} processes cannot share evenly; start as many as "
            f"divide {batch_size}"
        )
    return batch_size // count()


def own_directory(directory: Path, rows: slice) -> Path:
    """Where this process keeps what it has made of these sequences: inside the directory, where there are several."""
    if count() > 1:
        directory /= f"process-{rank()}-sequences-{rows.start}-{rows.stop}"
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def add_up(tensors: Sequence[Tensor]) -> None:
    """Make each tensor, of one dtype and device, the sum of what it is in the processes."""
    if count() == 1:
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat)
        for tensor, piece in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(piece.view_as(tensor))


def added_up(values: Iterable[float]) -> list[float]:
    """Each number summed over the processes."""
    sums = torch.tensor(list(values), dtype=torch.float64)
    add_up([sums])
    return [float(value) for value in sums.tolist()]


def gathered(own: Tensor | None) -> Tensor:
    """What all have, one process's rows after another's; None for a process without any. On the device of its own."""
    if count() == 1:
        assert own is not None
        return own
    parts = [_sent(own, sender) for sender in range(count())]
    whole = torch.cat([part for part in parts if part is not None])
    return whole if own is None else whole.to(own.device)


def in_turn(items: Sequence[T], compute: Callable[[T], Tensor], *, together: bool = False) -> Iterator[tuple[T, Tensor]]:
    """(item, what `compute` gives of it) for all items in order. The processes take turns to compute, and send.

    together: a process computes with the others even if no item is left for it, an item that another one sends.
    """
    for start in range(0, len(items), count()):
        turn = items[start : start + count()]
        own = compute(turn[min(rank(), len(turn) - 1)]) if together or rank() < len(turn) else None
        for sender, item in enumerate(turn):
            result = own if count() == 1 else _sent(own, sender)
            assert result is not None
            yield item, result


def _sent(own: Tensor | None, sender: int) -> Tensor | None:
    """The sender's tensor, on the CPU."""
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
    """Raise OptionError for a process alone."""
    if count() == 1:
        raise OptionError("--shard spreads the model over several processes; start them with torchrun --nproc-per-node N")


def largest(value: float) -> float:
    """The largest of the processes' numbers."""
    if count() == 1:
        return value
    highest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return float(highest)


def smallest(value: float) -> float:
    """The smallest of them."""
    return -largest(-value)


def sharded(
    checkpoint: Checkpoint,
    make: Callable[[Callable[[int, DecoderLayer], None]], Decoder],
    device: torch.device | str,
    keep_whole: Callable[[DecoderLayer], Collection[nn.Parameter]] = lambda layer: (),
) -> Decoder:
    """A decoder made of a checkpoint, of which this process has its pieces; layers are gathered as they are needed.

    make: the decoder on its device, each layer given to the function before the next is made: no more than one is whole,
    beside the embedding and the head, which are whole until all layers are there, and in each pass.
    keep_whole: parameters of a layer that every process keeps. Raises OptionError for a process alone.
    """
    check_several()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    if torch.device(device).type == "cpu":
        heap.give_back_large()  # what is gathered
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
    # An expert that no token of this process uses takes part with a gradient of zero: the others may have used it.
    fully_sharded: Any = decoder
    fully_sharded.set_reduce_scatter_unused_params(True)
    return decoder


def load_decoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str, shard: bool) -> Decoder:
    """The checkpoint's decoder, whole or `sharded`, and then with plain weights in the place of those of few bits."""
    config = checkpoint.config
    if not shard:
        return Decoder(config, checkpoint.weights(dtype, device))
    return sharded(checkpoint, lambda made: Decoder(config, checkpoint.source(dtype, device), made), device)


def is_spread(decoder: object) -> bool:
    """Whether it is `sharded`."""
    return hasattr(decoder, "reshard")


def let_go(decoder: Decoder) -> None:
    """After forward passes without a backward pass: what was gathered for them would not see the next update."""
    reshard: Any = getattr(decoder, "reshard", None)
    if reshard is not None:
        reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has but a piece of it."""
    return count() > 1 and hasattr(tensor, "to_local")


def piece(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, sharing its memory; all of it where it is whole."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(own: Tensor, like: Tensor) -> Tensor:
    """The tensor that every process has one piece of; `like`: a tensor that is sharded in the same way, or not at all."""
    if not is_sharded(like):
        return own
    from torch.distributed.tensor import DTensor

    layout: Any = like
    own = own.to(piece(like).device)
    made = DTensor.from_local(own, layout.device_mesh, layout.placements, shape=like.shape, stride=like.stride())
    return made.full_tensor()


def cut(full: Tensor, like: Tensor) -> Tensor:
    """The inverse of `whole`: this process's piece of a tensor that it has all of."""
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
