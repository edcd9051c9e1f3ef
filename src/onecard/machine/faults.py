"""What a fault of the card means, in plain words, and what to do: Xid numbers of the driver, ECC, a lost card.

Xids that programs cause (13, 31, 43, 45 and others) and those that only tell of a repair (63) are not here: they are no
reason to stop. The meanings follow NVIDIA's catalogue of Xids.
"""

from __future__ import annotations

from dataclasses import dataclass

from onecard.errors import MachineError
from onecard.machine.sensors import Sample


@dataclass(frozen=True)
class _Meaning:
    """`spoiled`: numbers in the card's memory may be wrong, so that they must not be saved."""

    what: str
    remedy: str
    spoiled: bool = False


_SEAT = (
    "Switch the computer off; press the card into its slot, check its power plugs and the power supply, and let it "
    "cool. If it happens again, test the card in another computer."
)
_RESET = "Restart the computer. If it happens again, update the driver; after that the card is to be replaced."
_MEMORY = (
    "Restart the computer, which lets the card set bad cells aside. If it happens again, the card is to be replaced."
)
HARDWARE_XIDS = {
    46: _Meaning("the card stopped working", _RESET),
    48: _Meaning("the memory of the card lost data that its error correction could not mend", _MEMORY, spoiled=True),
    54: _Meaning("a power plug of the card is not connected", _SEAT),
    62: _Meaning("the controller inside the card stopped", _RESET),
    64: _Meaning("bad cells in the memory of the card could not be set aside", _MEMORY, spoiled=True),
    74: _Meaning("the NVLink bridge between cards failed", "Switch the computer off and seat the bridge again."),
    79: _Meaning("the card no longer answers (it fell off the bus)", _SEAT, spoiled=True),
    92: _Meaning("the memory of the card needs mending more and more often", _MEMORY),
    94: _Meaning("the memory of the card lost data of this program", _MEMORY, spoiled=True),
    95: _Meaning("the memory of the card lost data, and nobody knows whose", _MEMORY, spoiled=True),
    119: _Meaning("the processor that runs the driver on the card does not answer", _RESET),
    120: _Meaning("the processor that runs the driver on the card failed", _RESET),
}


class HardwareFault(MachineError):
    """The card is broken, or was for a moment. `spoiled`: what it holds may be wrong and must not be saved."""

    def __init__(self, what: str, remedy: str, *, spoiled: bool) -> None:
        super().__init__(what, remedy)
        self.spoiled = spoiled


def find_fault(sample: Sample | None, xids: tuple[int, ...], ecc_before: int | None) -> HardwareFault | None:
    """The worst thing that `sample` and the Xids of this run tell; `ecc_before`: errors that were there before it."""
    found = [(f"Xid {xid}: ", HARDWARE_XIDS[xid]) for xid in xids if xid in HARDWARE_XIDS]
    if sample is not None and sample.card_lost:
        found.append(("", HARDWARE_XIDS[79]))
    errors = (sample.ecc_uncorrected if sample is not None else None) or 0
    if ecc_before is not None and errors > ecc_before:
        found.append((f"{errors - ecc_before} uncorrected ECC errors: ", HARDWARE_XIDS[48]))
    if not found:
        return None
    sign, meaning = next((one for one in found if one[1].spoiled), found[0])
    return HardwareFault(f"The card has a fault: {sign}{meaning.what}.", meaning.remedy, spoiled=meaning.spoiled)
