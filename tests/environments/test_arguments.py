"""Arguments against JSON schemas: what fits, what does not, and schemas that others wrote badly."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardproof.environments.arguments import as_declared, example, problems

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, **more}


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        ({"type": "integer"}, [1, 0, -(10**30)], [1.0, True, "1", None, [], {}]),
        ({"type": "number"}, [1, 1.5, float("inf")], [True, "1", None]),
        ({"type": "boolean"}, [True], [1, 0, "true", None]),
        ({"type": ["string", "null"]}, ["x", None], [1]),
        ({"type": "string", "nullable": True}, ["x", None], [1]),
        ({"type": "string", "minLength": 1, "maxLength": 3}, ["abc"], ["", "abcd"]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [[], [1, 2]], [[1, "2"], [1, 2, 3], "12"]),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [[1, "a"]], [["a", 1]]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"b": 1}], [{"b": "1"}]),
        ({"type": "object"}, [{"anything": [1]}], [[1]]),
        ({"enum": [1, "a", None]}, [1, "a", None], [True, 1.0, "b"]),
        ({"const": 3}, [3], [3.0, 4]),
        ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]}, [1, ["a"]], ["a", [1]]),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3], [2, "3"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1], [0, 1.5, float("nan")]),
        ({"$ref": "#/$defs/point"}, [{"x": 1}], [{"x": "1"}, {}, {"x": 1, "y": 2}]),
        ({}, [1, "a", None, [1], {"b": 2}], []),
        (True, [1, None], []),
    ],
)  # fmt: skip
def test_values_are_compared_with_their_schema(schema, fits, fails):
    parameters = of(schema, **{"$defs": {"point": POINT}})
    for value in fits:
        assert problems(parameters, {"a": value}) == [], value
    for value in fails:
        assert problems(parameters, {"a": value}) != [], value


def test_integers_become_floats_where_a_number_is_meant_and_nothing_else_changes():
    parameters = {"properties": {"a": {"type": "number"}, "b": {"type": "integer"}}}
    given = {"a": 2, "b": 2}
    made = as_declared(parameters, given)
    assert made == {"a": 2.0, "b": 2} and type(made["a"]) is float and type(made["b"]) is int
    assert type(given["a"]) is int and as_declared(parameters, {"a": 10**400})["a"] == 10**400


def test_an_endless_schema_ends():
    schema = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    assert isinstance(problems(of({"$ref": "#/$defs/a"}, **{"$defs": {"a": schema}}), {"a": 1}), list)
    loop = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    assert problems(of({"$ref": "#/$defs/a"}, **{"$defs": loop}), {"a": 1}) == []
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert problems(of({"type": "array"}), {"a": deep}) == []


def test_no_schema_and_no_value_raises():
    draw = random.Random(0)
    keys = [
        "type",
        "properties",
        "required",
        "enum",
        "items",
        "anyOf",
        "allOf",
        "const",
        "minimum",
        "maxLength",
    ]
    keys += ["additionalProperties", "prefixItems", "$ref", "nullable", "minItems", "a", "b"]
    plain = [
        None,
        True,
        0,
        1.5,
        -1,
        "",
        "integer",
        "object",
        "array",
        "#/$defs/a",
        "#/properties/a",
        "a",
        "\ud800",
    ]

    def anything(depth: int) -> Any:
        kind = draw.random()
        if depth == 0 or kind < 0.3:
            return draw.choice(plain)
        if kind < 0.5:
            return [anything(depth - 1) for _ in range(draw.randrange(4))]
        return {draw.choice(keys): anything(depth - 1) for _ in range(draw.randrange(5))}

    for _ in range(3000):
        parameters = {draw.choice(keys): anything(4) for _ in range(draw.randrange(6))}
        arguments = {draw.choice(keys): anything(3) for _ in range(draw.randrange(4))}
        assert all(isinstance(each, str) for each in problems(parameters, arguments))
        assert isinstance(example(parameters), dict)
