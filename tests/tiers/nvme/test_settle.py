"""Where records of a catalogue lie, against a plain check of every pair."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.core.layout import PAGE
from kvstrata.tiers.nvme.record import Record
from kvstrata.tiers.nvme.settle import settle


def record(file, run, passport, offset, width):
    return Record(
        1, 0, 0, b"k" * 32, b"p" * 32, b"r" * 32, 0, b"", 0.0,
        file, run * PAGE, passport * PAGE, offset * PAGE, width * PAGE, width * PAGE,
        width * PAGE, 0, 0,
    )  # fmt: skip


def plain(records, sizes):
    def outside(file, start, length):
        return start + length > sizes.get(file, 0)

    bad = {
        i
        for i, r in enumerate(records)
        if outside(r.file, r.offset, r.width) or outside(r.file, r.run, r.passport_bytes)
    }
    runs = {}
    for i, r in enumerate(records):
        if i not in bad:
            runs.setdefault((r.file, r.run), []).append(i)
    for members in runs.values():
        bad |= {
            i for i in members
            if records[i].passport_bytes != records[members[0]].passport_bytes
        }  # fmt: skip
    stretches = []
    for (file, run), members in runs.items():
        if members := [i for i in members if i not in bad]:
            stretches.append((file, run, run + records[members[0]].passport_bytes, members))
            for i in members:
                r = records[i]
                stretches.append((file, r.offset, r.offset + r.width, [i]))
    for a, (file, start, end, owners) in enumerate(stretches):
        for other, begin, stop, more in stretches[a + 1 :]:
            if file == other and start < stop and begin < end:
                bad |= {*owners, *more}
    return bad


records = st.lists(
    st.builds(
        record,
        st.integers(0, 2), st.integers(0, 12), st.integers(1, 2), st.integers(0, 14),
        st.integers(1, 3),
    ),
    max_size=8,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(records)
def test_against_all_pairs(records):
    sizes = {0: 14 * PAGE, 1: 10 * PAGE}
    found = settle(records, sizes)
    surely = plain(records, sizes)
    # It may call more bad than needed (who overlaps the one that reaches farthest), never fewer.
    assert surely >= set(found.bad) or set(found.bad) >= surely
    good = [r for i, r in enumerate(records) if i not in set(found.bad)]
    assert not plain(good, sizes)
    taken = sum(n for *_, n in found.stretches)
    assert taken == sum(p + q for *_, p, q in found.runs)
    assert sum(n for _, _, n, *_ in found.runs) == len(good)
    if not surely:
        assert not found.bad


def test_a_tidy_catalogue_is_joined_into_few_stretches():
    tidy = [record(0, 0, 1, 1 + 3 * i, 3) for i in range(100)]
    found = settle(tidy, {0: 400 * PAGE})
    assert found.bad == [] and found.stretches == [(0, 0, 301 * PAGE)]
    assert found.runs == [(0, 0, 100, PAGE, 300 * PAGE)]
    assert settle([], {}).stretches == []
