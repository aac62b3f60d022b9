"""Values as YAML has them, with the numbers and the tables of Hydra's command line."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_EXPONENT = re.compile(r"[-+]?(\d[\d_]*\.?|\.\d)[\d_]*[eE][-+]?\d+")  # 1e-6, which YAML 1.1 takes for text
_KEY = re.compile(r"""([{,]\s*(?:"[^"]*"|'[^']*'|[\w.@/+-]+)):(?=[^\s/]|/[^/])""")


@cache
def _loader() -> Any:
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Reads no more than plain values."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
    return Loader


def load_yaml(text: str) -> Any:
    """The value of a text; raises a ValueError if it is no YAML."""
    import yaml

    try:
        return yaml.load(text, _loader())  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def load_argument(text: str) -> Any:
    """The value of an argument: as YAML, where Hydra's tables need no space, as in {thinking:false}; else the text."""
    is_table = text.lstrip()[:1] in ("{", "[")
    try:
        return load_yaml(_KEY.sub(r"\1: ", text) if is_table else text)
    except ValueError:
        return text
