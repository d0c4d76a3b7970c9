"""Stage `cost`: time and memory of a row's model, beside the dense one and the one without operators.

Reads the model and the row's adapter. The models are measured in one process and take turns, so that what slows the
machine down for a while slows all of them. Writes ``data/cost/<key>.parquet``. Unlike any other artifact it depends on
the machine, which it names.
"""

import time
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from tqdm import tqdm
from transformers import PreTrainedModel

from stages.allocations import peak_allocation
from stages.base.decoder import input_device
from stages.project import params
from stages.project.artifacts import write_table
from stages.project.errors import run
from stages.project.keys import Row, parse_key
from stages.project.paths import cost_file
from stages.project.schemas import COST
from stages.project.sections import Cost
from stages.recovered.boundary_operator import BoundaryOperator
from stages.recovered.patched import load_compared
from stages.weights import operator_parameters, parameters, weight_bytes

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    )
}
"""What torch's counter does not know, unlike the operations that other devices use for the same."""


def main() -> None:
    """Run the stage for one row."""
    key = parse_key(__doc__)
    settings = params.load()
    params.check_name("params.yaml: cost.rows", key, settings.cost.rows)
    row = settings.row(key)
    models = dict(load_compared(row, settings))
    frame = measure(models, settings.cost)
    frame = frame.assign(
        dtype=settings.models[row.model].dtype,
        device=describe(input_device(models[Row(row.model)])),
        threads=torch.get_num_threads(),
    )
    write_table(cost_file(row), frame, COST)


def describe(device: torch.device) -> str:
    """Type of a device, and its name where it has one."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device.type} {name(device)}" if name else device.type


@torch.no_grad()
def measure(models: dict[Row, PreTrainedModel], wanted: Cost) -> pd.DataFrame:
    """Sizes and, in `wanted.repeats` turns, times of every model: columns of ``stages.project.schemas.COST``."""
    prompts, sizes = {}, {}
    for row, model in models.items():
        # Any tokens do: a dense model's time does not depend on them.
        ids = torch.arange(wanted.batch_size * wanted.prompt_tokens) % model.config.vocab_size
        prompts[row] = ids.view(wanted.batch_size, wanted.prompt_tokens).to(input_device(model))
        sizes[row] = size(model, prompts[row], wanted.new_tokens)
    records: list[dict[str, Any]] = []
    for repeat in tqdm(range(wanted.repeats), desc="turns", leave=False):
        for row, model in models.items():
            started = now()
            cache, token = prefill(model, prompts[row])
            filled = now()
            decode(model, cache, token, wanted.new_tokens)
            times = {"repeat": repeat, "prefill_seconds": filled - started, "decode_seconds": now() - filled}
            records.append({**row.columns(), **times, **sizes[row]})
    settings = {name: getattr(wanted, name) for name in ("batch_size", "prompt_tokens", "new_tokens")}
    return pd.DataFrame(records).assign(**settings)


def size(model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> dict[str, int]:
    """Parameters, bytes and floating-point operations of a model; runs it once, which warms it up."""
    weights = weight_bytes(model)
    peak = peak_allocation(lambda: decode(model, *prefill(model, prompts), new_tokens))
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        prefill(model, prompts)
    operators = [module for module in model.modules() if isinstance(module, BoundaryOperator)]
    matrices = [part for operator in operators for part in operator.parameters() if part.dim() == 2]
    return {
        "parameters": parameters(model),
        "operator_parameters": operator_parameters(model),
        "weight_bytes": weights,
        "peak_bytes": weights + peak,
        "prefill_flops": counter.get_total_flops(),
        "operator_flops": sum(2 * matrix.numel() * prompts.numel() for matrix in matrices),
    }


def prefill(model: PreTrainedModel, prompts: Tensor) -> tuple[Any, Tensor]:
    """One pass over `prompts`, [batch, tokens]: the cache, and the likeliest next token of each, [batch, 1]."""
    output = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
    return output.past_key_values, output.logits[:, -1:].argmax(-1)


def decode(model: PreTrainedModel, cache: Any, token: Tensor, new_tokens: int) -> None:
    """`new_tokens` passes of one token per sequence each, every one the likeliest after the one before."""
    for _ in range(new_tokens):
        token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)


def now() -> float:
    """Seconds on a clock, once the device has done what it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    run(main)
