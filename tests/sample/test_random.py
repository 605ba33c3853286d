"""Philox against the known answers of its authors (Random123's kat_vectors), and what the counter's
words are for.
"""

from __future__ import annotations

import pytest

from martlet.sample.random import LANE_TOKEN, LANE_XTC, draw_seed, philox, uniform

ONES = 0xFFFFFFFF
# its hexadecimal digits
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert philox(counter, key) == expected


def test_uniform_is_the_first_53_bits() -> None:
    assert uniform(0, 0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53


def test_every_word_of_the_counter_counts() -> None:
    numbers = {
        uniform(seed, sequence, position, lane)
        for seed in (0, 1, -1, 2**32, 2**63)
        for sequence in (0, 1)
        for position in (0, 1, 2**32)
        for lane in (LANE_TOKEN, LANE_XTC)
    }
    assert len(numbers) == 5 * 2 * 3 * 2
    assert all(0 <= number < 1 for number in numbers)


def test_negative_seeds_count_modulo_2_64() -> None:
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_numbers_of_a_sequence_are_spread_evenly() -> None:
    n, bins = 20_000, 20
    counts = [0] * bins
    for position in range(n):
        counts[int(uniform(42, 0, position) * bins)] += 1
    chi_square = sum((count - n / bins) ** 2 / (n / bins) for count in counts)
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def test_drawn_seeds_differ() -> None:
    assert draw_seed() != draw_seed()
