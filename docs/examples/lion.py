"""An optimizer: Lion. It works element by element, so it need not know how parameters are sharded."""

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, groups, lr, betas=(0.9, 0.99), cautious=False):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "betas": betas, "cautious": cautious})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                update = momentum.lerp(param.grad, 1 - first).sign_()
                if group["cautious"]:
                    update *= update * param.grad > 0
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                momentum.lerp_(param.grad, 1 - second)
