"""What is inside a captured CUDA graph, read through cuda.bindings.

Owns the node count, the root's name and the upload of an executable. Imported by the CUDA driver
only: a machine without CUDA never loads it. Does not judge what it finds.
"""

from typing import Any

from cuda.bindings import driver as cu
from cuda.bindings import runtime as rt

from graphseed.capture.errors import CannotCapture, Reason


def count_and_root(raw_graph: int) -> tuple[int, str]:
    """Count the nodes of a cudaGraph_t and name its first root. (0, "") for an empty graph."""
    graph = rt.cudaGraph_t(init_value=raw_graph)
    num_nodes = int(_ok(rt.cudaGraphGetNodes(graph, 0))[1])
    if num_nodes == 0:
        return 0, ""
    num_roots = int(_ok(rt.cudaGraphGetRootNodes(graph, 0))[1])
    roots = _ok(rt.cudaGraphGetRootNodes(graph, num_roots))[0]
    return num_nodes, _name(roots[0])


def upload(raw_exec: int, raw_stream: int) -> None:
    """Move an executable to the device now, so that the first launch does not pay for it."""
    (error,) = rt.cudaGraphUpload(rt.cudaGraphExec_t(init_value=raw_exec), raw_stream)
    if int(error) != 0:
        is_memory = error == rt.cudaError_t.cudaErrorMemoryAllocation
        reason = Reason.OUT_OF_MEMORY if is_memory else Reason.UNSUPPORTED_NODE
        raise CannotCapture(reason, f"uploading the executable failed: {error}")


def _name(node: Any) -> str:
    kind = _ok(rt.cudaGraphNodeGetType(node))[0]
    if kind != rt.cudaGraphNodeType.cudaGraphNodeTypeKernel:
        return str(kind).removeprefix("cudaGraphNodeType.cudaGraphNodeType")
    # The runtime's getter fails on kernels that the driver API loaded (Triton's): ask the driver's.
    error, params = cu.cuGraphKernelNodeGetParams(cu.CUgraphNode(init_value=int(node)))
    if int(error) != 0 or not int(params.func):
        return "Kernel"
    error, name = cu.cuFuncGetName(params.func)
    return name.decode() if int(error) == 0 and name else "Kernel"


def _ok(answer: Any) -> tuple[Any, ...]:
    error, *values = answer
    if int(error) != 0:
        raise CannotCapture(Reason.UNSUPPORTED_NODE, f"reading the captured graph failed: {error}")
    return tuple(values)
