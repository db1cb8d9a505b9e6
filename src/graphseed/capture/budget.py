"""How much one namespace may hold, and when it must give back.

Owns Budget. Memory comes back by whole generations (an allocator frees a private pool only when no
graph uses it), so what goes next is always the whole namespace: a budget never leaves half a pool.
Does not release anything itself.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one namespace. Raises ValueError for limits that admit no executable at all."""

    max_entries: int = 128
    max_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if self.max_entries < 1:
            raise ValueError(f"max_entries is {self.max_entries}; expected at least 1")
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes is {self.max_bytes}; expected at least 1")

    def is_full(self, num_entries: int, num_bytes: int) -> bool:
        """Whether one more executable needs the generation released first.

        The next one's bytes are not known before it is made, so a namespace may end one executable
        above `max_bytes`; it is then full, and the next seed starts a new generation.
        """
        return num_entries >= self.max_entries or num_bytes >= self.max_bytes
