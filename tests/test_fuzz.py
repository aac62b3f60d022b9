"""Whatever a stranger hands over is refused in words or means what it says: no traceback, no hang, no wrong success.

Thousands of small damages, drawn from fixed seeds, to everything that is read: safetensors headers, indexes, configs,
recipes, rows, run folders and the checkpoints of runs.
"""

import contextlib
import json
import math
import random
import shutil
import signal
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoTokenizer

import shardproof as sp
from shardproof.config.load import from_json, load_recipe, to_json
from shardproof.model.inventory import take_inventory
from shardproof.model.skeleton import build_skeleton
from shardproof.report.page import write_report
from shardproof.rl.checks import check_inputs
from shardproof.rl.place import check_folder, write_settings
from shardproof.rl.sources.encoding import encode_prompts
from shardproof.shard.plan import plan_shards
from shardproof.shard.torch_private import local_tensor
from shardproof.weights.reader import INDEX_NAME, open_checkpoint
from shardproof.weights.source import resolve_folder
from tests.models import make_checkpoint, tiny_config
from tests.ranks import run_ranks
from tests.rl.runs import load_rows

pytestmark = pytest.mark.fault

RECIPES = Path(__file__).parents[1] / "recipes"
# At least 2,000 together.
NUM_HEADERS, NUM_INDEXES, NUM_CONFIGS, NUM_RECIPES, NUM_ROWS, NUM_FOLDERS, NUM_CHECKPOINTS = (
    550,
    200,
    350,
    450,
    300,
    150,
    200,
)
NUM_TOKENIZERS = 150
PATIENCE_S = 20  # for one damage; each takes milliseconds

ODD_VALUES = [
    None, True, False, -1, 0, 1, 3, 2.5, 10**12, -(10**18), 2**63, 10**30, math.nan, math.inf, -math.inf, 1e300,
    "", "x", "none", "auto", "\x1b[31m", "\ud800", "\0", "\u202e", "../../../etc/passwd", "/dev/zero", "9" * 5000,
    [], {}, [[]], [None], {"": {}}, {"a": [1, {"b": None}]}, ["x"] * 100, [0, 0], [1, -1], "F64", "I16", "x" * 3000,
]  # fmt: skip
ODD_BYTES = [
    b"\0",
    b"\x1b[2J",
    b"\xff\xfe",
    b"{",
    b"}",
    b'"',
    b"[" * 5000,
    b"9" * 5000,
    b"nan",
    b"-",
    b"\n",
    b",",
    b"\xed\xa0\x80",
]


class Hang(BaseException):
    """A damage took longer than anything may; no handler of the code under test catches it."""


@contextlib.contextmanager
def deadline():
    def ring(number, frame):
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome_of(use, label):
    """What `use` returns, or None if it was refused in words; anything else fails the test with the damage's name."""
    try:
        with deadline():
            return use()
    except sp.ShardproofError as error:
        said = str(error)
        assert error.code in said and len(said) < 30_000, f"{label}: {len(said)} characters"
        odd = {c for c in said if not c.isprintable() and c not in "\n\t"}
        assert not {c for c in odd if ord(c) < 32 or 127 <= ord(c) < 160}, f"{label}: {said!r}"
        return None
    except Hang:
        pytest.fail(f"{label}: no answer in {PATIENCE_S} s")
    except Exception as error:
        raise AssertionError(f"{label}: {type(error).__name__}: {str(error)[:500]}") from error


def damage_bytes(rng, raw):
    """(what was done, the damaged bytes)."""
    at, length = rng.randrange(len(raw) or 1), rng.choice([1, 2, 8, 64, 500])
    kind = rng.choice(["flip", "flip", "cut", "remove", "repeat", "insert", "overwrite", "append", "shuffle"])
    if kind == "flip":
        return f"bit {at}", raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[
            at + 1 :
        ] if raw else b"\1"
    if kind == "cut":
        return f"cut at {at}", raw[:at]
    if kind == "remove":
        return f"remove {length} at {at}", raw[:at] + raw[at + length :]
    if kind == "repeat":
        return f"repeat {length} at {at}", raw[:at] + raw[at : at + length] * 2 + raw[at + length :]
    if kind == "append":
        return "append", raw + rng.choice(ODD_BYTES)
    if kind == "shuffle":
        part = bytearray(raw[at : at + length])
        rng.shuffle(part)
        return f"shuffle {length} at {at}", raw[:at] + bytes(part) + raw[at + length :]
    odd = rng.choice(ODD_BYTES)
    end = at + len(odd) if kind == "overwrite" else at
    return f"{kind} {odd[:10]!r} at {at}", raw[:at] + odd + raw[end:]


