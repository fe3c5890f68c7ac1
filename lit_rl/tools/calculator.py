"""A calculator: arithmetic expressions, nothing else.

Expressions are parsed with `ast` and walked; no name, attribute or call other than the listed functions is ever
evaluated. Sizes are bounded, so that ``9**9**9`` is refused and does not stall the worker.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from lit_rl.tools.base_tool import BaseTool
from lit_rl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_MAX_CHARS = 500
_MAX_DIGITS = 1000
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "log10": math.log10,
    "max": max,
    "min": min,
    "round": round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator(BaseTool):
    """Evaluates one arithmetic expression per call."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema: ``calculator(expression: string)``."""
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "calculator",
                    "description": "Evaluate an arithmetic expression.",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "expression": {"type": "string", "description": "Such as (3 + 4) * 2 ** 5 or sqrt(2)."}
                        },
                        "required": ["expression"],
                    },
                },
            }
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return the value as text, or what is wrong with the expression."""
        try:
            return ToolResponse(text=_as_text(evaluate(parameters["expression"]))), 0.0, {}
        except (ValueError, ArithmeticError, TypeError) as error:
            return ToolResponse(text=f"Error: {error}"), 0.0, {"is_error": True}


def evaluate(expression: str) -> int | float:
    """Return the value of an arithmetic expression.

    Allowed are numbers, ``+ - * / // % **`` (also ``^``, ``×``, ``÷``), parentheses, ``pi``, ``e`` and the usual
    functions.

    Raises:
        ValueError: For anything else, and for numbers of more than a thousand digits.
        ArithmeticError: For division by zero and overflow.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression is longer than {_MAX_CHARS} characters")
    text = expression.replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-").strip()
    try:
        tree = ast.parse(text, mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression[:80]!r} is no arithmetic expression") from error


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords:
            raise ValueError("functions take no named arguments here")
        return _bounded(_FUNCTIONS[node.func.id](*(_value(argument) for argument in node.args)))
    allowed = ", ".join([*sorted(_FUNCTIONS), *_CONSTANTS])
    raise ValueError(f"only numbers, + - * / // % ** ( ) and {allowed} are allowed")


def _power(base: int | float, exponent: int | float) -> int | float:
    is_whole = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    if is_whole and abs(exponent) * math.log10(abs(base)) > _MAX_DIGITS:
        raise ValueError(f"the result has more than {_MAX_DIGITS} digits")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("the result is no real number")
    return _bounded(result)


def _bounded(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() > _MAX_DIGITS * 4:
        raise ValueError(f"the result has more than {_MAX_DIGITS} digits")
    return value


def _as_text(value: int | float) -> str:
    if isinstance(value, float):
        # Twelve digits hide binary rounding: 0.1 + 0.2 is 0.3.
        return format(value, ".12g")
    return str(value)
