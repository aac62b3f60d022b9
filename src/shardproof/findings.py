"""Findings: what a check found, with its code, rank, tensor and fix."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardproof.text import printable

# Every code the project can report: a title for docs/faults.md and the remedy that closes each message.
CODES: dict[str, tuple[str, str]] = {
    "C001": ("a setting has an unknown or impossible value", "use one of the values listed"),
    "C002": ("the process group or mesh does not fit the run", "start the ranks with torchrun, or pass a mesh of them all"),
    "C003": ("ranks were started with different settings", "pass the same arguments on every rank"),
    "C004": ("a batch cannot be used", "repair the batch as the message says"),
    "C005": ("the data cannot be used", "repair the data set as the message says"),
    "C006": ("a run folder cannot be this run's", "use another output.folder, or the recipe that began this one"),
    "C007": ("this machine cannot run the recipe", "provide what the message names, or change the setting"),
    "L100": ("a rank failed with an error of its own", "see the named rank's error"),
    "L101": ("the source does not exist", "pass a folder or a hub id that holds safetensors files"),
    "L102": ("a checkpoint file is missing", "download the checkpoint again, or repair its index"),
    "L103": ("a checkpoint file is truncated or corrupt", "download the file again and compare its checksum"),
    "L104": ("a tensor that the model needs is not in the checkpoint", "load the checkpoint that belongs to this config"),
    "L105": ("the checkpoint has a tensor that the model has no place for", "load it with the config it was saved with"),
    "L106": ("a checkpoint tensor has another shape or kind of number than the model", "load it with the config it was saved with"),
    "L107": ("the checkpoint is pickled", "convert it: AutoModelForCausalLM.from_pretrained(src).save_pretrained(dst)"),
    "L108": ("the model needs code from its own repository", "read that code, then pass trust_remote_code=True"),
    "L109": ("the checkpoint is quantized", "load an unquantized checkpoint; quantized training is not supported yet"),
    "L110": ("a file of the checkpoint lies outside its folder", "do not use it, or copy what its links lead to into the folder"),
    "L111": ("ranks see different checkpoints", "give every node the same files"),
    "L112": ("the config ties two tensors that the checkpoint has with different values",
             "set tie_word_embeddings=false in config.json if they are meant to differ"),
    "L113": ("a LoRA variant is not supported", "use plain LoRA on linear or embedding layers"),
    "L114": ("a family cannot be built", "check model_type in config.json against the installed transformers"),
    "L115": ("nothing initialises a tensor that the checkpoint does not have", "initialise it in the model's _init_weights"),
    "S201": ("memory that nobody wrote", "report this: the loader did not reach every element"),
    "S202": ("an element was written twice", "report this: two writers claim the same element"),
    "S203": ("tied tensors do not share storage", "tie before sharding, and build the optimizer after load"),
    "S204": ("a buffer could not be recomputed", "initialise it in the model's _init_weights, or register it as persistent"),
    "S205": ("a tensor holds NaN or Inf", "reload it; if the checkpoint itself holds it, repair the checkpoint"),
    "S206": ("a tensor looks uninitialised", "load weights into it before the first forward"),
    "S207": ("a replicated tensor differs between ranks", "load or broadcast it again, comparing dtype and shape first"),
    "S208": ("a replicated tensor has another dtype or shape on some rank", "do not cast modules; cast parameters only"),
    "S209": ("a buffer differs from what its module computes", "recompute it: model.initialize_weights() after materialising"),
    "S210": ("a tensor is still on the meta device", "materialise it before use"),
    "S211": ("a trainable parameter is in no optimizer group", "build the optimizer after load, from module.parameters()"),
    "S212": ("an optimizer holds a parameter that is not in the model", "build the optimizer after load"),
    "S213": ("ranks hold different tensors", "build the same model on every rank"),
    "S214": ("a combination of settings cannot be sharded", "change one of the settings named"),
    "S215": ("an offloaded model is asked for something that needs its weights on the device", "call onload() first"),
    "T300": ("a rank failed with an error of its own in a step", "see the named rank's error"),
    "T301": ("a log-prob or value is not finite", "attest the model and look at the named sequence"),
    "T302": ("steps keep being skipped", "look at the named tensor; lower the learning rate or repair the data"),
    "T303": ("attention is asked for something that the packed path does not have", "load the model with sequence_parallel=1"),
    "T304": ("scores differ from a single process", "attest the model; compare layouts with doctor --matrix"),
    "T306": ("ranks report different metrics", "return the same metrics from the loss on every rank"),
    "T308": ("a rank was lost or late", "look at that rank's own log; raise deadline_s if it was only slow"),
    "T309": ("an optimizer failed on a rank", "free memory on the named rank, or shard over more ranks"),
    "E400": ("a rank failed with an error of its own while it wrote, sent or read back", "see the named rank's error"),
    "E401": ("a parameter is not where it was put", "do not move a module whose parameters FSDP offloads"),
    "E402": ("an exported tensor is not finite", "attest the model; pass allow_nonfinite=True to export it all the same"),
    "E403": ("a consumer stopped in the middle of a stream", "let every rank iterate the stream to its end"),
    "E404": ("what was received is not what was sent", "send it again; compare the manifests on both sides"),
    "E405": ("the payload did not change although the model did", "see that the trained tensors are the exported ones"),
    "E406": ("a rank was lost or late during an export", "look at that rank's own log; raise deadline_s"),
    "E407": ("a checkpoint cannot be resumed", "resume from a complete checkpoint of this model"),
    "E408": ("a checkpoint could not be written", "free space or repair the folder; the previous checkpoint is untouched"),
    "E409": ("a checkpoint wants to run code", "do not use this checkpoint"),
    "R500": ("a rank failed with an error of its own in a rollout", "see the named rank's error"),
    "R501": ("an engine has no weights, or older ones than allowed", "call load_weights before generate"),
    "R502": ("weights did not arrive whole", "send them again; see which tensor the message names"),
    "R503": ("engine and trainer disagree about the same tokens", "compare their weights; see the canary's numbers"),
    "R504": ("a reward failed", "see the reward's own error; set reward.on_error to zero to go on without single samples"),
    "R505": ("a vLLM server is gone, late, or refuses", "look at the server's log; raise rollout.vllm's timeouts if it was only slow"),
    "R506": ("a vLLM server does not fit the run", "start it as docs/vllm.md shows, or let the run start it"),
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where, what was expected, what was found."""

    code: str
    stage: str
    message: str
    rank: int | None = None
    tensor: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        where = f"rank {self.rank}: " if self.rank is not None else ""
        fix = self.fix or CODES[self.code][1]
        text = f"{self.code} {self.stage}: {where}{self.message}\nFix: {fix}; see docs/faults.md#{self.code.lower()}"
        return printable(text)  # names and values in it may come from untrusted files

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Finding:
        return cls(**data)


def merge_findings(per_rank: list[list[Finding]]) -> list[Finding]:
    """One list from every rank's list: equal findings once, in rank order."""
    seen: dict[Finding, None] = {}
    for findings in per_rank:
        for finding in findings:
            seen.setdefault(finding)
    return list(seen)
