"""The selections that measurements stand side by side. Owns four names; measures nothing."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from graphseed.capture.selector import Policy, Selection

SOURCE: Final = "measurement"
# In the order in which they are run and shown: each is compared with those before it.
POLICIES: Final[Mapping[str, Selection]] = MappingProxyType(
    {
        "disabled": Selection(Policy.OFF, Policy.OFF, source=SOURCE),  # decode graphs too
        "off": Selection(Policy.OFF, source=SOURCE),
        "seed": Selection(Policy.SEED, source=SOURCE, was_asked=True),
        "resident": Selection(Policy.RESIDENT, source=SOURCE, was_asked=True),
    }
)
