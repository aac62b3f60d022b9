"""The catalogue of the museum: public bugs of this class, what happened there, and what names them here."""

from __future__ import annotations

from dataclasses import dataclass

from tests.ranks import run_ranks


@dataclass(frozen=True)
class Piece:
    """One public bug. `codes` are those that the injected fault is caught with."""

    title: str
    link: str
    there: str  # what the peer did
    codes: tuple[str, ...]
    here: str  # what happens here instead


_GITHUB = "https://github.com"

PIECES: dict[str, Piece] = {
    "skyrl-1709": Piece(
        "SkyRL 1709",
        f"{_GITHUB}/NovaSky-AI/SkyRL/issues/1709",
        "A meta model is cast to bf16 as a whole; `to_empty` gives the rotary frequencies memory that a broadcast of "
        "another dtype does not write; log-probs are NaN on all ranks but one.",
        ("S208", "S209"),
        "attest names the buffer, the rank and the dtype; load computes buffers on every rank and casts only parameters",
    ),
    "skyrl-1370-skip": Piece(
        "SkyRL 1370, skipped steps",
        f"{_GITHUB}/NovaSky-AI/SkyRL/pull/1370",
        "A rank with a gradient that is not finite skips the optimizer alone, and the others wait in it.",
        ("T302",),
        "one exchange decides for all ranks; the result names the rank, the micro-batch and the tensor",
    ),
    "skyrl-1370-zeroed": Piece(
        "SkyRL 1370, zeroed gradients",
        f"{_GITHUB}/NovaSky-AI/SkyRL/pull/1370",
        "To keep the ranks together gradients are zeroed and the step is taken: weight decay and moments still move "
        "the weights.",
        ("T302",),
        "a skipped step leaves parameters, moments, schedule and version as they were",
    ),
    "skyrl-1370-metrics": Piece(
        "SkyRL 1370, metrics",
        f"{_GITHUB}/NovaSky-AI/SkyRL/pull/1370",
        "Metrics are all-reduced after each micro-batch while backward reductions are in flight; a rank with other "
        "metrics leaves the rest waiting.",
        ("T306",),
        "metrics travel in the one exchange after the last micro-batch, by name",
    ),
    "skyrl-1370-experts": Piece(
        "SkyRL 1370, experts without tokens",
        f"{_GITHUB}/NovaSky-AI/SkyRL/pull/1370",
        "Experts without tokens change the graph, and recomputation takes another route than the forward pass.",
        ("T302",),
        "recomputation replays the routing of the forward pass; an expert with NaN or Inf is reported",
    ),
    "skyrl-1370-router": Piece(
        "SkyRL 1370, router logits",
        f"{_GITHUB}/NovaSky-AI/SkyRL/pull/1370",
        "`output_router_logits` is set on models without a router, and models that say `num_experts` are missed.",
        ("C001",),
        "the names that configs use for experts are kept in a table; a router setting for a dense model is refused",
    ),
    "skyrl-1767": Piece(
        "SkyRL 1767",
        f"{_GITHUB}/NovaSky-AI/SkyRL/issues/1767",
        "Training with FSDP became unstable with no error. It looks like an optimizer that was built while tied "
        "parameters were two objects, and updates an orphan.",
        ("S203", "S211", "S212"),
        "attest counts ties and compares the optimizer's parameters with the model's",
    ),
    "skyrl-1822": Piece(
        "SkyRL 1822",
        f"{_GITHUB}/NovaSky-AI/SkyRL/issues/1822",
        "Entropy and other metrics are means of means over micro-batches and ranks; a rank whose tokens are all "
        "masked reports nothing, and the others wait (1817).",
        ("T306",),
        "sums and counts are reduced over the global batch; a rank that lacks a metric is reported",
    ),
    "transformers-45050": Piece(
        "transformers 45050",
        f"{_GITHUB}/huggingface/transformers/pull/45050",
        "Memory-saving loading leaves `empty_like` placeholders on all ranks but one; they hold NaN, and generation "
        "dies in `multinomial`.",
        ("S205",),
        "attest names the tensor and the rank; load uses no placeholders",
    ),
    "transformers-45649": Piece(
        "transformers 45649",
        f"{_GITHUB}/huggingface/transformers/pull/45649",
        "The fix of 45050 fills the placeholders with zeros: nothing fails any more, and every rank commits the memory "
        "of a whole model.",
        ("S206",),
        "attest reports a module that is mostly zeros; a load's peak memory is its shard",
    ),
    "transformers-48892": Piece(
        "transformers 48892",
        f"{_GITHUB}/huggingface/transformers/issues/48892",
        "`from_pretrained` replaces non-persistent buffers by unwritten memory; a model whose `_init_weights` does not "
        "know them keeps garbage, the same on all ranks.",
        ("S209", "S204"),
        "computed buffers are compared with a fresh computation; a buffer that nothing writes stops the load",
    ),
    "verl-6188": Piece(
        "verl 5995 and 6188",
        f"{_GITHUB}/verl-project/verl/pull/6188",
        "With CPU offload the module is moved to the GPU to ask for its weights; FSDP's bookkeeping does not follow, "
        "and the weight sync crashes.",
        ("E401",),
        "the export moves nothing, and reports a parameter that something else moved",
    ),
    "verl-6405": Piece(
        "verl 6405",
        f"{_GITHUB}/verl-project/verl/pull/6405",
        "Buffers are broadcast in the order of `named_buffers`, which differs between ranks: unequal sizes hang, equal "
        "sizes are swapped.",
        ("S207", "S209"),
        "buffers are compared by name on every rank",
    ),
    "verl-7014": Piece(
        "verl 7014",
        f"{_GITHUB}/verl-project/verl/pull/7014",
        "Merged LoRA weights are read after the merge was undone: the engine gets the base, and every sync succeeds.",
        ("E405",),
        "the receipt has a finding if the payload did not change although the model did",
    ),
    "verl-7495": Piece(
        "verl 7495",
        f"{_GITHUB}/verl-project/verl/issues/7495",
        "The adapter is never sent; the engine samples from the first policy for the whole run.",
        ("E404",),
        "what a receiver holds is compared with the manifest; each adapter tensor that did not arrive is reported",
    ),
    "verl-7834": Piece(
        "verl 7834",
        f"{_GITHUB}/verl-project/verl/issues/7834",
        "`to_empty` gives a tied head storage of its own; values are still right, and from the first step embedding "
        "and head drift apart.",
        ("S203",),
        "ties are made before sharding, and attest counts them",
    ),
    "trl-5312": Piece(
        "TRL 5312",
        f"{_GITHUB}/huggingface/trl/issues/5312",
        "`generate` reloads the engine's weights from disk after the sync: it samples from the base model.",
        ("E404", "R503"),
        "the receiver is compared with the manifest, and a canary with the trainer's log-probs",
    ),
    "torchtitan-4226": Piece(
        "torchtitan 4226 and 4783",
        f"{_GITHUB}/pytorch/torchtitan/pull/4226",
        "A loss that is not finite is looked at where metrics are logged: after the optimizer, or not at all.",
        ("T302",),
        "every micro-batch's loss is part of the verdict, before anything is updated",
    ),
    "accelerate-alone": Piece(
        "accelerate, a rank that raises alone",
        f"{_GITHUB}/huggingface/accelerate/pull/3982",
        "One rank meets an error, or other keys than the rest, in the middle of a collective load; the others wait "
        "until the backend gives up.",
        ("L100",),
        "errors are exchanged before any rank raises; all ranks raise the same one, which names the rank",
    ),
    "vllm-42821": Piece(
        "vLLM 42821 and SkyRL 1680",
        f"{_GITHUB}/vllm-project/vllm/issues/42821",
        "The second `load_weights` writes experts into a layout that the first one changed: gate and up swap places.",
        ("E404", "R503"),
        "the manifest names each expert tensor that differs; the canary sees it in the log-probs",
    ),
    "vllm-tied-head": Piece(
        "vLLM on CPU, the stale tied head",
        f"{_GITHUB}/vllm-project/vllm",
        "The packed copy of a tied head is made at the first load and never again: every byte arrives, the version is "
        "set, and the old head goes on sampling.",
        ("R503",),
        "the canary compares log-probs, which is the only way to see it",
    ),
    "ms-swift-10154": Piece(
        "ms-swift 10154",
        f"{_GITHUB}/modelscope/ms-swift/issues/10154",
        "Merging LoRA in place and undoing it for every sync drifts bf16 base weights.",
        ("E404",),
        "merging is out of place; each base tensor that differs from the checkpoint is reported",
    ),
    "ms-swift-10012": Piece(
        "ms-swift 10012",
        f"{_GITHUB}/modelscope/ms-swift/pull/10012",
        "Sampled tokens are decoded to text, and the text is encoded again for training: other tokens, the same text.",
        ("R507",),
        "turns stay the tokens that were sampled; the ledger names the trajectory, the turn and the token",
    ),
    "verl-6719": Piece(
        "verl 6719",
        f"{_GITHUB}/verl-project/verl/issues/6719",
        "If all messages are rendered and encoded again for each turn, the policy reads its earlier turns in other "
        "tokens than it sampled.",
        ("R507",),
        "turns are appended as tokens; what the engine read before each turn is compared with the batch",
    ),
    "verl-6921": Piece(
        "verl 6921",
        f"{_GITHUB}/verl-project/verl/pull/6921",
        "The tool's turn is rendered on its own: the separator that the template writes behind the policy's stop token "
        "is lost at every turn.",
        ("R507",),
        "a reply has all that the template writes between two turns; an engine that read anything else is named by token",
    ),
    "nemo-rl-2821": Piece(
        "NeMo RL 2821",
        f"{_GITHUB}/NVIDIA-NeMo/RL/issues/2821",
        "The template drops the thoughts of earlier turns; each turn's tokens are what a longer rendering adds to the "
        "shorter one, and so the earlier answer is there twice.",
        ("R508", "R507"),
        "a probe finds such templates before the first step, and the recipe says what to do; the ledger names the token",
    ),
    "art-883": Piece(
        "ART 883",
        f"{_GITHUB}/OpenPipe/ART/issues/883",
        "The end of a turn is trained behind a prompt that lacks the turn's beginning, with the log-probs that it had "
        "behind the whole.",
        ("R507",),
        "a token is trained only behind what the engine read when it sampled it",
    ),
    "trl-4975": Piece(
        "TRL 4975",
        f"{_GITHUB}/huggingface/trl/pull/4975",
        "One of two loss paths ignores the mask of the environment's tokens: they are trained on, and nothing fails.",
        ("R507",),
        "a mask that counts a token that was not sampled stops the run, with the token and its author",
    ),
    "nemo-rl-4018": Piece(
        "NeMo RL 4018",
        f"{_GITHUB}/NVIDIA-NeMo/RL/pull/4018",
        "Weights are updated while the engine goes on, and its prefix cache stays: later requests with the same "
        "beginning are served keys and values of weights up to 17 steps old, and the mismatch grows from step to step.",
        ("R503", "R510"),
        "every sync empties the caches, and an interrupted completion is read again; the canary, which is the same prompt at "
        "every sync, would be served old keys first; a mismatch that grows is reported",
    ),
    "nccl-187": Piece(
        "NCCL 187 and DeepEP 316",
        f"{_GITHUB}/NVIDIA/nccl/issues/187",
        "Hosts are told apart by their names: ranks of two hosts of one name, or of names that begin alike, are taken for "
        "ranks of one, and try to map memory that is on the other.",
        ("C001", "C002"),
        "every rank shows a random token in memory; who can map it is on that host, and nobody else is taken for it",
    ),
}  # fmt: skip

# Their real counterparts need the engine itself; tests/rollout/vllm covers those.
NEED_VLLM = ("trl-5312", "vllm-42821", "vllm-tied-head", "nemo-rl-4018")

exhibited: dict[str, list[str]] = {}


def piece(name: str):
    """Marks a test as an exhibit of the piece of this name."""
    assert name in PIECES, name

    def mark(test):
        exhibited.setdefault(name, []).append(test.__name__)
        return test

    return mark


def summary(findings) -> set[tuple[str, int | None, str | None]]:
    return {(finding.code, finding.rank, finding.tensor) for finding in findings}


def findings_of(fn, *args, num_ranks: int = 2):
    """The findings that every rank returns, as (code, rank, tensor); the same list on each."""
    replies = run_ranks(num_ranks, fn, *args, timeout=90)
    assert all(reply == replies[0] for reply in replies), replies
    return summary(replies[0])
