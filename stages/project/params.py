"""``params.yaml``: reading it, and the checks every stage makes before it loads anything.

A stage's DVC ``params`` name only the keys it uses; all of the file is checked all the same, so that a misspelt key or
an unknown name stops the first stage that runs, not the one that would need it an hour later.
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stages.project.errors import UserError
from stages.project.keys import DENSE
from stages.project.options import PROTECTION, Option, declared
from stages.project.sections import Params

PARAMS = Path("params.yaml")
ROOT = Path(__file__).parents[1]
SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]*(-[A-Za-z0-9_]+)*")
"""Names of files and of keys that DVC looks up, where a dot would lead into a section."""
RESERVED = ("calibration", "selection", "perplexity", "mean")
"""Names that no corpus may have: other files in its folder, and the average in the tables."""
SLUG_RULE = "use letters, digits, `_` and `-`"


def load(path: Path = PARAMS) -> Params:
    """Read and check params.yaml, with the YAML reader that DVC uses, so that both see the same values.

    Raises UserError naming the key, its value and what is allowed.
    """
    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: not found in {Path.cwd()}; run from the project's folder") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a mapping of sections, found {type(content).__name__}")
    try:
        params = Params.model_validate(content)
    except ValidationError as error:
        raise UserError("\n       ".join(_explain(path, item) for item in error.errors())) from error
    _check_grid(path, params)
    _check_text(path, params)
    _check_rows(path, params)
    return params


def available(package: str) -> list[str]:
    """Names of the criteria or operators: the modules of ``stages/criteria`` or ``stages/operators``."""
    return sorted(file.stem for file in (ROOT / package).glob("*.py") if not file.stem.startswith("_"))


def _explain(path: Path, item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    kind, message = item["type"], item["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        section, known = _section(item["loc"])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        return f"{path}: {key}: unknown key{_did_you_mean(near)}; {section} knows {', '.join(known)}"
    if kind == "missing":
        return f"{path}: {key}: missing"
    return f"{path}: {key} = {item['input']!r}: {message}"


def _section(location: tuple[Any, ...]) -> tuple[str, list[str]]:
    """Name and known keys of the section that an unknown key lies in."""
    section: Any = Params
    for part in location[:-1]:
        # A mapping's annotation, dict[str, Model], stands for each of its values.
        section = section.model_fields[part].annotation if hasattr(section, "model_fields") else get_args(section)[-1]
    return ".".join(map(str, location[:-1])) or "the file", list(section.model_fields)


def _did_you_mean(near: list[str]) -> str:
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_name(where: str, name: str, known: Iterable[str]) -> None:
    """Raise UserError when `name`, set at `where`, is not among `known`."""
    known = list(known)
    if name not in known:
        near = _did_you_mean(difflib.get_close_matches(name, known, n=1))
        raise UserError(f"{where}: {name!r} is unknown{near}; available: {', '.join(known) or 'none'}")


def _check_grid(path: Path, params: Params) -> None:
    for axis, values in params.grid.model_dump().items():
        for value in values:
            if values.count(value) > 1:
                raise UserError(f"{path}: grid.{axis}: {value!r} is listed twice")
            if isinstance(value, str) and not SLUG.fullmatch(value):
                raise UserError(f"{path}: grid.{axis}: {value!r} cannot name a file; {SLUG_RULE}")
    if "mean" in params.grid.tasks:
        raise UserError(f"{path}: grid.tasks: 'mean' is the name of the average over tasks")
    for n in params.grid.n:
        if n < 1:
            raise UserError(f"{path}: grid.n: {n} layers cannot be removed; n is at least 1 (the dense row is implied)")
    for model in params.grid.models:
        check_name(f"{path}: grid.models", model, params.models)
    sections = (
        ("criteria", params.grid.criteria, "select", params.select, ("choose", "search")),
        ("operators", params.grid.operators, "solve", params.solve, ("solve",)),
    )
    for package, names, key, section, functions in sections:
        for name in names:
            check_name(f"{path}: grid.{package}", name, available(package))
            if name not in section:
                raise UserError(f"{path}: {key}.{name}: missing; give its options, or {{}} if it has none")
        for name, given in section.items():
            check_name(f"{path}: {key}", name, available(package))
            known = declared(ROOT / package / f"{name}.py", functions)
            if package == "criteria":
                known |= dict.fromkeys(("protect_first", "protect_last"), PROTECTION)
            _check_options(f"{path}: {key}.{name}", given, known)
    if DENSE in params.grid.criteria:
        raise UserError(f"{path}: grid.criteria: {DENSE!r} is the name of the unpruned row")


def _check_options(where: str, given: dict[str, Any], known: dict[str, Option]) -> None:
    for name in given:
        check_name(where, name, sorted(known))
    for name, option in known.items():
        if option.required and name not in given:
            raise UserError(f"{where}.{name}: missing; it must be {option.words}")
    for name, value in given.items():
        if not known[name].allows(value):
            raise UserError(f"{where}.{name} = {value!r}: must be {known[name].words}")


def _check_text(path: Path, params: Params) -> None:
    check_name(f"{path}: text.calibration.corpus", params.text.calibration.corpus, params.corpora)
    for corpus in params.text.perplexity.corpora:
        if params.text.perplexity.corpora.count(corpus) > 1:
            raise UserError(f"{path}: text.perplexity.corpora: {corpus!r} is listed twice")
        check_name(f"{path}: text.perplexity.corpora", corpus, params.corpora)
        if not SLUG.fullmatch(corpus) or corpus in RESERVED:
            raise UserError(
                f"{path}: text.perplexity.corpora: {corpus!r} cannot name a file; {SLUG_RULE}, and none of "
                f"{', '.join(RESERVED)}"
            )


def _check_rows(path: Path, params: Params) -> None:
    """The rows that are named by their key must be pruned ones of the grid."""
    for key in params.cost.rows:
        check_name(f"{path}: cost.rows", key, [row.key for row in params.rows() if not row.dense])
        if params.cost.rows.count(key) > 1:
            raise UserError(f"{path}: cost.rows: {key!r} is listed twice")
