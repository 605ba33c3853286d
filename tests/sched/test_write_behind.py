"""What a step may write to the second tier: a share of its time, whatever the disk."""

from __future__ import annotations

import pytest

from martlet.sched.budget import MOST_PAGES, MOST_SAVED_S, WRITE_SHARE, WriteBehind


@pytest.mark.parametrize("page_s", [0.0005, 0.005, 0.05])
def test_writing_takes_its_share_of_the_time_on_any_disk(page_s: float) -> None:
    """1,000 steps of 20 ms with more to write than there is time for."""
    account, spent = WriteBehind(), 0.0
    for _ in range(1000):
        n_pages = account.most
        if n_pages:
            account.saved(n_pages, n_pages * page_s)
            spent += n_pages * page_s
        account.step(0.02)
    assert spent == pytest.approx(WRITE_SHARE * 20.0, abs=MOST_SAVED_S + page_s)


def test_a_page_is_written_to_measure_it() -> None:
    account = WriteBehind()
    assert account.most == 1
    account.saved(1, 0.001)
    assert account.most == 0  # nothing is earned yet
    account.step(1.0)
    assert account.most == pytest.approx((WRITE_SHARE - 0.001) / 0.001, abs=1)


def test_bounds() -> None:
    """An hour's earnings are not spent in one step, and what evictions had to write is forgiven
    some day.
    """
    account = WriteBehind()
    account.saved(1, 1e-9)
    account.step(3600.0)
    assert account.most == MOST_PAGES
    account.saved(100, 1000.0)
    assert account.most == 0
    for _ in range(2):
        account.step(2 * MOST_SAVED_S / WRITE_SHARE)
    account.saved(0, 0.0)
    assert account.most == 0  # a page is known to take seconds now
    account.step(-1.0)
    assert account.most == 0
