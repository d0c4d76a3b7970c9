"""The model card of an exported row: how it was made, what it measured, how to load it."""

import json
from collections.abc import Collection
from typing import Any

from stages.project.keys import NONE, Row
from stages.project.paths import accuracy_file, cost_file, perplexity_file, text_file
from stages.project.sections import Params
from stages.recovered.adapter import DESCRIPTION
from stages.reporting import results, usage
from stages.reporting.document import comparison, reading, settings_of

PAPER = "https://arxiv.org/abs/2605.15491"


def model_card(row: Row, settings: Params, description: dict[str, Any] | None, bridged_by: Collection[str]) -> str:
    """The card as Markdown with a YAML header.

    `description` is that of the adapter, None for the dense row; `bridged_by` names the fields that its bridges have.
    """
    model = settings.models[row.model]
    header = ["library_name: transformers", "pipeline_tag: text-generation"]
    header += [f"base_model: {model.id}"] if model.id else []
    header += ["tags: [layer-pruning, ghosted-layers]"]
    base = f"{model.id} at commit {model.revision}" if model.id else row.model
    parts = ["\n".join(["---", *header, "---"]), f"# {row.key}"]
    if description is None:
        parts.append(f"The dense model {base}, as it was evaluated. Its licence is the original's.")
    else:
        parts += _recipe(row, base, description, bridged_by)
    parts += ["## Load it", _loading(bool(description and description["operators"]))]
    parts += ["## Measured", *_measured(row, settings)]
    if description is not None:
        rest = {name: value for name, value in description.items() if not name.endswith("sha256")}
        parts += ["## Recipe", f"What `{DESCRIPTION}` of the row says:"]
        parts.append(f"```json\n{json.dumps(rest, indent=2, sort_keys=True)}\n```")
    return "\n\n".join(parts) + "\n"


def _recipe(row: Row, base: str, description: dict[str, Any], bridged_by: Collection[str]) -> list[str]:
    removed = ", ".join(map(str, description["removed_layers"]))
    calibration = description["calibration"]
    parts = [
        f"{base} without {row.n} of its {description['base']['num_hidden_layers']} decoder layers ({removed}; "
        f"criterion `{row.criterion}`). Its licence is the base model's."
    ]
    done = []
    if "down_projection" in bridged_by:
        done.append("The down projection of the layer before a cut is a new one.")
    if description["operators"]:
        terms = [term for part, term in (("change", "x M"), ("reduce", "x A B"), ("bias", "b")) if part in bridged_by]
        done.append(f"At a cut one operator x → {' + '.join(['x', *terms])} acts on the residual stream.")
    if done:
        parts.append(
            f"{' '.join(done)} Solved in closed form from {calibration['tokens']:,} tokens of {calibration['corpus']}, "
            f"without training (`{row.operator}`, in the framework of *Ghosted Layers*, {PAPER})."
        )
    if not description["operators"]:
        parts.append("It needs no operator at inference: its architecture is the stock one.")
    return parts


def _loading(operators: bool) -> str:
    trust = ", trust_remote_code=True" if operators else ""
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # where this file is\n'
        f"model = AutoModelForCausalLM.from_pretrained(folder{trust})\n"
        f"tokenizer = AutoTokenizer.from_pretrained(folder{trust})"
    )
    note = (
        "`trust_remote_code` runs `modeling_ghosted.py` and `boundary_operator.py`, which lie beside the weights and "
        "put the operators in; without it, `AutoModelForCausalLM` refuses. Weights, configuration and code that are "
        "damaged, missing or edited are an error (`fingerprints.json`; a model saved anew has none). For LoRA, name "
        "`target_modules`; `modules_to_save=['boundary_before']` trains the operators too."
    )
    return f"```python\n{code}\n```" + (f"\n\n{note}" if operators else "")


def _measured(row: Row, settings: Params) -> list[str]:
    """The row's tables of the report, beside the dense row and, as far as evaluated, the row without operators."""
    rows, bare = [Row(row.model), row], Row(row.model, row.criterion, row.n)
    texts = all(perplexity_file(of).exists() and text_file(of).exists() for of in rows)
    tasks = [task for task in settings.grid.tasks if all(accuracy_file(of, task).exists() for of in rows)]
    if not texts and not tasks:
        return ["This row and the dense one were not both evaluated."]
    needed = [perplexity_file(bare), text_file(bare)] if texts else []
    needed += [accuracy_file(bare, task) for task in tasks]
    beside = bare in settings.rows() and row != bare and all(file.exists() for file in needed)
    operators = [NONE, row.operator] if beside else [row.operator]
    grid = {"models": [row.model], "criteria": [row.criterion], "n": [row.n], "operators": operators, "tasks": tasks}
    if row.dense:
        grid |= {"criteria": [], "n": [], "operators": []}
    text, generate = settings.text, settings.generate
    restricted: dict[str, Any] = {"grid": settings.grid.model_copy(update=grid)}
    if not texts:
        perplexity = text.perplexity.model_copy(update={"corpora": []})
        restricted["text"] = text.model_copy(update={"perplexity": perplexity})
        restricted["generate"] = generate.model_copy(update={"prompts": []})
    costs = [row.key] if row.key in settings.cost.rows and cost_file(row).exists() else []
    restricted["cost"] = settings.cost.model_copy(update={"rows": costs})
    found = results.read(settings.model_copy(update=restricted))
    tables = [*comparison(found, row.model, row.n), *usage.texts(found, row.model, row.n)]
    return [*reading(found), *tables, *usage.costs(found, row.model), *settings_of(found, row.model)]
