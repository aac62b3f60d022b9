"""Manifests: every difference between what was sent and what is held has a name."""

import random
from dataclasses import FrozenInstanceError

import pytest
import torch

from shardproof.digest import digest
from shardproof.export.manifest import ExportReceipt, Manifest
from shardproof.weights.writer import TensorMeta

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def payload(seed=0):
    """{name: tensor} of several dtypes and shapes, an empty and a scalar one among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (7,), (2, 3, 4), (), (0, 4), (1,), (129, 65)]
    return {
        f"layer.{index}.weight": torch.randint(0, 2, shape, generator=generator).to(dtype)
        if dtype in (torch.bool, torch.uint8, torch.int64)
        else torch.randn(shape, generator=generator).to(dtype)
        for index, (shape, dtype) in enumerate(zip(shapes, DTYPES, strict=True))
    }


def manifest_of(tensors, version=3, with_digests=True):
    metas = tuple(TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    digests = {name: digest(tensor) for name, tensor in tensors.items()} if with_digests else {}
    return Manifest(version, metas, digests)


def codes(findings):
    return [(finding.code, finding.stage, finding.tensor) for finding in findings]


def test_what_was_sent_compares_clean_in_any_order():
    tensors = payload()
    manifest = manifest_of(tensors)
    assert manifest.compare(tensors.items()) == []
    assert manifest.compare(reversed(tensors.items())) == []
    assert manifest.compare((name, tensor.clone()) for name, tensor in tensors.items()) == []


def test_a_view_that_is_not_contiguous_compares_by_its_values():
    square = torch.randn(6, 4)
    manifest = manifest_of({"w": square.T.contiguous()})
    assert manifest.compare([("w", square.T)]) == []


@pytest.mark.parametrize("seed", range(40))
def test_one_changed_bit_is_named(seed):
    draw = random.Random(seed)
    tensors = payload(seed)
    manifest = manifest_of(tensors)
    name = draw.choice([name for name, tensor in tensors.items() if tensor.numel()])
    changed = tensors[name].clone()
    if changed.dtype == torch.bool:
        flat = changed.view(-1)
        at = draw.randrange(flat.numel())
        flat[at] = ~flat[at]
    else:
        raw = changed.view(-1).view(torch.uint8)
        raw[draw.randrange(raw.numel())] ^= 1 << draw.randrange(8)
    findings = manifest.compare({**tensors, name: changed}.items(), receiver="engine 2")
    assert codes(findings) == [("E404", "verify", name)]
    assert "engine 2" in findings[0].message and "differs from what was sent" in findings[0].message


def test_missing_extra_twice_dtype_and_shape():
    tensors = payload()
    manifest = manifest_of(tensors)
    names = list(tensors)
    received = [
        (names[0], tensors[names[0]].double()),
        (names[1], tensors[names[1]]),
        (names[1], tensors[names[1]]),
        (names[2], tensors[names[2]].reshape(6, 4)),
        ("other", torch.zeros(1)),
        *((name, tensors[name]) for name in names[4:]),
    ]
    findings = manifest.compare(received)
    assert [finding.tensor for finding in findings] == [names[0], names[1], names[2], "other", names[3]]
    assert {finding.code for finding in findings} == {"E404"}
    messages = [finding.message for finding in findings]
    assert "torch.float64 (3, 5), expected torch.float32 (3, 5)" in messages[0]
    assert "arrived twice" in messages[1]
    assert "(6, 4), expected torch.float16 (2, 3, 4)" in messages[2]
    assert "not in the manifest" in messages[3]
    assert "did not arrive" in messages[4]
    assert all("Fix: send them again" in str(finding) for finding in findings)


def test_without_digests_names_dtypes_and_shapes_are_compared():
    tensors = payload()
    manifest = manifest_of(tensors, with_digests=False)
    changed = {**tensors, "layer.0.weight": tensors["layer.0.weight"] + 1}
    assert manifest.compare(changed.items()) == []
    del changed["layer.1.weight"]
    assert codes(manifest.compare(changed.items())) == [("E404", "verify", "layer.1.weight")]


def test_the_total_depends_on_everything_but_the_version():
    tensors = payload()
    total = manifest_of(tensors).total
    assert manifest_of(tensors, version=9).total == total
    assert manifest_of({**tensors, "layer.0.weight": tensors["layer.0.weight"] * 2}).total != total
    assert manifest_of({**tensors, "layer.0.weight": tensors["layer.0.weight"].reshape(5, 3)}).total != total
    assert manifest_of(dict(reversed(tensors.items()))).total != total
    renamed = {name.replace("layer.0", "layer.00"): tensor for name, tensor in tensors.items()}
    assert manifest_of(renamed).total != total
    # The same eight bytes under another dtype.
    eight = torch.arange(8, dtype=torch.uint8)
    assert manifest_of({"w": eight}).total != manifest_of({"w": eight.view(torch.bool)}).total
    assert manifest_of({}).total != total


def test_bytes_of_a_meta():
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in payload().items()]
    assert [meta.nbytes for meta in metas] == [tensor.nbytes for tensor in payload().values()]
    with pytest.raises(FrozenInstanceError):
        metas[0].name = "other"


def test_a_receipt_prints_its_rate_and_digest():
    manifest = manifest_of(payload())
    receipt = ExportReceipt(3, 7, 3 * 2**30, 1.5, manifest)
    assert receipt.digest == manifest.total
    assert receipt.findings == []
    assert str(receipt) == (
        f"sent version 3: 7 tensors, 3072.0 MiB in 1.50 s (2.00 GiB/s), digest {manifest.total[:16]}"
    )
    assert "0.00 s" in str(ExportReceipt(0, 0, 0, 0.0, manifest))
