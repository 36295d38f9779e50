"""The importance matrix of a model as llama.cpp has it: a GGUF file with the sums of squared inputs of every product.

The format is that of tools/imatrix (github.com/ggml-org/llama.cpp, `IMatrixCollector::save_imatrix`): for each matrix,
`NAME.in_sum2` [matrices of a stack, inputs] has Σ x² over tokens, and `NAME.counts` [matrices of a stack, 1] their number.
`llama-quantize --imatrix` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat
from pathlib import Path

import torch
from torch import Tensor

from engine.families.gguf.description import Description
from engine.files.gguf_file_writer import GgufFileWriter, metadata_entry
from engine.files.gguf_types import BLOCK_TYPES, BlockType

_FLOAT32 = BLOCK_TYPES[0]


def write_imatrix(
    path: Path,
    description: Description,
    squares: Mapping[str, Tensor],
    tokens: Mapping[str, int],
    data: str,
    chunks: int,
    chunk_size: int,
) -> None:
    """Write the file. squares: Σ x² [inputs], and tokens: their number, by the family's names of matrices.

    An expert that no token chose has zeros. Absorbed latent attention multiplies other inputs in llama.cpp, so its keys
    and values are left out. chunks: the number of sequences of the text, of `chunk_size` tokens each.
    """
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": [data],
        "imatrix.chunk_count": chunks,
        "imatrix.chunk_size": chunk_size,
    }
    layout: dict[str, tuple[BlockType, tuple[int, ...]]] = {}
    content: dict[str, Iterator[Tensor]] = {}
    for tensor in description.tensors:
        inputs = next((len(squares[source]) for source in tensor.sources if source in squares), 0)
        if inputs and tensor.place.keys is None:
            names, count = (f"{tensor.name}.in_sum2", f"{tensor.name}.counts"), len(tensor.sources)
            layout |= {names[0]: (_FLOAT32, (count, inputs)), names[1]: (_FLOAT32, (count, 1))}
            own = map(squares.get, tensor.sources, repeat(torch.zeros(inputs)))
            content[names[0]] = map(tensor.by_column, own)
            content[names[1]] = (torch.tensor([float(tokens.get(source, 0))]) for source in tensor.sources)
    with GgufFileWriter(path, (metadata_entry(*each) for each in metadata.items()), layout) as file:
        for name, pieces in content.items():
            file.write(name, (piece.numpy() for piece in pieces))
