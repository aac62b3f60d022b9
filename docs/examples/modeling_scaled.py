"""A model family: Llama with a learned scale on what each block adds."""

import torch
from transformers.models.llama import modeling_llama as llama


class ScaledConfig(llama.LlamaConfig):
    model_type = "scaled_llama"


class ScaledBlock(llama.LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.scale = torch.nn.Parameter(torch.full((config.hidden_size,), 0.5))

    def forward(self, hidden_states, *args, **kwargs):
        return torch.lerp(hidden_states, super().forward(hidden_states, *args, **kwargs), self.scale)


class ScaledModel(llama.LlamaModel):
    _no_split_modules = ("ScaledBlock",)  # one FSDP unit each

    def __init__(self, config):
        super().__init__(config)
        self.layers = torch.nn.ModuleList(ScaledBlock(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, ScaledBlock):
            torch.nn.init.constant_(module.scale, 0.5)


class ScaledForCausalLM(llama.LlamaForCausalLM):
    config_class = ScaledConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = ScaledModel(config)
        self.post_init()
