"""Faults of the card in plain words: which stop a run, and which leave something that can be saved."""

from __future__ import annotations

import pytest

from onecard.machine.faults import HARDWARE_XIDS, find_fault
from onecard.machine.sensors import Sample


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63])
def test_what_programs_cause_or_the_card_mended_is_no_fault_of_it(xid: int) -> None:
    assert find_fault(Sample(xids=(xid,)), (xid,), 0) is None


def test_a_card_off_the_bus_is_named_by_xid_or_by_its_silence() -> None:
    for sample, xids in ((Sample(), (79,)), (None, (79,)), (Sample(card_lost=True), ())):
        fault = find_fault(sample, xids, None)
        assert fault is not None
        assert fault.spoiled
        assert "no longer answers" in fault.what
        assert "power plugs" in fault.remedy
        assert fault.exit_status == 3


def test_new_uncorrected_errors_stop_and_old_ones_do_not() -> None:
    assert find_fault(Sample(ecc_uncorrected=2), (), 2) is None
    assert find_fault(Sample(ecc_uncorrected=2), (), None) is None
    assert find_fault(Sample(ecc_uncorrected=None), (), 0) is None
    fault = find_fault(Sample(ecc_uncorrected=3), (), 2)
    assert fault is not None
    assert fault.spoiled
    assert fault.what.startswith("The card has a fault: 1 uncorrected ECC errors: ")


def test_the_fault_that_spoils_memory_counts_before_others() -> None:
    fault = find_fault(None, (62, 95), 0)
    assert fault is not None
    assert fault.spoiled
    assert "Xid 95" in fault.what
    other = find_fault(None, (62,), 0)
    assert other is not None
    assert not other.spoiled


def test_every_meaning_says_what_to_do() -> None:
    for meaning in HARDWARE_XIDS.values():
        assert meaning.what and meaning.remedy.endswith(".")
