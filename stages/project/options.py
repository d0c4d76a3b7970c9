"""The options of criteria and operators: what ``params.yaml`` may give them, read from their source, not imported.

An option is a keyword-only parameter. Its annotation says what it may be: `float`, `int`, `str`, `bool`, `list[int]`,
:data:`Count`, :data:`NotNegative`, ``Literal[...]``, or several of them joined by ``|``.
"""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from stages.project.errors import UserError

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Option(NamedTuple):
    """What an option may be, in words too, and whether it must be given."""

    kind: Any
    words: str
    required: bool

    def allows(self, value: Any) -> bool:
        """Whether `value` is of the option's kind; an `int` is a `float`, and nothing else is anything else."""
        try:
            TypeAdapter(self.kind, config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError:
            return False
        return True


KINDS: dict[str, tuple[Any, str]] = {
    "float": (float, "a number"),
    "int": (int, "a whole number"),
    "str": (str, "a string"),
    "bool": (bool, "true or false"),
    "list[int]": (list[int], "a list of whole numbers"),
    "Count": (Count, "a whole number, at least 1"),
    "NotNegative": (NotNegative, "a finite number, at least 0"),
}
PROTECTION = Option(Annotated[int, Field(ge=0)], "a whole number, at least 0", required=True)
"""What `protect_first` and `protect_last` of every criterion may be."""


def declared(file: Path, functions: Sequence[str]) -> dict[str, Option]:
    """The options of the criterion or operator that `file` is: those of the one of `functions` that it defines.

    Raises UserError when it defines none of them, or more than one.
    """
    module = ast.parse(file.read_text(encoding="utf-8"))
    defined = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in functions]
    if len(defined) != 1:
        found = f"{len(defined)} functions" if defined else "no function"
        where = Path("stages", *file.parts[-2:])
        raise UserError(f"{where}: defines {found} `{'` or `'.join(functions)}`; it needs one")
    arguments = zip(defined[0].args.kwonlyargs, defined[0].args.kw_defaults, strict=True)
    return {argument.arg: Option(*_kind(argument.annotation), default is None) for argument, default in arguments}


def _kind(annotation: ast.expr | None) -> tuple[Any, str]:
    """The type that an annotation stands for, and its words; anything where it is not one of those known here."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            (first, words), (second, more) = _kind(left), _kind(right)
            return first | second, f"{words}, or {more}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            values = ast.literal_eval(choices)
            values = values if isinstance(values, tuple) else (values,)
            return Literal[values], " or ".join(map(repr, values))
    return KINDS.get(ast.unparse(annotation) if annotation else "", (Any, "anything"))
