import pytest

from sglang_hcache.core.stretches import stretches


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], []),
        ([7], [(7, 1)]),
        ([0, 1, 2, 5, 6, 9], [(0, 3), (5, 2), (9, 1)]),
        ([3, 2, 3, 3, 4], [(3, 1), (2, 2), (3, 2)]),
    ],
)
def test_neighbours_are_put_together_in_the_order_given(
    numbers: list[int], expected: list[tuple[int, int]]
) -> None:
    assert stretches(numbers) == expected
