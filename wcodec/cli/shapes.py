"""Command line values that speak of products: weight shapes and token counts."""

from __future__ import annotations

import re

import click


def parse_shapes(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """Read ``4096x8192``, out features by in features."""
    shapes = []
    for value in values:
        found = re.fullmatch(r"(\d+)[x×*](\d+)", value.strip(), re.IGNORECASE)
        if found is None or not int(found[1]) or not int(found[2]):
            raise click.BadParameter(f"{value!r} is no shape; write it like 4096x8192", ctx, param)
        shapes.append((int(found[1]), int(found[2])))
    return tuple(shapes)


def parse_tokens(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read ``1,16,64``, token counts."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise click.BadParameter(f"{value!r} is no list of token counts; write it like 1,16,64", ctx, param)
    return tuple(int(part) for part in parts)
