"""An environment: a wrong answer is asked for again."""


class SecondTry:
    def reply(self, row, turns):
        """What follows the policy's last turn, and the policy reads next; None: the conversation is over."""
        if turns[-1].strip() == str(row["answer"]):
            return None
        return f"\n{row['prompt']}"
