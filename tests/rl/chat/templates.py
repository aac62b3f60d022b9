"""Chat templates of our own that behave as those of model families do, and small tokenizers for them."""

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

SPECIAL = (
    "<s>",
    "</s>",
    "<|end|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<|eom|>",
    "<|python_tag|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "<turn>",
    "</turn>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|call|>",
    "<|return|>",
    "[THINK]",
    "[/THINK]",
)
CORPUS = [
    "the weather in Paris is fine today, and tomorrow it will rain\n\nassistant user system tool",
    '{"name": "weather", "arguments": {"place": "Rome", "days": 3}}\n',
    "<think>\nlet me think about it\n</think>\n\nanswer number 1",
    "<tool_call>\n<function=weather>\n<parameter=place>\nRome\n</parameter>\n</function>\n</tool_call>",
    "0123456789 \u00e4\u00f6\u00fc \u4f60\u597d \U0001f600",
] * 3


@cache
def byte_level() -> Tokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    return inner


@cache
def with_spaces() -> Tokenizer:
    """Words begin with a space sign, and so does a text, as in SentencePiece's vocabularies; unknown bytes have tokens."""
    letters = sorted({letter for text in CORPUS for letter in text.replace(" ", "\u2581")} | {"\u2581"})
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {letter: 256 + n for n, letter in enumerate(letters)}
    for pair in ("\u2581t", "\u2581a", "th"):
        vocab[pair] = len(vocab)
    merges = [("\u2581", "t"), ("\u2581", "a"), ("t", "h")]
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return inner


def make_tokenizer(template, kind="bytes", eos="</s>", rstrip=()):
    """A tokenizer with a chat template; tokens named in `rstrip` take the spaces behind them with them."""
    if kind == "slow":
        tokenizer = Letters(eos_token=eos, bos_token="<s>")
        tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    else:
        text = (byte_level() if kind == "bytes" else with_spaces()).to_str()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(text), bos_token="<s>", eos_token=eos
        )
        added = [AddedToken(each, special=True, normalized=False, rstrip=each in rstrip) for each in SPECIAL]
        tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


class Letters(PreTrainedTokenizer):
    """A token for each character, in Python: such tokenizers do not tell which characters a token stands for."""

    vocab_size = 3000

    def get_vocab(self):
        return {chr(n): n for n in range(self.vocab_size)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return min(ord(token), self.vocab_size - 1)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


_NEXT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TOOLS = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _NEXT

HERMES = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{% if not loop.first or m.content %}{{ '\\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}" + _NEXT
)

# Thoughts stay only behind the last message of the user, as reasoning models' templates have it.
FORGETFUL = (
    _TOOLS + "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set content = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if thought and loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
    "{% for c in m.tool_calls or [] %}"
    "{% if not loop.first or content %}{{ '\\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + _NEXT
)

# The prompt of a turn opens the thought; earlier turns are shown without it.
OPENED = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|im_start|>assistant\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

HEADERS = (
    "<s>{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call in a turn') }}{% endif %}"
    "<|head|>assistant<|/head|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eom|>'
    "{% elif m.role == 'tool' %}<|head|>ipython<|/head|>\n\n{{ m.content | tojson }}<|eot|>"
    "{% else %}<|head|>{{ m.role }}<|/head|>\n\n"
    "{% if tools and loop.first %}Tools: {{ tools | tojson }}\n{% endif %}{{ m.content | trim }}<|eot|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)

# Roles alternate, ids of calls have nine letters, and the tools stand before the last message of the user.
INSTRUCT = (
    "<s>{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}Tools: {{ tools | tojson }}{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}{{ raise_exception('no system messages') }}"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)

ARGS = (
    "<s>{% if tools %}Tools: {{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}{{ m.content }}{% for c in m.tool_calls %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)

TURNS = (
    "<s>{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)

# The system's text moves to the last message of the user.
MOVING = (
    "{% set ns = namespace(last=-1, system='') %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n' %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if loop.index0 == ns.last %}{{ ns.system }}{% endif %}{{ m.content | trim }}<|im_end|>\n"
    "{% endif %}{% endfor %}" + _NEXT
)

REFUSING = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('tools are not supported') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _NEXT
)

SILENT = (  # leaves out what it does not know
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + _NEXT
)

# A turn has no end of its own: the model stops with the token that begins the next message.
UNENDED = (
    "<s>{% if tools %}Tools: {{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]\n{{ m.content }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]\n{{ m.content }}"
    "{% else %}<turn>\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<turn>\n{% endif %}"
)

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

PLAIN = (  # no special tokens at all
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

XML = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>\n<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n' }}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}" + _NEXT
)

GLM = (
    _TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>observation\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n' }}<tool_call>{{ c.function.name }}\n"
    "{% for key, value in c.function.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}" + _NEXT
)

# Arguments are JSON text here, and the calls' marks are special tokens.
DEEP = (
    "<s>{% if tools %}Tools: {{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>tool\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}<\uff5ctool\u2581calls\u2581begin\uff5c>{% for c in m.tool_calls %}"
    "<\uff5ctool\u2581call\u2581begin\uff5c>{{ c.function.name }}<\uff5ctool\u2581sep\uff5c>"
    "{{ '' + c.function.arguments }}<\uff5ctool\u2581call\u2581end\uff5c>{% endfor %}"
    "<\uff5ctool\u2581calls\u2581end\uff5c>{% endif %}<|im_end|>\n{% endif %}{% endfor %}" + _NEXT
)

CHANNELS = (
    "{% if tools %}<|start|>developer<|message|>Tools: {{ tools | tojson }}<|end|>{% endif %}"
    "{% set ns = namespace(name='') %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if not ns.name %}{{ raise_exception('a tool answers a call') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% set ns.name = m.tool_calls[0].function.name %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ ns.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def tool(name="weather"):
    """A tool's schema, as templates take it."""
    properties = {
        "place": {"type": "string", "description": "Where."},
        "days": {"type": "integer", "description": "How many."},
        "exact": {"type": "boolean", "description": "Whether."},
        "parts": {"type": "array", "description": "Which."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["place"]}
    function = {"name": name, "description": "Tells the weather.", "parameters": parameters}
    return {"type": "function", "function": function}


def as_json(value):
    return json.dumps(value, ensure_ascii=False)
