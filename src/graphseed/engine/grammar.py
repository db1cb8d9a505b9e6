"""What constrains an answer token by token, as whoever writes the grammar hands it in.

Owns the protocol. Does not know any grammar language: a library made for that implements it.
"""

# V vocabulary, W words of a mask (V / 32, rounded up)

from typing import Protocol

import torch


class Grammar(Protocol):
    """Where one answer stands in its grammar. Belongs to one request.

    Called on the engine's thread only. What a call raises ends that request alone.
    """

    def allowed(self) -> torch.Tensor | None:
        """Tokens that may come next: [W] int32, bit set where allowed, on any device; None: all.

        It is read before the next call, so one buffer may be filled again and again. Must allow at
        least one token: an end of sequence where the grammar is complete.
        """

    def accept(self, token: int) -> None:
        """Take the token that was chosen, an end of sequence included."""
