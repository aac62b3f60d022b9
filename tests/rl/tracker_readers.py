"""What trackers stored, read back through their own packages: {step: {metric: value}}, with every repetition refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7  # wandb's offline files are LevelDB logs: blocks of records with headers


def read_tensorboard(folder: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    rows = [(e.step, tag, e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    return _by_step(rows)


def read_wandb(folder: Path) -> dict[int, dict[str, float]]:
    rows = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows += [
                (items["_step"], k, v)
                for k, v in items.items()
                if isinstance(v, float | int) and not k.startswith(("_", "samples/"))
            ]
    return _by_step(rows)


def wandb_records(folder: Path) -> list[Any]:
    """The records of all offline files of a run, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        found += [Record.FromString(raw) for raw in _leveldb_records(path.read_bytes())]
    return found


def _leveldb_records(raw: bytes) -> list[bytes]:
    place, parts, records = _HEADER, b"", []
    while place + _HEADER <= len(raw):
        if _BLOCK - place % _BLOCK < _HEADER:  # the rest of a block that holds no header is padding
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, place)
        parts += raw[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            records.append(parts)
            parts = b""
    return records


def read_trackio(project: str, run: str) -> dict[int, dict[str, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs(project, run)
    return _by_step([(log["step"], k, v) for log in logs for k, v in log.items() if isinstance(v, float)])


def read_mlflow(uri: str, run_id: str) -> dict[int, dict[str, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    names = client.get_run(run_id).data.metrics
    return _by_step(
        [(m.step, name, m.value) for name in names for m in client.get_metric_history(run_id, name)]
    )


def _by_step(rows: list[tuple[int, str, float]]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for step, name, value in rows:
        assert name not in found.setdefault(step, {}), f"{name} of step {step} is there twice"
        found[step][name] = value
    return found
