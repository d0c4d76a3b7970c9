"""The stage `cost`: what it counts, by hand."""

from collections.abc import Callable

import pytest
from conftest import CHANNELS, LAYERS, VOCABULARY
from test_bridged import INNER, RANK
from test_bridged import bridges_of as bridges_of_kind
from test_patched import bridges_of
from transformers import PreTrainedModel

from stages.cost import measure
from stages.project.keys import Row
from stages.project.sections import Cost
from stages.recovered.patched import patch_model

BATCH, PROMPT, NEW, REPEATS = 2, 8, 3, 2
HEADS, KEY_VALUE, MLP = 4, 2, 32
DENSE, BARE, GHOST = Row("tiny"), Row("tiny", "streamline", 2), Row("tiny", "streamline", 2, "ghost")


@pytest.fixture
def measured(tiny_model: Callable[..., PreTrainedModel]):
    models = {row: tiny_model() for row in (DENSE, BARE, GHOST)}
    patch_model(models[BARE], [2, 3], {})
    patch_model(models[GHOST], [2, 3], bridges_of([2, 3]))
    wanted = Cost(rows=[GHOST.key], batch_size=BATCH, prompt_tokens=PROMPT, new_tokens=NEW, repeats=REPEATS)
    return measure(models, wanted).set_index(["criterion", "operator", "repeat"])


def test_sizes_and_operations(measured) -> None:
    key_value = CHANNELS * KEY_VALUE // HEADS
    of_layer = 2 * CHANNELS * CHANNELS + 2 * CHANNELS * key_value + 3 * CHANNELS * MLP
    # Queries times keys and weights times values, every position with every one.
    attention = 2 * 2 * BATCH * PROMPT * PROMPT * CHANNELS
    head = 2 * CHANNELS * VOCABULARY * BATCH

    def flops(layers: int) -> int:
        return layers * (2 * of_layer * BATCH * PROMPT + attention) + head

    dense, bare, ghost = (measured.loc[(row.criterion, row.operator, 0)] for row in (DENSE, BARE, GHOST))
    operator = 2 * CHANNELS**2 * BATCH * PROMPT
    assert dense["prefill_flops"] == flops(LAYERS)
    assert bare["prefill_flops"] == flops(LAYERS - 2)
    assert ghost["prefill_flops"] == flops(LAYERS - 2) + operator
    assert (dense["operator_flops"], bare["operator_flops"], ghost["operator_flops"]) == (0, 0, operator)
    assert ghost["parameters"] - bare["parameters"] == ghost["operator_parameters"] == CHANNELS**2
    assert dense["parameters"] - bare["parameters"] == 2 * (of_layer + 2 * CHANNELS)
    assert ghost["weight_bytes"] - bare["weight_bytes"] == 4 * CHANNELS**2
    cache_of_two_layers = 2 * 2 * BATCH * (PROMPT + NEW) * key_value * 4
    beside = [row["peak_bytes"] - row["weight_bytes"] for row in (dense, bare)]
    assert 0 < beside[1] <= beside[0] <= beside[1] + cache_of_two_layers


def test_models_take_turns(measured) -> None:
    order = [(operator, repeat) for _, operator, repeat in measured.index]
    assert order == [("none", 0), ("none", 0), ("ghost", 0), ("none", 1), ("none", 1), ("ghost", 1)]
    assert (measured[["prefill_seconds", "decode_seconds"]] > 0).all(axis=None)


@pytest.mark.parametrize(
    ("kind", "parameters", "multiplied"),
    [
        ("factors", 2 * CHANNELS * RANK, 2 * CHANNELS * RANK),
        ("matrix and bias", CHANNELS**2 + CHANNELS, CHANNELS**2),
        ("factors and bias", 2 * CHANNELS * RANK + CHANNELS, 2 * CHANNELS * RANK),
        ("projection", 0, 0),
        ("all", 2 * CHANNELS * RANK + CHANNELS, 2 * CHANNELS * RANK),
    ],
)
def test_sizes_and_operations_of_other_bridges(
    kind: str, parameters: int, multiplied: int, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    """A bias costs no product; a new down projection, what the old one did."""
    assert MLP == INNER
    models = {row: tiny_model() for row in (BARE, GHOST)}
    patch_model(models[BARE], [2, 3], {})
    patch_model(models[GHOST], [2, 3], bridges_of_kind([2, 3], kind))
    wanted = Cost(rows=[GHOST.key], batch_size=BATCH, prompt_tokens=PROMPT, new_tokens=NEW, repeats=1)
    bare, bridged = (row for _, row in measure(models, wanted).iterrows())
    assert bridged["operator_parameters"] == bridged["parameters"] - bare["parameters"] == parameters
    assert bridged["weight_bytes"] - bare["weight_bytes"] == 4 * parameters
    assert bridged["operator_flops"] == bridged["prefill_flops"] - bare["prefill_flops"]
    assert bridged["operator_flops"] == 2 * multiplied * BATCH * PROMPT
