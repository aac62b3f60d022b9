"""Findings: what a check found, with its code, rank, tensor and fix."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardproof.text import printable

# Every code the project can report: a title for docs/faults.md and the remedy that closes each message.
CODES: dict[str, tuple[str, str]] = {
    "C001": ("a setting has an unknown or invalid value", "use one of the values that the message lists"),
    "C002": ("the process group or mesh does not match the run", "start with `shardproof train` or torchrun, and use a mesh that holds every rank"),
    "C003": ("ranks were started with different settings", "pass the same arguments on every rank"),
    "C004": ("a batch is invalid", "repair the batch as the message says"),
    "C005": ("the data set is invalid", "repair the data set as the message says"),
    "C006": ("the output folder belongs to another run or cannot be used", "use another output.folder, or the recipe that started this run"),
    "C007": ("this machine cannot run the recipe", "install or free what the message names, or change the setting"),
    "L100": ("a rank raised an unexpected error", "read the error of the named rank"),
    "L101": ("the model was not found", "pass a folder or a hub id that holds safetensors files"),
    "L102": ("a checkpoint file is missing", "download the checkpoint again, or correct its index file"),
    "L103": ("a checkpoint file is truncated or corrupt", "download the file again and compare its checksum"),
    "L104": ("the checkpoint lacks a tensor that the model needs", "load the checkpoint that belongs to this config"),
    "L105": ("the checkpoint has a tensor that the model does not have", "load it with the config it was saved with"),
    "L106": ("a checkpoint tensor has the wrong shape or dtype for the model", "load it with the config it was saved with"),
    "L107": ("the checkpoint is a pickle file", "convert it to safetensors: AutoModelForCausalLM.from_pretrained(src).save_pretrained(dst)"),
    "L108": ("the model needs code from its own repository", "read that code, then pass trust_remote_code=True"),
    "L109": ("the checkpoint is quantized", "load an unquantized checkpoint; quantized training is not supported yet"),
    "L110": ("a checkpoint file links to a place outside its folder", "do not use it, or copy the linked files into the folder"),
    "L111": ("ranks see different checkpoints", "give every node the same files"),
    "L112": ("the config ties two tensors whose values differ in the checkpoint",
             "set tie_word_embeddings=false in config.json if they should differ"),
    "L113": ("a LoRA variant is not supported", "use plain LoRA on linear or embedding layers"),
    "L114": ("the model cannot be built from its config", "check model_type in config.json against the installed transformers version"),
    "L115": ("a tensor is missing from the checkpoint and the model does not initialise it", "initialise it in the model's _init_weights"),
    "S201": ("part of a tensor was never written", "report this as a bug: the loader did not reach every element"),
    "S202": ("an element was written twice", "report this as a bug: two sources wrote the same element"),
    "S203": ("tied tensors do not share storage", "tie before sharding, and build the optimizer after load"),
    "S204": ("a buffer could not be recomputed", "initialise it in the model's _init_weights, or register it as persistent"),
    "S205": ("a tensor holds NaN or Inf", "reload it; if the checkpoint itself holds it, repair the checkpoint"),
    "S206": ("a tensor looks uninitialised", "load weights into it before the first forward pass"),
    "S207": ("a replicated tensor differs between ranks", "load or broadcast it again, comparing dtype and shape first"),
    "S208": ("a replicated tensor has another dtype or shape on some rank", "do not cast modules; cast parameters only"),
    "S209": ("a buffer differs from what its module computes", "recompute it: model.initialize_weights() after materialising"),
    "S210": ("a tensor is still on the meta device", "materialise it before use"),
    "S211": ("a trainable parameter is in no optimizer group", "build the optimizer after load, from module.parameters()"),
    "S212": ("an optimizer holds a parameter that is not in the model", "build the optimizer after load"),
    "S213": ("ranks hold different sets of tensors", "build the same model on every rank"),
    "S214": ("a combination of settings cannot be sharded", "change one of the settings named"),
    "S215": ("the model is offloaded, and the call needs its weights on the device", "call onload() first"),
    "T300": ("a rank raised an unexpected error in a training step", "read the error of the named rank"),
    "T301": ("a log-prob or value is not finite", "attest the model and look at the named sequence"),
    "T302": ("too many consecutive steps were skipped", "look at the named tensor; lower the learning rate or correct the data"),
    "T303": ("this model's attention does not support packed or sequence-parallel input", "load the model with sequence_parallel=1"),
    "T304": ("scores differ from those of a single process", "attest the model; compare layouts with `shardproof doctor --matrix`"),
    "T306": ("ranks report different metrics", "return the same metrics from the loss on every rank"),
    "T308": ("a rank or a host was lost, or too slow", "read that rank's log; raise deadline_s if it was only slow"),
    "T309": ("an optimizer failed on a rank", "free memory on the named rank, or shard over more ranks"),
    "E400": ("a rank raised an unexpected error while saving, exporting or resuming", "read the error of the named rank"),
    "E401": ("an offloaded parameter was moved", "do not move a module whose parameters FSDP offloads"),
    "E402": ("an exported tensor holds NaN or Inf", "attest the model; pass allow_nonfinite=True to export it anyway"),
    "E403": ("a rank stopped reading the weight stream before its end", "iterate the stream to its end on every rank"),
    "E404": ("the received weights differ from those that were sent", "send them again; compare the manifests of both sides"),
    "E405": ("the model was updated, but the exported weights did not change", "check that the trained tensors are the exported ones"),
    "E406": ("a rank was lost or too slow during an export", "read that rank's log; raise deadline_s if it was only slow"),
    "E407": ("a checkpoint cannot be resumed", "resume from a complete checkpoint of this model"),
    "E408": ("a checkpoint could not be written", "free disk space or correct the folder's permissions; the previous checkpoint is untouched"),
    "E409": ("a checkpoint tries to run code", "do not use this checkpoint"),
    "E410": ("the frozen base under the adapters changed", "resume from the last checkpoint; nothing may write to the base's weights"),
    "R500": ("a rank raised an unexpected error during generation", "read the error of the named rank"),
    "R501": ("the engine has no weights, or weights that are too old", "call load_weights before generate"),
    "R502": ("the engine did not receive all weights", "send them again; the message names the tensor"),
    "R503": ("the engine and the trainer compute different log-probs for the same tokens",
             "compare their weights; see the canary's numbers in the message"),
    "R504": ("a reward function failed", "read the reward's error; set reward.on_error=zero to continue without the failed samples"),
    "R505": ("the vLLM server stopped, timed out or refused a request", "read the server's log; raise rollout.vllm's timeouts if it was only slow"),
    "R506": ("the vLLM server does not match the run", "start it as docs/vllm.md shows, or let the run start it"),
    "R507": ("a trained token is not the token that was sampled", "do not train on this batch; the message names trajectory, turn and token"),
    "R508": ("the chat template rewrites earlier turns", "set environment.on_rewrite to split or keep; see docs/token-ledger.md"),
    "R509": ("an environment failed", "read the environment's error; set environment.on_error=zero to continue without the failed conversations"),
    "R510": ("the engine's and the trainer's log-probs of sampled tokens drift apart",
             "lower rollout.ahead or the learning rate, or use algorithm.correction=mis or icepop"),
    "R511": ("recorded experts do not belong to the tokens that are trained on", "do not train on this batch; the message names trajectory, layer and token"),
    "R512": ("engine and trainer compute different log-probs in exact mode",
             "resume from the last checkpoint; if it happens again, set rollout.exact=false and report the model's config"),
    "R513": ("a model beside the policy has another vocabulary", "use a teacher that has the policy's tokenizer"),
    "R514": ("the teacher's server stopped, timed out or refused a request", "read the server's log; raise teacher.timeout_s or teacher.retries if it was only slow"),
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
