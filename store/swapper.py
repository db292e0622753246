"""The Store's hand for preempted sequences: out, in, or forgotten."""

from __future__ import annotations

from kvstrata.core.errors import MisuseError
from kvstrata.store.answers import Blocks, Sequence
from kvstrata.store.control import Control
from kvstrata.store.looking import Looking
from kvstrata.store.save import SaveJob
from kvstrata.store.swap import SwapIn, Swapped, TailOut, finish
from kvstrata.transfer.move import ReadyEvent, Ticket


class Swapper:
    """Starts swaps. The Store's lock is held around every call; see ``Store`` for what they do."""

    def __init__(self, control: Control, looking: Looking) -> None:
        self._control = control
        self._looking = looking

    def out(self, sequence: Sequence, ready: ReadyEvent | None) -> Swapped:
        """Begin a swap-out."""
        control = self._control
        whole, partial = divmod(sequence.num_tokens, control.model.block_size)
        symbols = self._looking.symbols(sequence.prefix)
        if sequence.num_tokens < 0 or symbols.num_blocks < whole:
            raise MisuseError(
                f"a sequence of {sequence.num_tokens} tokens needs a prefix that names its "
                f"{whole} whole blocks; this one names {symbols.num_blocks}"
            )
        symbols = symbols._replace(data=symbols.data[: whole * symbols.width])
        count = whole + bool(partial)
        ids = self._looking.block_ids(sequence.blocks, count, sequence.num_tokens)
        full = {group: got[:whole] for group, got in ids.items()}
        job = SaveJob.begin(control, "swap_out", symbols, full, 0, ready)
        keeps = control.placement.keeps
        keeps.grow(control.placement.index.capacity)
        keep = keeps.lease(control.placement.index.match(symbols))
        tokens, epoch = sequence.num_tokens, control.epoch
        swapped = Swapped(job.ticket, symbols, tokens, whole, epoch, keep, control)
        tails = {g: int(got[whole]) for g, got in ids.items()} if partial else {}
        control.start(TailOut(control, job, swapped, tails, ready))
        return swapped

    def back(
        self, swapped: Swapped, blocks: Blocks, ready: ReadyEvent | None, until: float
    ) -> Ticket:
        """Begin a swap-in, once."""
        control = self._control
        swapped.must_be_out(self._control)
        count = -(-swapped.num_tokens // control.model.block_size)
        ids = self._looking.block_ids(blocks, count, swapped.num_tokens)
        swapped.over = True
        ticket = Ticket(control.fresh_id(), "swap_in")
        return control.start(SwapIn(control, ticket, until, swapped, ids, ready))

    def discard(self, swapped: Swapped) -> None:
        """Keep nothing for the sequence any more."""
        swapped.must_be_out(self._control)
        finish(self._control, swapped)
