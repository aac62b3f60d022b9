"""An environment: a wrong answer is asked for again."""

from shardproof import Environment, Reply


class SecondTry(Environment):
    def start(self, row, seed):
        """Begin a conversation about a data row, with the row's own prompt."""
        self.row = row

    def step(self, turn):
        """Answer the model's turn: it is over, or the model reads the question once more."""
        is_right = turn.text.strip() == str(self.row["answer"])
        return Reply(f"\n{self.row['prompt']}", reward=float(is_right), done=is_right)
