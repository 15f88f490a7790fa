"""Writes the type stubs beside it, from the signatures that TensorRT's published bindings carry in their docstrings.

    python tests/stubs/make.py tensorrt_rtx > tests/stubs/rtx/tensorrt_rtx.pyi
    python tests/stubs/make.py tensorrt_bindings > tests/stubs/trt11/tensorrt.pyi

NVIDIA publishes no stubs, but the bindings alone (tensorrt-cu13-bindings, a wheel of 1.3 MB) are on the public index.
They load without TensorRT's libraries if empty libraries of their names, with the nine functions that they import, are
on the library path; nothing can be run so, but their types can be read. Only what the project's modules name is
written: a name that a module uses and the bindings don't have is missing from the stub too, and mypy says so.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ENGINES = Path(__file__).resolve().parents[2] / "tasks/engines"
PART = re.compile(r"(?:[\w.]+\.)?(\w+)")
HEAD = """# ruff: noqa
# fmt: off
# Made by tests/stubs/make.py from {name} {version}; not to be edited.
from collections.abc import Iterator
from typing import Any, ClassVar, SupportsInt, overload
from typing_extensions import Buffer

__version__: str
"""
# What docstrings don't tell: sequences and the buffer protocol.
EXTRA = {
    "Dims": ["def __iter__(self) -> Iterator[int]: ...", "def __len__(self) -> int: ..."],
    "IHostMemory": ["def __buffer__(self, flags: int, /) -> memoryview: ..."],
}
OVERRIDDEN = ("ILogger", "IProgressMonitor")


def used() -> tuple[set[str], set[str]]:
    """The names that the project's modules take from the module `trt`, and all names of attributes and methods."""
    names, members = set(), set()
    for file in [*ENGINES.glob("trt_*.py"), *ENGINES.glob("tensorrt*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                members.add(node.attr)
                if ast.unparse(node.value) in ("trt", "self.trt"):
                    names.add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                members.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                members |= {f"SM{digits}" for digits in re.findall(r"^\d+\.\d$", node.value)}
    return names, members


class Stubs:
    """The stub of one module, class by class."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.wanted, self.members = used()

    def text(self) -> str:
        """The whole stub; the classes that signatures return are followed."""
        done: dict[str, list[str]] = {}
        while done.keys() != {name for name in self.wanted if self._is_class(name)}:
            done = {n: self._members(getattr(self.module, n), n) for n in set(self.wanted) if self._is_class(n)}
        done = {name: self._members(getattr(self.module, name), name) for name in done}
        lines = [HEAD.format(name=self.module.__name__, version=self.module.__version__)]
        for name in sorted(self.wanted - done.keys()):
            if callable(value := getattr(self.module, name, None)):
                arguments = ", ".join(inspect.signature(value).parameters)
                lines.append(f"def {name}({arguments}) -> Any: ...\n")
        for name, members in sorted(done.items()):
            lines.append(f"class {name}:\n" + "".join(f"    {line}\n" for line in members or ["..."]))
        return "\n".join(lines)

    def _is_class(self, name: str) -> bool:
        return inspect.isclass(getattr(self.module, name, None))

    def _members(self, cls: type, name: str) -> list[str]:
        if hasattr(cls, "__members__"):
            values = [f"{key}: ClassVar[{name}]" for key in cls.__members__ if key in self.members]
            members = f"__members__: ClassVar[dict[str, {name}]]"
            return [*values, members, "name: str", "value: int", "def __int__(self) -> int: ..."]
        lines = list(EXTRA.get(name, ()))
        for key, value in sorted(vars(cls).items()):
            if key not in self.members and key != "__init__":
                continue
            if inspect.isclass(value) and hasattr(value, "__members__"):
                inner = self._members(value, f"{name}.{key}")
                lines += [f"class {key}:", *(f"    {line}" for line in inner)]
            elif isinstance(value, property):
                lines += self._property(key, value)
            elif callable(value) and (key == "__init__" or not key.startswith("_")):
                made = self._method(key, value.__doc__ or "")
                # What Python overrides is called with whole numbers, not with what could become one.
                lines += [line.replace("SupportsInt", "int") for line in made] if name in OVERRIDDEN else made
        return lines

    def _property(self, key: str, value: property) -> list[str]:
        match = re.search(r"-> (.*)", (value.fget.__doc__ if value.fget else "") or "")
        kind = self._type(match[1], returned=True) if match else "Any"
        if value.fset is not None:
            return [f"{key}: {kind}"]
        return ["@property", f"def {key}(self) -> {kind}: ..."]

    def _method(self, key: str, doc: str) -> list[str]:
        found = re.findall(rf"^(?:\d+\. )?{key}\((.*)\) -> (.*)$", doc, re.M)
        found = [(arguments, kind) for arguments, kind in found if arguments != "*args, **kwargs"]
        lines = []
        for arguments, kind in found:
            lines += ["@overload"] if len(found) > 1 else []
            lines.append(f"def {key}({self._arguments(arguments)}) -> {self._type(kind, returned=True)}: ...")
        gives = "None" if key == "__init__" else "Any"
        return lines or [f"def {key}(self, *args: Any, **kwargs: Any) -> {gives}: ..."]

    def _arguments(self, text: str) -> str:
        parts = re.split(r", (?=\w+: )", re.sub(r"<[^>]*>", "...", text))
        given = ["self"]
        for part in parts[1:]:
            name, _, rest = part.partition(": ")
            kind, equals, default = rest.partition(" = ")
            optional = " | None" if default == "None" else ""
            given.append(f"{name}: {self._type(kind)}{optional}" + (" = ..." if equals else ""))
        return ", ".join(given)

    def _type(self, text: str, returned: bool = False) -> str:
        plain = (
            text.strip()
            .replace("nvinfer1::", "")
            .replace("nvonnxparser::I", "")
            .replace("typing.", "")
            .replace("typing_extensions.", "")
        )
        plain = plain.replace(f"{self.module.__name__}.", "").replace(f"{self.module.__name__.split('_bind')[0]}.", "")
        plain = re.sub(r"\b(tensorrt|tensorrt_rtx|tensorrt_bindings|tensorrt_rtx_bindings)\.", "", plain)
        if plain in ("ILogger.Severity", "object"):
            return plain
        if plain == "Dims" and not returned:
            self.wanted.add("Dims")
            return "Dims | tuple[int, ...] | list[int]"
        if self._is_class(plain):
            if returned:
                self.wanted.add(plain)
            return plain if plain in self.wanted else "Any"
        known = {"int", "str", "bool", "float", "bytes", "None", "tuple", "list", "dict", "Buffer", "SupportsInt"}
        words = set(re.findall(r"[A-Za-z_]\w*", plain))
        return plain if words <= known else "Any"


if __name__ == "__main__":
    print(Stubs(importlib.import_module(sys.argv[1])).text(), end="")
