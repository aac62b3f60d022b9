"""Python values as JSON and back, without loss: numbers, text, lists, tuples, dicts and tensors of one element."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

_CPU = torch.device("cpu")
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def to_plain(value: Any) -> Any:
    """The value as JSON can hold it; TypeError for anything else, such as larger tensors, functions and objects."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or isinstance(value, DTensor) or value.is_complex():
            raise TypeError(f"a tensor of shape {tuple(value.shape)}")
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": value.item(), "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [to_plain(item) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: to_plain(item) for key, item in value.items()}}
    raise TypeError(f"a {type(value).__name__}")


def from_plain(value: Any, device: torch.device = _CPU) -> Any:
    """What `to_plain` was given; tensors come back on `device`. ValueError for what it never makes."""
    if isinstance(value, list):
        return [from_plain(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tuple"} and isinstance(value["tuple"], list):
        return tuple(from_plain(item, device) for item in value["tuple"])
    if value.keys() == {"dict"} and isinstance(value["dict"], dict):
        return {key: from_plain(item, device) for key, item in value["dict"].items()}
    if value.keys() == {"tensor", "dtype", "shape"} and isinstance(value["tensor"], bool | int | float):
        dtype, shape = DTYPES.get(str(value["dtype"])), value["shape"]
        if dtype is not None and isinstance(shape, list) and len(shape) < 9 and all(n == 1 for n in shape):
            return torch.tensor(value["tensor"], dtype=dtype, device=device).reshape(shape)
    raise ValueError(f"{str(value)[:80]} is not a value that a checkpoint can hold")
