"""A taskset with a tool for verifiers: the price can only be looked up."""

import verifiers.v1 as vf

__all__ = ["ShopTaskset"]


class Prices(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, item: str) -> str:
        """The price of an item.

        Args:
            item: what is sold
        """
        return str(len(item) * 10)


class ShopConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class ShopData(vf.TaskData):
    answer: str


class ShopTask(vf.Task[ShopData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float((trace.messages[-1].content or "").strip() == task.answer)


class ShopTaskset(vf.Taskset[ShopTask, ShopConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Prices(config.tools)]

    def load(self):
        for item in ("pear", "melon", "fig"):
            yield ShopTask(
                ShopData(prompt=f"What is the price of a {item}?", answer=str(len(item) * 10)),
                self.config.task,
            )


if __name__ == "__main__":
    Prices.run()
