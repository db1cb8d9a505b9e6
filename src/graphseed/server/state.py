"""What the endpoints share.

Owns ServerState: the engine once it is there, the model's words, the settings and the selection.
Does not know any endpoint.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime

from graphseed.capture.selector import Selection
from graphseed.engine import Engine, ModelCannot
from graphseed.models.model import Model
from graphseed.server.errors import Unavailable
from graphseed.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Served:
    """A model that answers."""

    engine: Engine
    model: Model


@dataclass(slots=True)
class ServerState:
    """One server. Made by the command line; its `served` is set when loading is done.

    Used on the event loop's thread.
    """

    settings: ServerSettings
    selection: Selection
    build: str  # commit or version, for build_info and system_fingerprint
    model_path: str  # as the user named it
    served: Served | None = None
    is_closing: bool = False  # running streams end, new ones are refused
    refusal: str = "the server is shutting down"  # what new ones are told then
    is_sleeping: bool = False
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def ready(self) -> Served:
        """The model that answers. Raises Unavailable while it loads and when the server ends."""
        if self.is_closing:
            raise Unavailable(self.refusal)
        if self.served is None:
            raise Unavailable("Loading model")
        return self.served

    def check_can_generate(self) -> None:
        """Refuse a model that has no head for a next token. Raises ModelCannot, Unavailable."""
        model = self.ready.model
        if not model.can_generate:
            raise ModelCannot(self.name, model.kind)

    @property
    def name(self) -> str:
        """The model's id: as llama-server, the alphabetically first alias, or its own name."""
        return min(self.settings.aliases, default=self.model_path)
