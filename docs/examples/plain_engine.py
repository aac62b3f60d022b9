"""An engine: a plain transformers model on every rank, one completion at a time."""

import torch
from transformers import AutoModelForCausalLM

from shardproof.rollout.queue import BatchEngine


class PlainEngine(BatchEngine):
    canary_gap = None  # the loop compares log-probs with the policy's after each sync
    version = -1

    def __init__(self, policy, rollout):
        super().__init__(rollout.batch_size)
        self.model = AutoModelForCausalLM.from_config(policy.model.config, dtype=torch.float32)

    def load_weights(self, stream):
        weights = {name: tensor.float().clone() for name, tensor in stream}
        self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()
        self.version = stream.receipt.version
        return stream.receipt

    @torch.no_grad()
    def complete(self, requests, sampling):
        return [self.answer(request, sampling) for request in requests]

    def answer(self, request, sampling):
        generator, drawn, logprobs = torch.Generator().manual_seed(request.seed), [], []
        while len(drawn) < request.limit(sampling) and not (drawn and drawn[-1] in sampling.stop_ids):
            tokens = torch.tensor([[*request.tokens, *drawn]])
            logps = (self.model(tokens).logits[0, -1] / (sampling.temperature or 1e-6)).log_softmax(0)
            drawn.append(int(torch.multinomial(logps.exp(), 1, generator=generator)))
            logprobs.append(float(logps[drawn[-1]]))
        return request.answered(drawn, logprobs, drawn[-1] in sampling.stop_ids, self.version)

    def sleep(self): ...
    def wake(self): ...
    def close(self): ...
