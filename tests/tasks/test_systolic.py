"""The matrix unit's view of products, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from tasks.systolic import Product, avoided_bytes, convolution, utilisation


@pytest.mark.parametrize(
    ("size", "unit", "share"),
    [
        ((128, 128, 128), 128, 1.0),
        ((129, 128, 128), 128, 129 / 256),
        ((1, 64, 10), 128, 64 * 10 / 128**3),
        ((256, 256, 256), 256, 1.0),
        ((256, 256, 128), 256, 0.5),
    ],
)
def test_sizes_are_padded_up_to_whole_tiles(size: tuple[int, int, int], unit: int, share: float) -> None:
    assert utilisation([Product(*size)], unit) == pytest.approx(share)


def test_several_products_weigh_by_the_tiles_that_they_take() -> None:
    full, empty = Product(8, 8, 8), Product(1, 1, 1)
    assert utilisation([full, empty], 8) == pytest.approx((512 + 1) / (2 * 512))
    assert utilisation([Product(4, 8, 8, count=3)], 8) == pytest.approx(0.5)
    assert utilisation([], 8) is None


def test_a_convolution_is_the_product_of_its_patches_and_its_kernels() -> None:
    # Output [2, 6, 5, 7] of kernels [6, 4, 3, 3] in one group: 70 patches of 36 values, 6 kernels.
    found = convolution((2, 6, 5, 7), (6, 4, 3, 3), 1, 4, in_place=False)
    assert (found.m, found.k, found.n, found.count) == (70, 36, 6, 1)
    assert found.multiply_adds == 2 * 6 * 5 * 7 * 4 * 9
    assert avoided_bytes([found, found]) == 2 * 70 * 36 * 4


def test_groups_are_products_of_their_own() -> None:
    depthwise = convolution((1, 8, 4, 4), (8, 1, 3, 3), 8, 2, in_place=False)
    assert (depthwise.m, depthwise.k, depthwise.n, depthwise.count) == (16, 9, 1, 8)
    assert depthwise.multiply_adds == 16 * 9 * 8
    assert depthwise.unrolled_bytes == 16 * 9 * 8 * 2


def test_a_pointwise_convolution_has_nothing_to_unroll() -> None:
    assert convolution((1, 8, 4, 4), (8, 3, 1, 1), 1, 4, in_place=True).unrolled_bytes == 0
