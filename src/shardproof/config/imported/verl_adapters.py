"""The adapters of verl's models: keys of the model's section for FSDP, and a section `lora` for Megatron."""

from __future__ import annotations

from shardproof.config.imported.draft import Draft, Foreign

# Megatron's linear layers as the files of models name them.
_FUSED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}


def adapters(draft: Draft, foreign: Foreign, theirs: str, ours: str) -> None:
    """The adapters of a model, if it has a rank; verl looks at the section `lora` first."""
    if foreign.take(f"{theirs}.lora.rank", 0):
        _of_megatron(draft, foreign, f"{theirs}.lora", ours)
        return
    draft.skip(foreign, f"{theirs}.lora.*", "lora.rank is 0")
    begun = foreign.take(f"{theirs}.lora_adapter_path")
    draft.lack(
        foreign, f"{theirs}.lora_adapter_path", "adapters begin at zero: merge it into the model's weights"
    )
    if begun is not None and not foreign.take(f"{theirs}.lora_rank", 0):
        what = f"those of adapter_config.json in {theirs}.lora_adapter_path"
        for key, own in (("r", 16), ("alpha", 32), ("target_modules", "all-linear")):
            draft.ask(f"{ours}.{key}", own, what)
        return
    if not foreign.take(f"{theirs}.lora_rank", 0):
        for key in ("lora_alpha", "target_modules", "exclude_modules"):
            draft.skip(foreign, f"{theirs}.{key}", "the model has no adapters")
        return
    draft.put(f"{ours}.r", int(foreign.take(f"{theirs}.lora_rank")), f"{theirs}.lora_rank")
    draft.put(f"{ours}.alpha", int(foreign.take(f"{theirs}.lora_alpha", 16)), f"{theirs}.lora_alpha")
    modules = foreign.take(f"{theirs}.target_modules", "all-linear")
    draft.put(f"{ours}.target_modules", modules, f"{theirs}.target_modules")


def _of_megatron(draft: Draft, foreign: Foreign, theirs: str, ours: str) -> None:
    draft.put(f"{ours}.r", int(foreign.take(f"{theirs}.rank")), f"{theirs}.rank")
    draft.put(f"{ours}.alpha", int(foreign.take(f"{theirs}.alpha", 32)), f"{theirs}.alpha")
    named = foreign.take(f"{theirs}.target_modules", list(_FUSED))
    named = [named] if isinstance(named, str) else list(named)
    key = f"{ours}.target_modules"
    if set(_FUSED) <= set(named) or named == ["all-linear"]:
        draft.put(key, "all-linear", f"{theirs}.target_modules")
    elif set(named) <= _MODULES.keys():
        found = dict.fromkeys(part for name in named for part in _MODULES[name])
        draft.put(key, list(found), f"{theirs}.target_modules")
    else:
        draft.ask(key, "all-linear", f"{theirs}.target_modules={named}, by the names in the model's files")
    draft.lack(foreign, f"{theirs}.type", "adapters are plain LoRA", unless=("lora", "canonical_lora"))
    draft.lack(foreign, f"{theirs}.dropout", "adapters have no dropout", unless=(0, 0.0))
    draft.lack(foreign, f"{theirs}.exclude_modules", "name those that have adapters", unless=([],))
    draft.lack(foreign, f"{theirs}.adapter_path", "adapters begin at zero")
    draft.skip(foreign, f"{theirs}.*", "see model.lora and rollout.vllm.lora")
    for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
        draft.skip(foreign, f"{theirs.removesuffix('.lora')}.{name}", "the section lora says it")
