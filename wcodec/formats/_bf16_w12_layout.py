"""Numbers of the `bf16-w12` layout, version 1 (``docs/format.md`` section 2)."""

from __future__ import annotations

TILE = 64  # rows and columns of a brick
QUARTER_WEIGHTS = 16 * TILE
QUARTER_BYTES = 1536  # planes of low bytes and codes
PATCHES_AT = 4 * QUARTER_BYTES
BRICK_BYTES = PATCHES_AT + 4 * 16
INLINE_PATCHES = 6
OVERFLOW_TAG = 255
