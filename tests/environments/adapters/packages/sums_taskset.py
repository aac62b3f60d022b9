"""A taskset for verifiers, as users write them: one question, one answer, a reward and a metric."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsConfig(vf.TasksetConfig):
    size: int = 6
    start: int = 0
    broken: bool = False  # raise in the setup of the last task, and in the scoring of the one before


class SumsData(vf.TaskData):
    answer: str
    broken: str = ""


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    async def setup(self, trace, runtime):
        if self.data.broken == "setup":
            raise RuntimeError("no luck in setup")

    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        if self.data.broken == "score":
            raise RuntimeError("no luck in scoring")
        return float((trace.messages[-1].content or "").strip() == task.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.messages[-1].content or ""))


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        end = self.config.start + self.config.size
        breaks = {end - 1: "setup", end - 2: "score"} if self.config.broken else {}
        for number in range(self.config.start, end):
            data = SumsData(
                prompt=f"{number}+1=",
                system_prompt="Add.",
                answer=str(number + 1),
                broken=breaks.get(number, ""),
            )
            yield SumsTask(data, self.config.task)
