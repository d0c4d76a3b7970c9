"""Criteria that ask the model itself, against plain computations with models of their own."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import CHANNELS, LAYERS, VOCABULARY
from test_patched import architectures, logits
from torch import Tensor
from transformers import PreTrainedModel

from stages.base.decoder import decoder_layers, decoder_stack, remove_layers, residual_states
from stages.blocks import best_sets, fit, residuals
from stages.boundaries import Segment
from stages.criteria import magnitude, perplexity, residual, streamline, taylor
from stages.project.errors import UserError
from stages.score import pairwise_similarity

Build = Callable[..., PreTrainedModel]
ALLOWED = range(1, LAYERS)
"""The first layer is protected; not the last one, behind which no layer is left."""
BATCHES = ("1", "60", "100000")
"""Tokens in one forward pass: one sequence, a few that do not divide their number, all."""


@pytest.fixture(scope="module")
def calibration() -> list[list[int]]:
    """16 sequences of 24 token ids."""
    ids = torch.randint(3, VOCABULARY, (16, 24), generator=torch.Generator().manual_seed(7))
    found: list[list[int]] = ids.tolist()
    return found


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, float]]:
    """What the criteria choose the lowest of, call by call."""
    seen: list[dict[int, float]] = []
    for module in (perplexity, taylor, magnitude):
        lowest = module.lowest

        def record(series: "pd.Series[float]", n: int, lowest: Any = lowest) -> list[int]:
            seen.append({int(layer): float(value) for layer, value in series.items()})
            return lowest(series, n)

        monkeypatch.setattr(module, "lowest", record)
    return seen


def loss(model: PreTrainedModel, sequences: list[list[int]]) -> Tensor:
    """Negative log-likelihood of the sequences, nats: float64, one sequence after the other."""
    total = torch.zeros((), dtype=torch.float64)
    for ids in sequences:
        predicted = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        total = total - predicted[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum()
    return total


@torch.no_grad()
def losses(build: Build, architecture: str, sequences: list[list[int]], gone: list[int]) -> dict[int, float]:
    """The loss without every layer that may go, beside those gone, of a new model each."""
    found = {}
    for layer in sorted(set(ALLOWED) - set(gone)):
        model = build(architecture)
        remove_layers(model, [*gone, layer])
        found[layer] = loss(model, sequences).item()
    return found


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Everything that removing layers touches."""
    layers = list(decoder_layers(model))
    indices = [[m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")] for layer in layers]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return [id(layer) for layer in layers], indices, model.config.to_dict(), list(model.state_dict()), hooks


@architectures
def test_perplexity_once(
    architecture: str,
    tiny_model: Build,
    calibration: list[list[int]],
    values: list[dict[int, float]],
    token_ids: Tensor,
) -> None:
    model = tiny_model(architecture)
    before, answer = state_of(model), logits(model, token_ids)
    found = perplexity.search(model, calibration, 3, ALLOWED, method="once", sequences=2)
    expected = losses(tiny_model, architecture, calibration[:2], [])
    assert values == [pytest.approx(expected, rel=1e-5)]
    assert found == sorted(sorted(expected, key=expected.__getitem__)[:3])
    assert state_of(model) == before
    assert torch.equal(logits(model, token_ids), answer)


@architectures
def test_perplexity_greedy(
    architecture: str,
    tiny_model: Build,
    calibration: list[list[int]],
    values: list[dict[int, float]],
    token_ids: Tensor,
) -> None:
    model = tiny_model(architecture)
    before, answer = state_of(model), logits(model, token_ids)
    found = perplexity.search(model, calibration, 3, ALLOWED, method="greedy", sequences=2)
    gone: list[int] = []
    for step in range(3):
        expected = losses(tiny_model, architecture, calibration[:2], gone)
        assert values[step] == pytest.approx(expected, rel=1e-5)
        gone.append(min(expected, key=expected.__getitem__))
    assert found == gone
    assert state_of(model) == before
    assert torch.equal(logits(model, token_ids), answer)


def test_once_and_greedy_are_two_methods(tiny_model: Build, calibration: list[list[int]]) -> None:
    """On this model they differ, so that no test above could pass with one for the other."""
    found = [
        sorted(perplexity.search(tiny_model("mistral"), calibration, 3, ALLOWED, method=method, sequences=2))
        for method in ("greedy", "once")
    ]
    assert found[0] != found[1]


def test_perplexity_that_is_not_finite_names_the_layers(tiny_model: Build, calibration: list[list[int]]) -> None:
    model = tiny_model()
    with torch.no_grad():
        decoder_layers(model)[3].mlp.down_proj.weight[0, 0] = float("nan")
    before = state_of(model)
    with pytest.raises(UserError, match=r"calibration, without layers \[1\], window 0: the negative log-likelihood"):
        perplexity.search(model, calibration, 2, ALLOWED, method="once", sequences=2)
    assert state_of(model) == before


@architectures
@pytest.mark.parametrize("batch", BATCHES)
def test_taylor(
    architecture: str,
    batch: str,
    tiny_model: Build,
    calibration: list[list[int]],
    values: list[dict[int, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GHOSTED_BATCH_TOKENS", batch)
    found = taylor.search(tiny_model(architecture), calibration, 2, ALLOWED, sequences=5)
    exact = tiny_model(architecture).double()
    loss(exact, calibration[:5]).backward()
    expected = {
        layer: sum(
            (weight * weight.grad).abs().sum().item()
            for weight in decoder_layers(exact)[layer].parameters()
            if weight.dim() == 2
        )
        for layer in ALLOWED
    }
    assert values == [pytest.approx(expected, rel=1e-4)]
    assert found == sorted(sorted(expected, key=expected.__getitem__)[:2])


def test_taylor_of_gradients_that_are_not_finite(tiny_model: Build, calibration: list[list[int]]) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(UserError, match="layer 1: NaN or infinity in the gradients"):
        taylor.search(model, calibration, 2, ALLOWED, sequences=2)


def test_taylor_leaves_the_answers_as_they_were(
    tiny_model: Build, calibration: list[list[int]], token_ids: Tensor
) -> None:
    model = tiny_model()
    before, answer = state_of(model), logits(model, token_ids)
    taylor.search(model, calibration, 2, ALLOWED, sequences=2)
    assert state_of(model) == before
    assert torch.equal(logits(model, token_ids), answer)
    assert all(parameter.grad is None for parameter in model.parameters())


@architectures
def test_magnitude(
    architecture: str, tiny_model: Build, values: list[dict[int, float]], calibration: list[list[int]]
) -> None:
    model = tiny_model(architecture)
    expected = {
        layer: sum(
            abs(weight.detach().numpy().astype(np.float64)).sum()
            for weight in decoder_layers(model)[layer].parameters()
            if weight.ndim == 2
        )
        for layer in ALLOWED
    }
    found = magnitude.search(model, calibration, 2, ALLOWED)
    assert values == [pytest.approx(expected, rel=1e-12)]
    assert found == sorted(sorted(expected, key=expected.__getitem__)[:2])


# Selection by what an operator can repair.

BLOCKS = [Segment(start, start + 2) for start in range(1, LAYERS - 1)]


def ghost(pre: np.ndarray, post: np.ndarray) -> np.ndarray:
    """W = I + M of rows `pre` to rows `post`, with a ridge of 1e-9 of the Gram matrix' mean diagonal."""
    gram = pre.T @ pre
    ridge = 1e-9 * np.trace(gram) / CHANNELS * np.eye(CHANNELS)
    return np.eye(CHANNELS) + np.linalg.solve(gram + ridge, pre.T @ (post - pre))


@torch.no_grad()
def rows(model: PreTrainedModel, sequences: list[list[int]]) -> dict[int, np.ndarray]:
    """The residual states of all tokens, [tokens, C] float64."""
    with residual_states(model, range(LAYERS + 1)) as states:
        decoder_stack(model)(input_ids=torch.tensor(sequences), use_cache=False)
    return {index: state.double().flatten(0, 1).numpy() for index, state in states.items()}


@architectures
def test_operators_and_residuals_of_all_blocks(
    architecture: str, tiny_model: Build, calibration: list[list[int]]
) -> None:
    # In float64, where both must agree to rounding.
    model = tiny_model(architecture).double()
    changes = fit(model, calibration[:12], BLOCKS)
    found = residuals(model, calibration[12:], changes)
    before, held = rows(model, calibration[:12]), rows(model, calibration[12:])
    assert list(changes) == list(found) == BLOCKS
    for block in BLOCKS:
        operator = ghost(before[block.start], before[block.end])
        assert np.eye(CHANNELS) + changes[block].numpy() == pytest.approx(operator, abs=1e-8)
        error = ((held[block.start] @ operator - held[block.end]) ** 2).sum(axis=1)
        each = error / (held[block.end] ** 2).sum(axis=1)
        assert len(each) == 4 * 24
        assert found[block] == pytest.approx(each.mean(), rel=1e-8)


def test_operators_do_not_depend_on_the_batch(
    tiny_model: Build, calibration: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = tiny_model(), []
    for batch in BATCHES:
        monkeypatch.setenv("GHOSTED_BATCH_TOKENS", batch)
        changes = fit(model, calibration[:12], BLOCKS)
        found.append((changes, residuals(model, calibration[12:], changes)))
    for changes, values in found[1:]:
        assert values == pytest.approx(found[0][1], rel=1e-4)
        for block, change in changes.items():
            torch.testing.assert_close(change, found[0][0][block], rtol=1e-3, atol=1e-4)


def plant(model: PreTrainedModel) -> None:
    """Layers 2 and 3 become matrices whose product turns every state around: linear, and as unlike as can be."""
    generator = torch.Generator().manual_seed(11)
    rotation = torch.linalg.qr(torch.randn(CHANNELS, CHANNELS, generator=generator))[0]
    turn = -rotation.T @ (torch.eye(CHANNELS) + 0.05 * torch.randn(CHANNELS, CHANNELS, generator=generator))
    for index, matrix in ((2, rotation), (3, turn)):

        def apply(_module: Any, positional: Any, named: Any, _output: Any, matrix: Tensor = matrix) -> Tensor:
            state: Tensor = positional[0] if positional else named["hidden_states"]
            return state @ matrix

        decoder_layers(model)[index].register_forward_hook(apply, with_kwargs=True)


@architectures
def test_residual_finds_the_block_that_an_operator_repairs(
    architecture: str, tiny_model: Build, calibration: list[list[int]]
) -> None:
    model = tiny_model(architecture)
    plant(model)
    scores = pairwise_similarity(model, calibration, 1000)
    cosines = scores[scores["end"] - scores["start"] == 2].set_index("start")["cosine"]
    assert cosines.idxmin() == 2
    assert streamline.choose(scores, 2, ALLOWED) != [2, 3]
    assert residual.search(model, calibration, 2, ALLOWED, blocks=1, candidates=1) == [2, 3]
    found = residuals(model, calibration[12:], fit(model, calibration[:12], BLOCKS))
    assert found[Segment(2, 4)] < 1e-8
    assert min(value for block, value in found.items() if block != Segment(2, 4)) > 1e-3


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("blocks", "candidates"), [(1, 1), (1, 4), (2, 3)])
def test_residual_does_not_depend_on_the_batch(
    blocks: int,
    candidates: int,
    batch: str,
    tiny_model: Build,
    calibration: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    token_ids: Tensor,
) -> None:
    monkeypatch.delenv("GHOSTED_BATCH_TOKENS", raising=False)
    options = {"blocks": blocks, "candidates": candidates}
    expected = residual.search(tiny_model(), calibration, 2, ALLOWED, **options)
    monkeypatch.setenv("GHOSTED_BATCH_TOKENS", batch)
    model = tiny_model()
    before, answer = state_of(model), logits(model, token_ids)
    assert residual.search(model, calibration, 2, ALLOWED, **options) == expected
    assert state_of(model) == before
    assert torch.equal(logits(model, token_ids), answer)


@torch.no_grad()
def bridged_loss(build: Build, calibration: list[list[int]], *blocks: Segment) -> float:
    """The loss of the held-out sequences with each block's layers replaced, in the dense model, by its operator."""
    held = calibration[3::4]
    states = rows(build(), [ids for number, ids in enumerate(calibration) if number % 4 != 3])
    model = build()
    for block in blocks:
        operator = torch.from_numpy(ghost(states[block.start], states[block.end]))
        for index in range(*block):

            def replace(
                _module: Any, positional: Any, _output: Any, last: bool = index == block.end - 1, W: Tensor = operator
            ) -> Tensor:
                state: Tensor = positional[0]
                return (state.double() @ W).float() if last else state

            decoder_layers(model)[index].register_forward_hook(replace)
    return loss(model, held).item()


def test_candidates_are_ranked_by_perplexity_with_their_operator(
    tiny_model: Build, calibration: list[list[int]]
) -> None:
    expected = {block: bridged_loss(tiny_model, calibration, block) for block in BLOCKS}
    assert min(abs(a - b) for a in expected.values() for b in expected.values() if a != b) > 1e-2
    found = residual.search(tiny_model(), calibration, 2, ALLOWED, blocks=1, candidates=len(BLOCKS))
    assert found == list(range(*min(expected, key=expected.__getitem__)))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_the_best_sets_of_blocks_are_those_of_all_there_are(n: int, count: int) -> None:
    random = np.random.default_rng(n)
    values = {Segment(start, end): random.random() for start in range(1, 9) for end in range(start + 1, 10)}
    every = [
        (sum(values[block] for block in blocks), blocks)
        for blocks in itertools.combinations(sorted(values), count)
        if sum(block.end - block.start for block in blocks) == n
        and all(first.end < second.start for first, second in itertools.pairwise(blocks))
    ]
    expected = [blocks for _, blocks in sorted(every)]
    for keep in (1, 3, 1000):
        assert best_sets(values, n, count, keep) == expected[:keep]
    assert bool(expected) == (count <= n)


def test_several_blocks_are_compared_by_perplexity_with_their_operators(
    tiny_model: Build, calibration: list[list[int]]
) -> None:
    """The one of all pairs of layers, next to each other or not, without which the text is likeliest."""
    expected = {
        pair: bridged_loss(tiny_model, calibration, *(Segment(layer, layer + 1) for layer in pair))
        for pair in itertools.combinations(ALLOWED, 2)
        if pair[1] > pair[0] + 1
    }
    expected |= {
        (start, start + 1): bridged_loss(tiny_model, calibration, Segment(start, start + 2)) for start in ALLOWED[:-1]
    }
    ranked = sorted(expected.values())
    assert ranked[1] - ranked[0] > 1e-2
    found = residual.search(tiny_model(), calibration, 2, ALLOWED, blocks=2, candidates=100)
    assert tuple(found) == min(expected, key=expected.__getitem__)


def test_residual_holds_every_fourth_sequence_out(tiny_model: Build, calibration: list[list[int]]) -> None:
    model = tiny_model()
    rest = rows(model, [ids for number, ids in enumerate(calibration) if number % 4 != 3])
    held = rows(model, calibration[3::4])
    expected = {}
    for block in BLOCKS:
        error = held[block.start] @ ghost(rest[block.start], rest[block.end]) - held[block.end]
        expected[block] = ((error**2).sum(axis=1) / (held[block.end] ** 2).sum(axis=1)).mean()
    found = residual.search(model, calibration, 2, ALLOWED, blocks=1, candidates=1)
    assert found == list(range(*min(expected, key=expected.__getitem__)))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_sequences_to_hold_one_out(count: int, tiny_model: Build, calibration: list[list[int]]) -> None:
    with pytest.raises(UserError, match=rf"text.calibration.selection_sequences: .*at least 4.*found {count}"):
        residual.search(tiny_model(), calibration[:count], 2, ALLOWED, blocks=1, candidates=1)


def test_too_few_tokens_for_an_operator(tiny_model: Build, calibration: list[list[int]]) -> None:
    short = [ids[:4] for ids in calibration[:4]]
    with pytest.raises(UserError, match=r"12 calibration tokens are too few .* for 16 channels"):
        residual.search(tiny_model(), short, 2, ALLOWED, blocks=1, candidates=1)
