"""docs/python-api.md: every public name of the package, with its signature, its docstring, and examples that run."""

from __future__ import annotations

import inspect
import re
from typing import Any

import shardproof

INTRO = """\
# Python API

<!-- python scripts/reference.py --write makes this page from the docstrings in src/shardproof/. -->

`import shardproof as sp` gives the names on this page. Functions marked *collective* exchange data between ranks: call
them on every rank, with the same arguments unless their description says otherwise.

Bad input raises a `ConfigError`, which is a `ValueError`. A broken invariant raises a `Fault`, which is a
`RuntimeError`; its subclass names the stage. Before a collective function raises for what one rank found, the ranks
exchange their findings, and all raise the same error. An exception in your own code between two calls is not covered
by that: the other ranks end at their next deadline, or at the process group's timeout.

The examples of this page build on each other. They run in one process on a CPU, or on several ranks under `torchrun`:

```python
import shardproof as sp
from transformers import Qwen3Config

config = Qwen3Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
```
"""
# (heading, names, example)
GROUPS: list[tuple[str, tuple[str, ...], str]] = [
    (
        "Load and prove",
        ("load", "ShardedModel", "LoadReceipt", "RandomInit", "attest", "AttestCallback"),
        """\
policy = sp.load(sp.RandomInit(config, seed=0))  # or a folder, or a hub id
print(policy.receipt)
assert sp.attest(policy) == []  # no findings, on any rank""",
    ),
    (
        "Score",
        ("logprobs", "values", "scores"),
        """\
sequences = [[1, 2, 3, 4, 5], [9, 8, 7]]  # token ids of this rank's sequences
old = sp.logprobs(policy, sequences)
assert [len(each) for each in old] == [4, 2]  # one log-prob per token after the first

critic = sp.load(sp.RandomInit(config, seed=0), role="critic")
assert [len(each) for each in sp.values(critic, sequences)] == [4, 2]""",
    ),
    (
        "Train",
        ("Batch", "weigh", "train_step", "StepResult", "Trainer", "Loss", "make_optimizer", "make_schedule"),
        """\
optimizer = sp.make_optimizer(policy, lr=1e-3)
schedule = sp.make_schedule(optimizer, "cosine", warmup_steps=2, total_steps=10)
batch = sp.weigh(sp.Batch(sequences, advantages=[1.0, -0.5], old_logps=old), "sequence_mean")

result = sp.train_step(policy, batch, optimizer, schedule, loss="policy", micro_batch_tokens=1024)
assert result.stepped and policy.version == 1

trainer = sp.Trainer(policy, optimizer, schedule)  # the same, with everything in one object
trainer.step(batch, loss="policy", micro_batch_tokens=1024)""",
    ),
    (
        "Export",
        ("WeightStream", "SharedWeights", "save_pretrained", "verify_pretrained"),
        """\
with sp.WeightStream(policy) as stream:
    for name, tensor in stream:  # whole tensors under checkpoint names, on every rank
        pass
print(stream.receipt)

sp.save_pretrained(policy, "out/model")  # a folder that plain transformers loads""",
    ),
    (
        "Checkpoints",
        ("save_checkpoint", "resume"),
        """\
sp.save_checkpoint("out/run", policy, optimizer, extra={"epoch": 1})
assert sp.resume("out/run", policy, optimizer) == {"epoch": 1}""",
    ),
    (
        "Ranks",
        ("init_distributed", "make_mesh", "deadline"),
        """\
sp.init_distributed()  # joins the group that torchrun describes; load() does it for you
mesh = sp.make_mesh(replicate=1)
with sp.deadline("load", seconds=60):  # collectives inside fail after 60 s, not at the group's timeout
    reference = sp.load(sp.RandomInit(config, seed=0), role="reference", mesh=mesh)""",
    ),
    (
        "Environments",
        ("Environment", "Turn", "Reply", "Opening", "ToolCall", "ToolEnvironment", "tool"),
        """\
class Guess(sp.Environment):
    \"\"\"The policy guesses a number, and is told where to go on.\"\"\"

    def start(self, row, seed):
        self.secret = int(row["answer"])

    def step(self, turn):
        guess = int(turn.content) if turn.content.isdigit() else -1
        if guess == self.secret:
            return sp.Reply(reward=1.0, done=True)
        return sp.Reply("higher" if guess < self.secret else "lower", reward=0.0)


game = Guess()
game.start({"answer": "7"}, seed=0)
assert game.step(sp.Turn("4", content="4")).messages == "higher"


class Shop(sp.ToolEnvironment):
    \"\"\"The policy buys by calling a tool.\"\"\"

    def start(self, row, seed):
        self.money = row["money"]

    @sp.tool
    def buy(self, item: str, count: int = 1) -> str:
        \"\"\"Buy something.

        Args:
            item: what to buy
            count: how many
        \"\"\"
        self.money -= count
        return f"you have {self.money} left"

    def finish(self, turn):  # the last turn: a number is the conversation's reward
        return 1.0 if self.money >= 0 else 0.0


assert Shop().tools[0]["function"]["name"] == "buy\"""",
    ),
    (
        "Prove what is trained on",
        ("TokenLedger", "attest_batch", "Trajectory", "Segment"),
        """\
asked = sp.Trajectory.of_prompt((1, 2, 3), group=0, sample=0)
turn = sp.Segment((4, 5), "policy", logprobs=(-0.5, -2.0), version=0, trained=True)
answered = asked.extended(turn)  # what your engine returned
ledger = sp.TokenLedger()
ledger.record(asked, answered)

batch = sp.Batch([answered.tokens], mask=[[0, 0, 0, 1, 1]], rollout_logps=[[0, 0, 0, -0.5, -2.0]])
assert sp.attest_batch(batch, [answered], ledger) == []  # no findings: train on it

batch.sequences[0][4] = 6  # a token that was not sampled
(finding,) = sp.attest_batch(batch, [answered], ledger)
assert "turn 1, token 1: the batch has 6, the engine sampled 5." in finding.message""",
    ),
    (
        "Findings and errors",
        (
            *("Finding", "ShardproofError", "ConfigError", "Fault"),
            *("LoadFault", "ShardFault", "TrainFault", "ExportFault"),
        ),
        """\
try:
    sp.load("no/such/folder")
except sp.ShardproofError as error:  # the same error on every rank
    print(error.code, error.findings[0].fix)""",
    ),
]


