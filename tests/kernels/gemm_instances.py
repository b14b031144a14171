"""Instances of the wgmma product that the tests run: each structure, exchange and width."""

from __future__ import annotations

from wcodec.kernels.gemm import GemmConfig

EXAMPLES = {
    "wide tiles": GemmConfig(64, 2, 4, 1, 1),
    "wide tiles, two bricks a stage": GemmConfig(128, 2, 3, 2, 1),
    "narrow tiles": GemmConfig(128, 1, 4, 2, 1),
    "narrow tiles, two CTAs an SM": GemmConfig(64, 1, 3, 2, 1, ctas_per_sm=2),
    "four row groups": GemmConfig(128, 4, 4, 1, 1),
    "four row groups dealt evenly": GemmConfig(64, 4, 4, 1, 0),
    "column groups": GemmConfig(64, 1, 4, 2, 1, column_groups=2),
    "split in 2": GemmConfig(128, 2, 3, 2, 2),
    "split in 7": GemmConfig(128, 2, 5, 1, 7),
    "split in 3, column groups": GemmConfig(128, 1, 3, 2, 3, column_groups=2),
    "cluster of 2": GemmConfig(128, 2, 3, 2, 2, cluster=True),
    "cluster of 3, column groups": GemmConfig(64, 1, 4, 2, 3, cluster=True, column_groups=2),
    "two clusters of 2": GemmConfig(128, 2, 3, 2, 4, cluster=True),
    "three clusters of 2": GemmConfig(256, 2, 4, 1, 6, cluster=True),
    "two clusters of 2, column groups": GemmConfig(128, 1, 3, 2, 4, cluster=True, column_groups=2),
    "dealt evenly": GemmConfig(64, 2, 4, 1, 0),
    "dealt evenly, column groups": GemmConfig(64, 1, 4, 2, 0, column_groups=2),
    "dealt evenly to pairs": GemmConfig(128, 2, 3, 2, 0, pair=True),
    "pairs": GemmConfig(64, 2, 3, 1, 1, pair=True),
    "pairs of 256 tokens": GemmConfig(256, 2, 4, 1, 1, pair=True),
    "patches got ready early": GemmConfig(128, 1, 4, 2, 2, column_groups=2, early_patches=True),
    "256 tokens, patches got ready early": GemmConfig(256, 1, 5, 1, 2, cluster=True, early_patches=True),
    "16 tokens": GemmConfig(16, 2, 4, 2, 1),
    "32 tokens": GemmConfig(32, 1, 4, 2, 2, column_groups=2),
    "48 tokens": GemmConfig(48, 2, 4, 1, 1),
    "96 tokens": GemmConfig(96, 2, 4, 1, 2),
    "192 tokens": GemmConfig(192, 2, 3, 1, 3),
    "256 tokens": GemmConfig(256, 2, 3, 1, 4),
    "256 tokens, cluster of 2": GemmConfig(256, 2, 4, 1, 2, cluster=True),
}
