"""A reward: the right answer, and better in fewer words."""


def concise(prompt, completion, row):
    """1 for the row's answer alone, less 0.1 for each further word; 0 without the answer."""
    words = completion.split()
    if str(row["answer"]) not in words:
        return 0.0
    return max(0.0, 1.0 - 0.1 * (len(words) - 1))