# The methods of a class that users call.
MEMBERS = {
    "ShardedModel": ("named_parameters", "local_shards", "persistent_buffers", "offload", "onload"),
    "AttestCallback": ("attest",),
    "Batch": ("masks", "counts", "with_column", "select", "flat"),
    "Trainer": ("step",),
    "WeightStream": ("metadata", "close"),
    "Environment": ("start", "step", "close", "rows"),
    "ToolEnvironment": ("finish", "toolbox"),
    "SharedWeights": ("path", "write", "close"),
    "TokenLedger": ("record", "clear"),
    "Trajectory": ("of_prompt", "extended"),
}
# What users are given and do not make: its attributes.
RETURNED = {
    "ShardedModel": {
        "module": "the FSDP root module",
        "model": "the Hugging Face model inside it",
        "receipt": "what the load cost on this rank (`LoadReceipt`)",
        "provenance": "what wrote each tensor, by name",
        "version": "0 after a load; each step that is taken adds 1",
        "source": "what was loaded",
        "folder": "where its files are on this machine",
        "mesh": "the mesh of ranks",
        "strategy": '`"fsdp2"` or `"fsdp1"`',
        "device": "where this rank computes",
        "settings": "the settings that `load` was called with",
    },
    "LoadReceipt": {
        "seconds": "duration of the load",
        "bytes_read": "bytes that this rank read from files",
        "peak_bytes": "increase of host memory (CPU) or device memory (CUDA) during the load",
        "shard_bytes": "bytes that this rank holds",
        "num_tensors": "number of tensors",
        "num_by_writer": "number of tensors by what wrote them: checkpoint, computed, init, tie",
        "stage_seconds": "duration by stage",
        "served_by": "the rank that sent this rank its slices; None if it read them itself",
    },
    "StepResult": {
        "stepped": "whether all ranks applied the update",
        "reason": "why it was skipped",
        "rank": "the rank where it went wrong",
        "micro_batch": "the micro-batch where it went wrong",
        "tensor": "the tensor that was not finite",
        "loss": "loss of the global batch",
        "grad_norm": "norm of the gradient before clipping",
        "lr": "learning rate of this update",
        "num_tokens": "tokens of the global batch that count in the loss",
        "metrics": "further numbers of the loss, such as `ratio/mean`",
        "version": "version of the weights after the step",
    },
    "Finding": {
        "code": "the code that [faults](faults.md) explains",
        "stage": "where it was found, such as `attest`",
        "message": "what was expected, and what was found",
        "rank": "the rank that caused it; None if no single one did",
        "tensor": "the tensor",
        "fix": "what to do",
    },
}


