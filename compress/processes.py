"""Several processes that train one model together, as `torchrun` starts them; in a process alone all of this does nothing.

Each process has its own sequences of a step. The gradients of whole tensors are added up here. `shard` leaves each process a
piece of every tensor (FSDP2), whose gradients FSDP adds up; whatever else a training does with tensors it does with pieces.

The processes see the same files. Nothing but numbers and JSON goes between them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.errors import OptionError
from engine.model import Decoder

BUCKET_ELEMENTS = 1 << 24
"""Gradients are added up in buffers of about so many elements."""
PATIENCE = timedelta(days=7)
"""The others wait while the first process calibrates."""


def started_together() -> bool:
    """Whether torchrun started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


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
        dist.init_process_group(backend, timeout=PATIENCE)
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


def told(value: Any = None) -> Any:
    """The first process's value, which is JSON, in all of them."""
    if count() == 1:
        return value
    text = json.dumps(value).encode() if is_first() else b""
    length = torch.tensor(len(text))
    dist.broadcast(length, 0)
    buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    return json.loads(bytes(buffer.tolist()))


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


def shard(decoder: Decoder, device: torch.device | str, keep_whole: Collection[nn.Parameter] = ()) -> None:
    """Leave this process its pieces of a decoder that has its weights on the CPU; layers are gathered as they are needed.

    keep_whole: parameters that every process keeps. Raises OptionError for a process alone.
    """
    check_several()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(torch.device(device).type, (count(),))
    common: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "ignored_params": set(keep_whole),
    }
    for layer in decoder.layers:
        fully_shard(layer, **common)
    # The embedding and the head stay gathered from the forward pass on: the loss uses them after it.
    fully_shard(decoder, reshard_after_forward=False, **common)
    register_fsdp_forward_method(decoder, "hidden_states")
    # An expert that no token of this process uses takes part with a gradient of zero: the others may have used it.
    fully_sharded: Any = decoder
    fully_sharded.set_reduce_scatter_unused_params(True)


def is_spread(decoder: Decoder) -> bool:
    """Whether `shard` was called on it."""
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
