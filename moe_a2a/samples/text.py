"""A text for the models, whose tokens are bytes."""

from __future__ import annotations

import torch
from torch import Tensor

SEQUENCE_LENGTH = 128
VOCAB_SIZE = 256

PARAGRAPHS = """\
A harbour at five in the morning is a quiet kind of machine. The ferries are still dark, the
cranes stand with folded arms, and a single clerk in a lit window writes down which crate goes to
which ship. Nothing moves yet, and still the whole day is already decided on her sheet of paper.

Then the lorries come, all at once, from every road. A driver who carries eight crates for one
ship does not queue eight times: he drives to the quay once, unloads everything, and leaves. It
sounds too plain to be worth saying, and half of the delays in the old days came from not saying
it.

On each ship somebody waits with a lamp and a list. As soon as a crate stands on deck, he ticks it
off and the cooks below begin with it; nobody rings a bell to say that all crates of all ships
have come. The bell was abolished years ago, after a winter in which it mostly rang for lorries
stuck in the snow.

In the evening the same roads run the other way. What was made on board goes back to where its
crate came from, already mixed, one parcel per ship and not one per crate. The clerk adds the
parcels in the order of the quays, never in the order of arrival, so that yesterday's sum and
today's can be compared.

If a lorry does not come, the lamp on deck is not left burning forever. The man with the list
looks at the clock, writes down which lorry, from which road, with which crate, and tells the
others to go home. That is all a harbour needs: a list, a lamp, a clock, and people who say whom
they are waiting for.
"""


def batch() -> Tensor:
    """The text as token ids [num_sequences, SEQUENCE_LENGTH], without the shorter last piece."""
    tokens = torch.tensor(list(PARAGRAPHS.encode()), device="cpu")
    num_sequences = len(tokens) // SEQUENCE_LENGTH
    return tokens[: num_sequences * SEQUENCE_LENGTH].view(num_sequences, SEQUENCE_LENGTH)
