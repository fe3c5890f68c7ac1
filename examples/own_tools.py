"""Tools as plain functions: a type hint and a described argument for each parameter are the whole schema.

Use: data.agents.function_tool_path: examples/own_tools.py, and a row with agent_name tool_agent.
"""

from lit_rl.tools import function_tool


@function_tool
def add(a: int, b: int) -> str:
    """Add two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)


@function_tool(name="digits", timeout_s=2.0)
async def count_digits(number: int) -> tuple[str, float, dict[str, float]]:
    """Count the digits of a whole number.

    Args:
        number: The number.
    """
    count = len(str(abs(number)))
    # Answer, step reward, and numbers for the log.
    return f"{number} has {count} digits", 0.0, {"digits": count}
