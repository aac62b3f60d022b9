"""A worker whose loader of experts can be broken: it writes one expert's part twice and another's never."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info

from shardproof.rollout.vllm_transport import WorkerExtension


class FaultyExtension(WorkerExtension):
    """Our workers' extension, and a way to break what it must find."""

    def break_expert_loader(self) -> dict[str, Any]:
        """Send what belongs to expert 2 of the first layer to expert 1; every element still counts once."""
        for name, module in self.weight_transfer_engine.model.named_modules():
            param = get_layerwise_info(module).restore_metadata[0].get("w13_weight")
            if param is None:
                continue
            plain = _get_original_loader(param).__func__  # it may be bound to a stand-in of its layer

            def faulty(
                param: Any,
                loaded_weight: Any,
                weight_name: str,
                shard_id: str,
                expert_id: int,
                return_success: bool = False,
                layer: Any = module,
                plain: Any = plain,
            ) -> Any:
                expert = 1 if expert_id == 2 else expert_id
                return plain(layer, param, loaded_weight, weight_name, shard_id, expert, return_success)

            param.weight_loader = faulty
            return {"parameter": f"{name}.w13_weight"}
        raise LookupError("no experts")
