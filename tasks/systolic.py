"""Products as a matrix unit sees them: how much of its tiles they fill, and what an implicit GEMM leaves unwritten.

A unit of n by n multiply-adds (Jouppi et al. 2017, arXiv:1704.04760, has 256; later TPUs have 128) works on whole
tiles: M, K and N are padded up to multiples of n. A convolution is the product of its patches and its kernels;
writing the patches out as a matrix is im2col (Chellapilla et al. 2006), reading them in place is an implicit
GEMM (Chetlur et al. 2014, arXiv:1410.0759).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

UNIT = 128


@dataclass(frozen=True)
class Product:
    """`count` products of an [m, k] by a [k, n] matrix. `unrolled_bytes` is the size of all their patches written out
    as matrices, 0 where there is nothing to write: no convolution, or one of single values that all lie side by side.
    """

    m: int
    k: int
    n: int
    count: int = 1
    unrolled_bytes: int = 0

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all of them."""
        return self.m * self.k * self.n * self.count


def convolution(
    out: Sequence[int],
    weight: Sequence[int],
    groups: int,
    item_bytes: int,
    in_place: bool,
) -> Product:
    """The product of a convolution with output [batch, channels, …] and weight [channels, channels in a group, …].

    `in_place` says that its patches are its input as it is: a kernel of one value, no stride, no padding.
    """
    rows, depth = out[0] * prod(out[2:]), prod(weight[1:])
    return Product(rows, depth, weight[0] // groups, groups, 0 if in_place else rows * depth * groups * item_bytes)


def utilisation(products: Sequence[Product], unit: int = UNIT) -> float | None:
    """The share of the unit's multiply-adds that aren't padding, in 0 … 1; None where nothing multiplies."""
    done = sum(product.multiply_adds for product in products)
    spent = sum(_up(p.m, unit) * _up(p.k, unit) * _up(p.n, unit) * p.count for p in products)
    return done / spent if done else None


def avoided_bytes(products: Sequence[Product]) -> int:
    """What an implicit GEMM doesn't write: the patches of all convolutions as matrices."""
    return sum(product.unrolled_bytes for product in products)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
