"""What a max_length costs, against counting row by row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.data.lengths import lengths
from memlab.data.max_length import Lengths

some_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)


@settings(deadline=None)
@given(rows=some_lengths, max_length=st.integers(1, 45), batch_size=st.integers(1, 8))
def test_counts_what_a_loop_counts(rows, max_length, batch_size):
    known = Lengths(rows)
    cut = [min(n, max_length) for n in rows]
    assert known.tokens(max_length) == sum(cut)
    assert known.lost(max_length) == sum(rows) - sum(cut)
    assert known.cut(max_length) == sum(n > max_length for n in rows)
    assert known.kept(max_length) == sum(cut) / sum(rows)
    batches = [cut[i : i + batch_size] for i in range(0, len(cut), batch_size)]
    slots = sum(len(batch) * max(batch) for batch in batches)
    assert known.padding(max_length, batch_size) == pytest.approx(1 - sum(cut) / slots, abs=1e-15)


@settings(deadline=None)
@given(rows=some_lengths, share=st.floats(0, 1, exclude_min=True))
def test_shortest_keeps_the_share_and_one_less_does_not(rows, share):
    known = Lengths(rows)
    shortest = known.shortest(share)
    assert known.kept(shortest) >= share
    assert shortest == 1 or known.kept(shortest - 1) < share


@settings(deadline=None)
@given(rows=some_lengths, max_length=st.integers(1, 45))
def test_shortest_of_a_kept_share_is_no_longer(rows, max_length):
    known = Lengths(rows)
    assert known.shortest(known.kept(max_length)) == min(max_length, max(rows))


def test_worked_values():
    known = Lengths([3, 4, 1])
    assert [known.shortest(share) for share in (0.01, 3 / 8, 0.376, 5 / 8, 0.9, 1)] == [
        1, 1, 2, 2, 4, 4,
    ]  # fmt: skip
    assert known.shortest(7 / 8) == 3
    assert (known.total, known.longest) == (8, 4)
    assert Lengths([4096, 512, 512, 512]).padding(4096, 4) == 1 - 5632 / 16384  # lesson 02


def test_an_array_of_max_lengths_gives_an_array_of_answers():
    known, limits = Lengths(np.array([3, 4, 1], np.int32)), np.array([1, 2, 9])
    for ask in (known.tokens, known.lost, known.kept, known.cut, lambda n: known.padding(n, 2)):
        assert np.array_equal(ask(limits), [ask(int(n)) for n in limits])


def test_the_committed_rows_keep_95_percent():
    known = Lengths(lengths("chat_like"))
    limit = known.shortest(0.95)
    cut = np.minimum(lengths("chat_like"), limit).sum()
    assert 0.95 <= cut / known.total < 0.951
    assert np.minimum(lengths("chat_like"), limit - 1).sum() / known.total < 0.95


def test_the_rows_of_the_caller_stay_as_they_are():
    rows = np.array([3, 1, 2])
    known = Lengths(rows)
    rows[0] = 9
    assert (known.total, known.in_order.tolist()) == (6, [3, 1, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lengths([]), "one number of tokens a row"),
        (lambda: Lengths(np.ones((2, 2), int)), "shape"),
        (lambda: Lengths([0, 0]), "rows with tokens"),
        (lambda: Lengths([3, -1]), "-1"),
        (lambda: Lengths([3]).kept(0), "max_length=0"),
        (lambda: Lengths([3]).padding(np.array([1, 0]), 1), "max_length"),
        (lambda: Lengths([3]).padding(1, 0), "batch_size=0"),
        (lambda: Lengths([3]).shortest(0), "share=0"),
        (lambda: Lengths([3]).shortest(1.1), "share=1.1"),
        (lambda: Lengths([3]).shortest(float("nan")), "share=nan"),
    ],
)
def test_wrong_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("rows", [[1.5, 2.0], [True, False]])
def test_lengths_that_are_no_whole_numbers_are_refused(rows):
    with pytest.raises(TypeError, match="dtype"):
        Lengths(rows)
