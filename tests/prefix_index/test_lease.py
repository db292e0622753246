"""Leases: pins that always come back to zero, and never below."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.core.errors import MisuseError
from kvstrata.prefix_index.lease import LeaseBook
from kvstrata.prefix_index.refs import Refs


def refs(*values: int) -> Refs:
    return np.array(values, np.int32)


@pytest.fixture
def book() -> LeaseBook:
    return LeaseBook(10)


def test_pins_count(book: LeaseBook) -> None:
    book.pin(refs(1, 2))
    book.pin(refs(2, 3))
    assert book.total == 4
    book.unpin(refs(2))
    assert book.pinned(refs(0, 1, 2, 3)).tolist() == [False, True, True, True]
    book.unpin(refs(2))
    assert book.pinned(refs(2)).tolist() == [False]
    assert book.all_pinned().tolist() == [1, 3]
    book.check()


def test_never_below_zero_and_all_or_nothing(book: LeaseBook) -> None:
    book.pin(refs(1))
    with pytest.raises(MisuseError, match="twice"):
        book.unpin(refs(1, 2))
    assert book.pinned(refs(1)).all() and book.total == 1
    book.check()


@pytest.mark.parametrize("bad", [-1, 10])
def test_out_of_range_is_refused(book: LeaseBook, bad: int) -> None:
    with pytest.raises(MisuseError, match="out of range"):
        book.pin(refs(1, bad))
    assert book.total == 0 and not book.all_pinned().size
    with pytest.raises(MisuseError, match="one-dimensional"):
        book.pin(np.zeros((1, 2), np.int32))


def test_growing_keeps_pins(book: LeaseBook) -> None:
    book.pin(refs(9))
    book.grow(100)
    book.grow(50)
    book.pin(refs(99))
    assert book.all_pinned().tolist() == [9, 99]


def test_a_lease_releases_once(book: LeaseBook) -> None:
    lease = book.lease(refs(1, 2, 3))
    with book.lease(refs(3, 4)) as other:
        assert book.total == 5
        other.check()
    lease.release()
    lease.release()
    assert book.total == 0
    book.check()


def test_a_lease_goes_when_its_block_raises(book: LeaseBook) -> None:
    with pytest.raises(KeyError), book.lease(refs(1)):
        raise KeyError
    assert book.total == 0


def test_the_head_goes_first(book: LeaseBook) -> None:
    lease = book.lease(refs(5, 6, 7, 8))
    lease.release_head(1)
    lease.release_head(2)
    assert lease.held.tolist() == [8]
    assert book.all_pinned().tolist() == [8]
    lease.check()
    lease.release_head(9)
    assert book.total == 0
    with pytest.raises(MisuseError):
        lease.release_head(-1)


def test_a_lease_keeps_its_own_refs(book: LeaseBook) -> None:
    source = refs(1, 2)
    lease = book.lease(source)
    source[0] = 9
    lease.release()
    assert book.total == 0
    with pytest.raises(ValueError):
        lease.refs[0] = 3


def test_after_a_reset_an_old_lease_holds_nothing(book: LeaseBook) -> None:
    old = book.lease(refs(1, 2))
    book.reset()
    new = book.lease(refs(1))
    assert not old.held.size
    old.release()
    assert book.all_pinned().tolist() == [1]
    new.release()
    book.check()


def test_check_notices() -> None:
    book = LeaseBook(4)
    lease = book.lease(refs(1))
    book.total = 0
    with pytest.raises(AssertionError, match="invariant 2"):
        book.check()
    book.total = 1
    book.unpin(refs(1))
    with pytest.raises(AssertionError, match="invariant 2"):
        lease.check()
