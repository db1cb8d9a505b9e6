"""graphseed itself under one policy: its steps without queue, sampling or text.

Under `seed` and `resident` the prompts follow each other without a decode step between them, so
that they replay; under `seed` a decode step in between would release the prompt graphs.
"""

import time
from collections.abc import Sequence
from typing import Any

import common

import graphseed
from graphseed.capture.identity import Namespace
from graphseed.engine.config import EngineConfig
from graphseed.measure.policies import POLICIES
from graphseed.measure.session import Session


class SessionSteps:
    """A session's one slot. The session's owner closes both."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.slot = session.slot()

    def reset(self) -> None:
        self._session.settle()  # resident captures while nothing is timed
        self.slot.rewind()

    def prompt(self, token_ids: Sequence[int]) -> None:
        self._session.run_prompt(self.slot.prompt(token_ids))

    def decode(self, token_id: int) -> None:
        self._session.run(self._session.decode([self.slot.part([token_id])]))


def measure(args: Any) -> dict[str, Any]:
    """Run one policy; the note says how many of all its observations replayed."""
    driver, model = common.load(args)
    start = time.perf_counter()
    config = EngineConfig(
        context_len=args.prompt_tokens + args.new_tokens, num_ubatch=args.ubatch_size
    )
    with Session(model, driver, config, POLICIES[args.policy]) as session:
        steps = SessionSteps(session)
        with steps.slot:
            figures = common.measure_steps(steps, driver.synchronize, model.vocab_size, args, start)
        counts = session.core.tally.counts
    said = ", ".join(
        f"{counts[space].replayed} of {counts[space].candidates} {space.value} steps replayed"
        for space in Namespace
    )
    return figures | {
        "dtype": common.dtype_of(model),
        "peer_version": f"graphseed {graphseed.__version__}",
        "note": f"{said}, those that make ready and warm up included",
    }


if __name__ == "__main__":
    parser = common.parser(__doc__)
    parser.add_argument("--policy", choices=tuple(POLICIES), default="off")
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512)
    common.run(measure, parser.parse_args())