def page() -> str:
    """The text of docs/python-api.md."""
    return "\n\n".join([INTRO.strip(), *(_group(*group) for group in GROUPS)]) + "\n"


def _group(heading: str, names: tuple[str, ...], example: str) -> str:
    entries = [_entry(name, getattr(shardproof, name)) for name in names]
    return "\n\n".join([f"## {heading}", f"```python\n{example}\n```", *entries])


def _entry(name: str, thing: Any) -> str:
    parts = [f"### `sp.{name}`", *_described(name, thing)]
    for key in MEMBERS.get(name, ()):
        member = vars(thing)[key]
        member = member.__func__ if isinstance(member, classmethod) else member
        code = member.fget if isinstance(member, property) else member
        parts += [f"#### `{name}.{key}`", *_described(key, code, with_signature=code is member)]
    return "\n\n".join(parts)


def _described(name: str, thing: Any, with_signature: bool = True) -> list[str]:
    """The signature, and the docstring, whose `Collective:` and `Memory:` stand out."""
    is_error = inspect.isclass(thing) and issubclass(thing, BaseException)
    text = re.sub(r"\b(Collective|Memory): ", r"*\1:* ", inspect.getdoc(thing) or "")
    if name in RETURNED:
        assert all(key in thing.__annotations__ or hasattr(thing, key) for key in RETURNED[name])
        rows = [f"| `{key}` | {meaning} |" for key, meaning in RETURNED[name].items()]
        return [text, "\n".join(["| attribute | meaning |", "| --- | --- |", *rows])]
    parts = [f"```text\n{_signature(name, thing)}\n```"] if with_signature and not is_error else []
    return [*parts, text]


def _signature(name: str, thing: Any) -> str:
    parameters = [
        each for each in inspect.signature(thing).parameters.values() if each.name not in ("self", "cls")
    ]
    shown = [_parameter(each) for each in parameters]
    by_keyword = [each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters]
    if any(by_keyword):
        shown.insert(by_keyword.index(True), "*")
    given = inspect.signature(thing).return_annotation
    returns = "" if inspect.isclass(thing) or given is inspect.Signature.empty else f" -> {_type(given)}"
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){returns}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    text = f"{stars.get(parameter.kind, '')}{parameter.name}: {_type(parameter.annotation)}"
    if parameter.default is inspect.Parameter.empty:
        return text
    default = repr(parameter.default)
    return f"{text} = {'...' if default.startswith('<') else default}"


def _type(annotation: Any) -> str:
    """An annotation as text, without the modules that classes come from."""
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", str(annotation))
