"""The decode ratio that stands beside a prompt gain which was measured without decoding.

Owns where it is looked up: in the bench runs of the same model on the same device.
"""

from collections.abc import Iterable

from pages.results import Run, blamed_on

REPLAYING = ("seed", "resident")  # the policies whose prompts replay


class DecodeRatios:
    """Decode rates against policy off, by model, device and depth; of the newest run that has one.

    Of one sequence; the lowest of the replaying policies, so that a loss in either of them shows.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self._found: dict[tuple[str, str, int], float] = {}
        for run in runs:  # newest first: what is there already is newer
            if run.first["benchmark"] == "bench":
                with blamed_on(run):
                    self._found = _ratios_of(run) | self._found

    def of(self, model: str, device_name: str, depth: int) -> float | None:
        """The ratio at one depth of context; None where it was not measured."""
        return self._found.get((model, device_name, depth))


def _ratios_of(run: Run) -> dict[tuple[str, str, int], float]:
    lowest: dict[tuple[str, str, int], float] = {}
    for line in run.lines:
        for row in line["rows"]:
            if (row.get("n_parallel") or 1) > 1:
                continue  # a batch of streams: not what stands beside one prompt
            place = (line["model"], line["device_name"], row.get("n_depth") or 0)
            for name in REPLAYING:
                ratio = row["policies"].get(name, {}).get("decode_ratio")
                if ratio is not None:
                    lowest[place] = min(ratio, lowest.get(place, ratio))
    return lowest
