"""The bounds of the numbers in a recipe. Free of pydantic, so that settings can be declared where it is not installed.

Upper bounds catch typing errors before they become allocations that no machine has.
"""

from __future__ import annotations

from typing import Annotated, Any


class Bound:
    """What a number is compared with: gt, ge, lt, le. Pydantic asks the annotation for its schema."""

    def __init__(self, **limits: float):
        self.limits = limits

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(_no_switch, {**handler(kind), **self.limits})


def _no_switch(value: Any) -> Any:
    """Python takes true and false for 1 and 0: a switch in the place of a number would silently be a weight or a length."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, not {str(value).lower()}; remove the key for its default")
    return value


MAX_STEPS, MAX_TOKENS = 10**9, 2**30
Count = Annotated[int, Bound(gt=0, le=2**20)]
CountOrNone = Annotated[int, Bound(ge=0, le=2**20)]  # 0: none
Steps = Annotated[int, Bound(gt=0, le=MAX_STEPS)]
StepsOrNever = Annotated[int, Bound(ge=0, le=MAX_STEPS)]  # 0: never
Tokens = Annotated[int, Bound(gt=0, le=MAX_TOKENS)]
Processes = Annotated[int, Bound(gt=0, le=1024)]  # on one node
Port = Annotated[int, Bound(ge=0, lt=65536)]  # 0: a free one
Seconds = Annotated[float, Bound(gt=0.0, le=30 * 86400.0)]
Fraction = Annotated[float, Bound(ge=0.0, le=1.0)]
Part = Annotated[float, Bound(gt=0.0, le=1.0)]
Share = Annotated[float, Bound(gt=0.0, lt=1.0)]
Decay = Annotated[float, Bound(ge=0.0, lt=1.0)]  # of a running mean; 0: no memory
Limit = Annotated[float, Bound(gt=0.0, le=1e6)]  # what something is cut off at: 0 would leave nothing
Coefficient = Annotated[float, Bound(ge=0.0, le=1e3)]  # 0: the term is left out
Epsilon = Annotated[float, Bound(ge=0.0, le=1.0)]  # what keeps a divisor from 0
LearningRate = Annotated[float, Bound(gt=0.0, le=10.0)]
