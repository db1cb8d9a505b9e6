"""A driver that does nothing but write down what it was asked to do.

Owns ScriptedDriver: a policy test reads as a transcript, and any verb can be made to fail. Does not
execute or record work: `capture` only calls it when told to.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from graphseed.capture.driver import Definition, Executable, Mark, Work
from graphseed.capture.errors import CannotCapture, Closed, LaunchFailed
from graphseed.capture.identity import FirstNode, Namespace


@dataclass(slots=True)
class ScriptedMark:
    """A mark whose completion the test decides."""

    driver: "ScriptedDriver"
    number: int

    def is_done(self) -> bool:
        return self.driver.num_done >= self.number

    def wait(self) -> None:
        self.driver.calls.append("wait")
        if self.driver.wait_error is not None:
            raise self.driver.wait_error
        self.driver.num_done = max(self.driver.num_done, self.number)

    def ms_since(self, earlier: Mark) -> float:
        return 1.0


@dataclass(slots=True)
class ScriptedGraph:
    """Definition and executable in one: the number it was captured as."""

    number: int
    first_node: FirstNode | None
    root: str
    num_bytes: int
    num_nodes: int = 3

    @property
    def result(self) -> object:
        return f"replayed {self.number}"


@dataclass(slots=True)
class ScriptedArena:
    """Writes its verbs into the driver's transcript."""

    driver: "ScriptedDriver"
    namespace: Namespace
    held: list[ScriptedGraph] = field(default_factory=list)
    is_closed: bool = False

    def capture(self, work: Work) -> ScriptedGraph:
        driver = self.driver
        driver.calls.append("capture")
        if self.is_closed:
            raise Closed("the arena is closed")
        if driver.refusals:
            refusal = driver.refusals.pop(0)
            if refusal is not None:
                raise refusal
        if driver.records_work:
            work()
        driver.num_captured += 1
        return ScriptedGraph(driver.num_captured, driver.first_node, driver.root, driver.num_bytes)

    def instantiate(self, definition: Definition) -> ScriptedGraph:
        self.driver.calls.append("instantiate")
        if not isinstance(definition, ScriptedGraph):
            raise TypeError(f"expected a ScriptedGraph, got {type(definition).__name__}")
        self.held.append(definition)
        return definition

    def discard(self, definition: Definition) -> None:
        self.driver.calls.append("discard")

    def launch(self, executable: Executable) -> None:
        self.driver.calls.append("launch")
        if executable not in self.held:
            raise LaunchFailed("the executable is not held by this arena")
        if self.driver.launch_error is not None:
            raise self.driver.launch_error

    def release(self, executable: Executable) -> None:
        self.driver.calls.append("release")
        self.held = [kept for kept in self.held if kept is not executable]

    def close(self) -> int:
        self.driver.calls.append(f"close {self.namespace.value}")
        self.is_closed = True
        num_bytes = sum(graph.num_bytes for graph in self.held)
        self.held.clear()
        return num_bytes


@dataclass
class ScriptedDriver:
    """The Driver protocol as a transcript. Set the fields to script what happens next."""

    device: str = "scripted"
    first_node: FirstNode | None = None  # what a recording says it begins with; None: cannot tell
    root: str = "root"
    num_bytes: int = 100  # of each executable
    refusals: list[CannotCapture | None] = field(default_factory=list)  # one for each capture
    records_work: bool = False  # whether a capture calls the work, as real drivers do
    open_error: Exception | None = None
    launch_error: Exception | None = None
    wait_error: Exception | None = None
    calls: list[str] = field(default_factory=list)
    num_captured: int = 0
    num_marks: int = 0
    num_done: int = 0  # marks up to this number are done
    arenas: list[ScriptedArena] = field(default_factory=list)
    description: str = "scripted driver"
    computes_bf16_fast: bool = False
    num_sms: int = 1

    def open(self, namespace: Namespace) -> ScriptedArena:
        if self.open_error is not None:
            raise self.open_error
        self.calls.append(f"open {namespace.value}")
        self.arenas.append(ScriptedArena(self, namespace))
        return self.arenas[-1]

    def mark(self, timed: bool = False) -> ScriptedMark:
        self.num_marks += 1
        return ScriptedMark(self, self.num_marks)

    def prime(self, dtype: str) -> None:
        self.calls.append("prime")

    def free_bytes(self) -> int:
        return 1 << 30

    def synchronize(self) -> None:
        self.num_done = self.num_marks

    def is_lost(self, error: BaseException) -> bool:
        return False

    def work(
        self, result: object = "direct", error: Exception | None = None
    ) -> Callable[[], object]:
        """A step that writes "direct" into the transcript and returns or raises."""

        def run() -> object:
            self.calls.append("direct")
            if error is not None:
                raise error
            return result

        return run
