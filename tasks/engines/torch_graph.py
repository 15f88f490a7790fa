"""An exported program's graph in its form: types, layout, and linear layers as modules that can be quantised.

All of it stands in the graph, so that a compiler sees it: inputs come in FP32, outputs leave in FP32. Products and
norms get all their tensors in the reduced type; what the model itself computes in FP32 in between stays so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.export.passes import move_to_device_pass

from tasks import recurrent_op
from tasks.engines.torch_forms import dtype_of, place

ATEN = torch.ops.aten
# These want one type for all that they are given.
SAME_TYPE = {
    *(getattr(ATEN, f"conv{n}d").default for n in (1, 2, 3)),
    ATEN.conv_transpose1d.default,
    ATEN.conv_transpose2d.input,
    ATEN.conv_transpose3d.input,
    ATEN.convolution.default,
    ATEN.linear.default,
    ATEN.matmul.default,
    ATEN.mm.default,
    ATEN.bmm.default,
    ATEN.addmm.default,
    ATEN.baddbmm.default,
    ATEN.einsum.default,
    ATEN.bilinear.default,
    ATEN.scaled_dot_product_attention.default,
    ATEN.layer_norm.default,
    ATEN.group_norm.default,
    ATEN.batch_norm.default,
    ATEN.instance_norm.default,
    ATEN.prelu.default,
    recurrent_op.OPERATION,
}


def formed(program: torch.export.ExportedProgram, device: str, wanted: Mapping[str, Any]) -> fx.GraphModule:
    """The program as a module on its device, in the form that `settings` ask for; its weights change with it."""
    if device == "cuda":
        program = move_to_device_pass(program, device)  # Tensors that the model itself makes are noted with a device.
    module = program.module(check_guards=False)
    module = fx.GraphModule(module, module.graph)  # Without the hooks that check inputs: the session has done so.
    dtype = dtype_of(device, wanted["precision"])
    for node in list(module.graph.nodes):
        if node.target is ATEN._assert_tensor_metadata.default:
            module.graph.erase_node(node)
    if dtype != torch.float32:
        _cast(module.graph, dtype)
    if wanted["channels_last"]:
        _channels_last(module.graph)
    if device == "cpu" and dtype == torch.float32:
        recurrent_op.by_onednn(module.graph)
    if wanted["sparse"] or wanted["precision"] in ("int8", "fp8"):
        module = _linear_modules(module)
    module.graph.lint()
    module.recompile()
    place(module, device, wanted)
    return module


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph and weights with code of its own, so that a compiler takes it for another function."""
    return fx.GraphModule(module, module.graph)


def _floating(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _cast(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Inputs and the tensors of products and norms in `dtype`, outputs in FP32."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and _floating(node):
            with graph.inserting_after(node):
                _instead(node, graph.call_function(ATEN.to.dtype, (node, dtype)))
        elif node.target in SAME_TYPE or node.op == "output":
            with graph.inserting_before(node):
                cast = partial(_as, graph, torch.float32 if node.op == "output" else dtype)
                node.args, node.kwargs = fx.map_arg(node.args, cast), fx.map_arg(node.kwargs, cast)


def _as(graph: fx.Graph, dtype: torch.dtype, node: fx.Node) -> fx.Node:
    if node.op in ("get_attr", "placeholder") or not _floating(node):
        return node
    cast = graph.call_function(ATEN.to.dtype, (node, dtype))
    cast.meta = dict(node.meta)
    return cast


def _channels_last(graph: fx.Graph) -> None:
    """Inputs of four axes laid out with the channels last."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.ndim == 4:
            last = next((user for user in node.users if user.target is ATEN.to.dtype), node)
            with graph.inserting_after(last):
                _instead(
                    last,
                    graph.call_function(ATEN.contiguous.default, (last,), {"memory_format": torch.channels_last}),
                )


def _instead(node: fx.Node, new: fx.Node) -> None:
    """Let every other user of a node read a new one, that reads the node."""
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def _linear_modules(module: fx.GraphModule) -> fx.GraphModule:
    """The module with `nn.Linear` for linear operations of constant weights, one module a weight and bias."""
    made: dict[tuple[str, ...], str] = {}
    for node in list(module.graph.nodes):
        held = node.args[1:] if node.target is ATEN.linear.default else ()
        if not held or any(not (isinstance(a, fx.Node) and a.op == "get_attr") for a in held if a is not None):
            continue
        key = tuple(str(a.target) for a in held if a is not None)
        if key not in made:
            made[key] = "linear_" + key[0].removesuffix(".weight").replace(".", "_")
            module.add_submodule(made[key], _linear(module, key))
        with module.graph.inserting_before(node):
            call = module.graph.call_module(made[key], (node.args[0],))
            call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    return copy_of(module)  # Without the tensors that nothing reads any more.


def _linear(module: fx.GraphModule, names: tuple[str, ...]) -> nn.Linear:
    weight, *bias = (_tensor(module, name) for name in names)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(bias), device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias:
        linear.bias = nn.Parameter(bias[0].detach(), requires_grad=False)
    return linear


def _tensor(module: fx.GraphModule, name: str) -> torch.Tensor:
    owner, _, key = name.rpartition(".")
    return getattr(module.get_submodule(owner), key)