def put(path, content):
    """Replace a file. What is mapped of the old one stays as it was."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


def places_in(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places_in(item, (*path, key))


def damage_json(rng, value):
    """(what was done, the damaged JSON text): one place gets another value, goes away, changes its name or is there twice."""
    value = json.loads(json.dumps(value))
    *parents, last = rng.choice(list(places_in(value))[1:] or [("x",)])
    target = value
    for part in parents:
        target = target[part]
    kind = rng.choice(["swap", "swap", "swap", "delete", "rename", "deepen", "twice"])
    label = f"{kind} {[*parents, last]}"
    if kind == "delete":
        del target[last]
    elif kind == "rename" and isinstance(target, dict):
        target[rng.choice(["", "x", "\x1b[2J", f"{last}x", "__metadata__", "a" * 2000])] = target.pop(last)
    elif kind == "deepen":
        depth = rng.choice([3, 200, 50_000])
        target[last] = "@deep@"
        return label, json.dumps(value).replace('"@deep@"', "[" * depth + "]" * depth).encode()
    elif kind == "twice":
        text = json.dumps(value)
        return label, text.replace(
            "{", f"{{{json.dumps(str(last))}: {json.dumps(rng.choice(ODD_VALUES))}, ", 1
        ).encode()
    else:
        target[last] = rng.choice(ODD_VALUES)
        label += f" to {str(target[last])[:30]!r}"
    return label, json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def damage(rng, raw):
    """Damage to a JSON file: half of the time to its bytes, half to its structure."""
    return damage_bytes(rng, raw) if rng.random() < 0.4 else damage_json(rng, json.loads(raw))


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and raw_bits(one) == raw_bits(other)


def raw_bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a tiny model in two files with an index, and the parts of a load that do not depend on its files."""
    folder = make_checkpoint(tmp_path_factory.mktemp("fuzz"), "llama")
    skeleton = build_skeleton(resolve_folder("model", folder, False).config, role="policy")
    tensors = {n: t.clone() for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
    return folder, skeleton, take_inventory(skeleton.model), tensors


def check_loaded(model, label):
    """Open and plan; what is accepted must be what the safetensors package reads from the same files."""
    folder, skeleton, inventory, whole = model

    def use():
        checkpoint = open_checkpoint(folder)
        plan_shards(skeleton, inventory, checkpoint, 0)
        checkpoint.sample_digest()
        return checkpoint

    checkpoint = outcome_of(use, label)
    if checkpoint is not None:
        try:
            known = {n: t for file in checkpoint.headers for n, t in load_file(folder / file).items()}
        except (
            SafetensorError
        ):  # stricter than we are about what is overwritten; then nothing may have changed
            known = whole
        assert known.keys() == checkpoint.tensors.keys(), label
        assert all(same_bits(checkpoint.whole(name), tensor) for name, tensor in known.items()), label
    return checkpoint is not None


def test_headers(model):
    rng = random.Random(1)
    folder, accepted = model[0], 0
    assert check_loaded(model, "as it is")
    for path in sorted(folder.glob("*.safetensors"))[:2]:
        raw = path.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        for _ in range(NUM_HEADERS // 2):
            if rng.random() < 0.6:
                label, changed = damage_json(rng, header)
                put(path, struct.pack("<Q", len(changed)) + changed + raw[8 + length :])
            else:  # most of a file is values, most damages of which are other values
                label, changed = damage_bytes(rng, raw[: 8 + length])
                put(path, changed + raw[8 + length :])
            accepted += check_loaded(model, f"{path.name}: {label}")
        put(path, raw)
    assert accepted < NUM_HEADERS // 4
    assert check_loaded(model, "as it was")


def test_indexes(model):
    rng = random.Random(2)
    path = model[0] / INDEX_NAME
    raw = path.read_bytes()
    for _ in range(NUM_INDEXES):
        label, changed = damage(rng, raw)
        put(path, changed)
        check_loaded(model, f"index: {label}")
    put(path, raw)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_configs(tmp_path, family):
    rng = random.Random(3)
    folder = make_checkpoint(tmp_path, family)
    path = folder / "config.json"
    raw = path.read_bytes()

    def use():
        resolved = resolve_folder("model", folder, False)
        skeleton = build_skeleton(resolved.config, role="policy")
        return plan_shards(skeleton, take_inventory(skeleton.model), resolved.checkpoint, 0)

    names = set(outcome_of(use, "as it is").origins)
    for _ in range(NUM_CONFIGS // 2):
        label, changed = damage(rng, raw)
        put(path, changed)
        plan = outcome_of(use, f"config: {label}")
        assert plan is None or set(plan.origins) == names, label


def damage_recipe(rng, raw):
    lines = raw.decode().splitlines()
    at = rng.randrange(len(lines))
    kind = rng.choice(["bytes", "value", "value", "value", "key", "remove", "twice", "section"])
    if kind == "bytes":
        return damage_bytes(rng, raw)
    key, equals, _ = lines[at].partition("=")
    if kind == "value" and equals:
        odd = rng.choice(
            [
                "-1",
                "0",
                "nan",
                "inf",
                "1e300",
                "10000000000000",
                "9" * 5000,
                "''",
                "[]",
                "{}",
                "true",
                "'none'",
            ]
        )
        odd = rng.choice(
            [
                odd,
                "1979-05-27",
                "'\\u001b[2J'",
                '"\\u001b[2J"',
                "[" * 3000,
                '"' + "x" * 5000 + '"',
                "{a.b = 1}",
            ]
        )
        lines[at] = f"{key}= {odd}"
    elif kind == "key":
        lines[at] = f"{rng.choice(['x', 'model', 'a.b.c', '[x]', '[[model]]', chr(27)])} = 1"
    elif kind == "remove":
        del lines[at]
    elif kind == "section":
        lines.insert(
            at, rng.choice(["[model]", "[critic]", "[reference]", "[model.lora]", "[x.y.z]", "[[data]]", "["])
        )
    else:
        lines.insert(at, lines[rng.randrange(len(lines))])
    return f"{kind} {lines[min(at, len(lines) - 1)][:60]!r}", "\n".join(lines).encode()


def numbers_of(value):
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_of(item)
    elif isinstance(value, int | float):
        yield value


def test_recipes(tmp_path):
    rng = random.Random(4)
    sources = [path.read_bytes() for path in sorted(RECIPES.glob("*.toml"))]
    path = tmp_path / "recipe.toml"
    for _ in range(NUM_RECIPES):
        label, changed = damage_recipe(rng, rng.choice(sources))
        put(path, changed)
        recipe = outcome_of(lambda: load_recipe(path), f"recipe: {label}")
        if recipe is not None:
            text = to_json(recipe)
            assert from_json(text) == recipe, label
            assert all(math.isfinite(number) for number in numbers_of(json.loads(text))), label


def test_rows(tmp_path):
    rng = random.Random(5)
    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "tiny" / "model")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2", "more": {"a": [1, None]}}
    rows = [{"prompt": "1+9=", "answer": "10"}, talk, {"prompt": "2+2=", "answer": 4, "completion": "4"}]
    path = tmp_path / "rows.jsonl"
    for _ in range(NUM_ROWS):
        lines = [json.dumps(row).encode() for row in rows]
        at = rng.randrange(len(lines))
        label, lines[at] = damage(rng, lines[at])
        path.write_bytes(b"\n".join(lines))

        def use():
            found = load_rows(str(path), "prompt", "answer")
            return encode_prompts(found, tokenizer, "prompt", False, 500)

        prompts = outcome_of(use, f"row {at}: {label}")
        if prompts is not None:
            read = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
            assert [prompt.row["prompt"] for prompt in prompts] == [row["prompt"] for row in read], label


def test_tokenizers(tmp_path, capfd):
    rng = random.Random(8)
    model = Path(shutil.copytree(RECIPES / "tiny" / "model", tmp_path / "model"))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    recipe = load_recipe(RECIPES / "tiny.toml", [f"model.path={model}", f"output.folder={tmp_path / 'run'}"])
    for _ in range(NUM_TOKENIZERS):
        name = rng.choice(["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
        raw = (model / name).read_bytes()
        label, changed = damage(rng, raw)
        put(model / name, changed)
        outcome_of(lambda: check_inputs(recipe), f"{name}: {label}")
        put(model / name, raw)
    assert "\x1b" not in "".join(capfd.readouterr())


def test_run_folders(tmp_path):
    rng = random.Random(6)
    folder = tmp_path / "run"
    folder.mkdir()
    recipe = load_recipe(RECIPES / "tiny.toml", [f"output.folder={folder}"])
    write_settings(folder, recipe, {"model.path": {"sha256": "0"}})
    lines = {
        "metrics.jsonl": {"step": 1, "time": 0.5, "metrics": {"reward/mean": 0.5, "grad_norm": 1.0}},
        "samples.jsonl": {"step": 1, "prompt": "1+1=", "completion": "2", "reward": 1.0, "rewards": [1.0]},
        "events.jsonl": {"step": 1, "kind": "skip", "text": "the loss is not finite"},
    }
    for name, line in lines.items():
        (folder / name).write_text(json.dumps(line) + "\n")
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert outcome_of(lambda: check_folder(recipe), "as it is").last_step == 1
    for _ in range(NUM_FOLDERS):
        name = rng.choice([*lines, "config.json", "config.json"])
        raw = (folder / name).read_bytes()
        label, changed = damage(rng, raw)
        (folder / name).write_bytes(changed)
        outcome_of(lambda: check_folder(recipe), f"{name}: {label}")
        assert outcome_of(lambda: write_report(folder), f"report of {name}: {label}") is not None
        (folder / name).write_bytes(raw)


def state_of(policy, optimizer):
    """Everything that a resume changes, as one list of tensors and values."""
    found = [local_tensor(param).clone() for param in policy.parameters()]
    for param in policy.parameters():
        found += [local_tensor(value).clone() for _, value in sorted(optimizer.state[param].items())]
    return found, [group["lr"] for group in optimizer.param_groups], policy.version, torch.get_rng_state()


def resume_damaged(folder, seed, count):
    """Damage files of a checkpoint one after the other; resume must refuse, or restore what was saved."""
    torch.manual_seed(0)
    policy = sp.load(sp.RandomInit(tiny_config("llama", num_hidden_layers=1)), compute_dtype=torch.float32)
    optimizer = sp.make_optimizer(policy, lr=1e-2)
    sp.train_step(policy, sp.Batch([[1, 2, 3, 4]]), optimizer)
    sp.save_checkpoint(folder, policy, optimizer, extra={"position": 7}, step=1)
    saved = state_of(policy, optimizer)
    (chosen,) = [path for path in Path(folder).iterdir() if path.name.startswith("step-")]
    files = sorted(path for path in chosen.rglob("*") if path.is_file())
    rng = random.Random(seed)
    problems, refused = [], 0
    for _ in range(count):
        path = rng.choice(files)
        raw = path.read_bytes()
        with contextlib.suppress(ValueError):
            is_json = isinstance(json.loads(raw), dict)
        label, changed = damage(rng, raw) if path.suffix == ".json" and is_json else damage_bytes(rng, raw)
        put(path, changed)
        label = f"{path.name}: {label}"
        with torch.no_grad():
            for param in policy.parameters():
                param.zero_()
        try:
            extra = outcome_of(lambda: sp.resume(folder, policy, optimizer), label)
        except BaseException as error:
            problems.append(str(error))
            extra = None
        if extra is None:
            refused += 1
        elif not (extra == {"position": 7} and same_state(saved, state_of(policy, optimizer))):
            problems.append(f"{label}: resumed to something else")
        put(path, raw)
    assert sp.resume(folder, policy, optimizer) == {"position": 7}
    assert same_state(saved, state_of(policy, optimizer))
    return problems, refused


def same_state(one, other):
    tensors = all(same_bits(a, b) for a, b in zip(one[0], other[0], strict=True))
    return tensors and one[1:3] == other[1:3] and torch.equal(one[3], other[3])


def test_checkpoints_of_runs(tmp_path):
    problems, refused = run_ranks(1, resume_damaged, str(tmp_path / "checkpoints"), 7, NUM_CHECKPOINTS)[0]
    assert problems == []
    assert refused > NUM_CHECKPOINTS // 2


def test_there_are_enough_of_them():
    counts = (NUM_HEADERS, NUM_INDEXES, NUM_CONFIGS, NUM_RECIPES, NUM_ROWS, NUM_FOLDERS, NUM_CHECKPOINTS)
    assert sum(counts) + NUM_TOKENIZERS >= 2000
