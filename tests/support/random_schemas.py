"""JSON schemas from a seed: types, enumerations, bounds, patterns, objects, arrays, alternatives and references.

Some of them cannot be held, or nothing follows them, as schemas of users may be.
"""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]
NAMES = ("name", "id", "größe", "a b", "items", 'quo"te', "n1", "value", "tags", "next")
PATTERNS = ("^[a-z]{1,8}$", "^(on|off)$", r"^\d{2,4}-\d{2}$", "ab+c", r"^[A-Z]\w*$", "^x.*y$", "[^0-9]{2}")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")
DEPTH = 3


def random_schema(seed: int) -> Schema:
    """Return one schema; every part of it is drawn with the seed."""
    rng = Random(seed)
    schema = _schema(rng, DEPTH, ())
    if rng.random() < 0.25:
        leaf, inner = _scalar(rng), _schema(rng, 1, ("leaf",))
        tree = {
            "type": "object",
            "properties": {
                "value": {"$ref": "#/$defs/leaf"},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        schema = {"type": "object", "properties": {"of": schema, "tree": {"$ref": "#/$defs/tree"}, "inner": inner}}
        schema |= {"required": ["of", "tree"], "additionalProperties": False, "$defs": {"leaf": leaf, "tree": tree}}
    return schema


def _schema(rng: Random, depth: int, names: tuple[str, ...]) -> Schema:
    if names and rng.random() < 0.15:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    if depth and rng.random() < 0.7:
        return rng.choice((_object, _object, _array, _alternatives))(rng, depth - 1, names)
    return rng.choice((_scalar, _scalar, _enumeration))(rng)


def _object(rng: Random, depth: int, names: tuple[str, ...]) -> Schema:
    chosen = rng.sample(NAMES, rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: _schema(rng, depth, names) for name in chosen}}
    if chosen:
        schema["required"] = rng.sample(chosen, rng.randint(0, len(chosen)))
    kind = rng.randrange(4)
    if kind < 2:
        schema["additionalProperties"] = False
    elif kind == 2:
        schema["additionalProperties"] = _scalar(rng)
    if rng.random() < 0.1:
        schema["patternProperties"] = {"^x_": _scalar(rng)}
    if rng.random() < 0.1:
        schema["maxProperties"] = rng.randint(1, 5)
    return schema


def _array(rng: Random, depth: int, names: tuple[str, ...]) -> Schema:
    schema: Schema = {"type": "array", "items": _schema(rng, depth, names)}
    least = rng.randint(0, 2)
    if rng.random() < 0.5:
        schema["minItems"] = least
    if rng.random() < 0.8:
        schema["maxItems"] = least + rng.randint(0, 3)
    if rng.random() < 0.15:
        schema["prefixItems"] = [_schema(rng, depth, names) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.05:
        schema["uniqueItems"] = True
    return schema


def _alternatives(rng: Random, depth: int, names: tuple[str, ...]) -> Schema:
    several = [_schema(rng, depth, names) for _ in range(rng.randint(1, 3))]
    kind = rng.choices(("anyOf", "oneOf", "allOf"), (8, 2, 2))[0]
    return {kind: several}


def _scalar(rng: Random) -> Schema:
    kind = rng.choice(("string", "pattern", "format", "integer", "number", "boolean", "null", "several"))
    if kind == "several":
        return {"type": rng.sample(["string", "integer", "boolean", "null"], 2)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == "format":
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind == "string":
        least = rng.randint(0, 4)
        bounds = {"minLength": least, "maxLength": least + rng.randint(0, 12)}
        return {"type": "string"} | {name: value for name, value in bounds.items() if rng.random() < 0.6}
    return {"type": kind} | _bounds(rng, kind == "integer")


def _bounds(rng: Random, whole: bool) -> Schema:
    schema: Schema = {}
    low = rng.randint(-1000, 1000) if whole else round(rng.uniform(-100, 100), rng.randint(0, 3))
    high = low + (rng.randint(0, 500) if whole else round(rng.uniform(0.5, 50), 2))
    if rng.random() < 0.5:
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.5:
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = high
    if whole and rng.random() < 0.2:
        schema["multipleOf"] = rng.choice((2, 5, 7, 10))
    return schema


def _enumeration(rng: Random) -> Schema:
    values = ["red", "größer", "", 'a"b', 0, -3, 2.5, None, True, [], [1, "x"], {"k": 1}, "line\nbreak"]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 4))}
