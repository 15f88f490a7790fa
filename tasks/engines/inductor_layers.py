"""What Inductor makes of a graph, kernel by kernel: read from its scheduler while it writes the code.

A kernel is a generated one (Triton on a GPU, C++ on a CPU) or one of a library that it calls ("extern").
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from tasks.engines.torch_weights import NAMES
from tasks.manifest import Layer

# What the names of extern kernels that multiply matrices or convolve have in them.
PRODUCT = re.compile(r"mm\b|mm_|conv(?!ert)|(?<!bi)linear|matmul|attention|lstm|gru|rnn")
# Scheduler nodes, and what they hold, that launch nothing.
NO_KERNEL = ("NopKernelSchedulerNode", "MultiOutput", "DynamicScalar", "AssertScalar")


@contextlib.contextmanager
def recorded(tf32: bool) -> Iterator[list[tuple[Layer, ...]]]:
    """A list that gets the layers of every graph that Inductor compiles in the block."""
    from torch._inductor.scheduler import Scheduler

    graphs: list[tuple[Layer, ...]] = []
    codegen = Scheduler.codegen

    def told(scheduler: Any) -> Any:
        graphs.append(tuple(_layers(scheduler.nodes, tf32)))
        return codegen(scheduler)

    with mock.patch.object(Scheduler, "codegen", told):
        yield graphs


def _layers(nodes: Sequence[Any], tf32: bool) -> Iterator[Layer]:
    """One layer a kernel. On a CPU, generated code between two library calls is one kernel."""
    group: list[Any] = []
    for node in nodes:
        if {type(node).__name__, type(getattr(node, "node", None)).__name__} & set(NO_KERNEL):
            continue
        external = node.is_extern() or node.is_template()
        on_cpu = getattr(node.get_device(), "type", "cpu") == "cpu"
        if group and (external or not on_cpu):
            yield _generated(group)
            group = []
        if external:
            yield _external(node, tf32)
        else:
            group.append(node)
    if group:
        yield _generated(group)


def _generated(group: Sequence[Any]) -> Layer:
    first = group[0]
    device = getattr(first.get_device(), "type", "cpu")
    origins = _origins(group)
    kinds = dict.fromkeys(str(origin.name).rstrip("0123456789").rstrip("_") for origin in origins)
    return Layer(
        first.get_name(),
        f"{'cpp' if device == 'cpu' else 'triton'} {'+'.join(kinds)}",
        _precision([part.node for node in group for part in node.get_nodes()], False),
        False,
        _names(origins),
        device,
    )


def _external(node: Any, tf32: bool) -> Layer:
    inner = node.get_template_node() if node.is_template() else node.node
    kind = str(getattr(inner, "python_kernel_name", None) or getattr(inner, "name", type(inner).__name__))
    kind = kind.removeprefix("extern_kernels.").removeprefix("torch.ops.").removesuffix(".default")
    product = PRODUCT.search(kind) is not None
    device = getattr(node.get_device(), "type", "cpu")
    inputs = [value for value in getattr(inner, "inputs", ()) if not isinstance(value, str)]
    return Layer(
        node.get_name(),
        kind,
        _precision([*_flat(inputs), inner], tf32 and product),
        product,
        _names(_origins([node])),
        device,
        "sparse" in kind or "cslt" in kind if product else None,
    )


def _flat(values: Sequence[Any]) -> list[Any]:
    return [part for value in values for part in (_flat(value) if isinstance(value, list | tuple) else [value])]


def _precision(values: Sequence[Any], tf32: bool) -> str:
    """The type of the first value that has a floating or 8-bit one."""
    for value in values:
        with contextlib.suppress(Exception):  # What has no single type, such as a tuple of outputs, has no such method.
            name = NAMES.get(value.get_dtype())
            if name:
                return "tf32" if tf32 and name == "fp32" else name
    return "unknown"


def _origins(group: Sequence[Any]) -> list[torch.fx.Node]:
    """The nodes of the source's graph that a kernel stands for, in their order."""
    parts = [part.node for node in group for part in node.get_nodes() if part.node is not None]
    found = dict.fromkeys(origin for part in parts for origin in getattr(part, "origins", ()))
    return [origin for origin in found if origin.op != "placeholder" and origin.op != "get_attr"]


def _names(origins: Sequence[torch.fx.Node]) -> tuple[str, ...]:
    """Each node by its module and name, such as `block.conv1: convolution_1`; without the module if it isn't told."""
    return tuple(dict.fromkeys(f"{module}: {o.name}" if (module := _module(o)) else str(o.name) for o in origins))


def _module(node: torch.fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack and isinstance(stack[-1], tuple) else ""
