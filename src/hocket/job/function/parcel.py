"""Values on their way from one process to another: a file of JSON, and beside it one with the tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hocket.errors import UsageError
from hocket.job.checkpoint import tensor_file


def write(folder: Path, name: str, content: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Write ``content`` (see ``hocket.job.packing``) to ``folder``; the JSON appears last, and whole or not at all."""
    if tensors:
        whole = _whole(tensors)
        image = tensor_file.Image(tensor_file.describe(tensors))
        image.fill(whole)
        image.write(folder / f"{name}.safetensors", "null")
    unfinished = folder / f"{name}.unfinished"
    unfinished.write_text(json.dumps(content))
    unfinished.replace(folder / f"{name}.json")


def read(folder: Path, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """What ``write`` was given; tensors are on the CPU, and belong to the reader."""
    content = json.loads((folder / f"{name}.json").read_text())
    path = folder / f"{name}.safetensors"
    if not path.exists():
        return content, {}
    from safetensors.torch import load_file

    return content, load_file(path)


def _whole(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise UsageError(f"{name} is a sparse, quantized or meta tensor, which cannot be sent: make it a dense one")
    tensor_file.check(tensors)
    return [tensor.detach().cpu().resolve_conj().resolve_neg() for tensor in tensors.values()]
