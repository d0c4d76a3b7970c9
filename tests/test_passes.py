"""The stages that forward the model: what they compute, how often they forward, and what they leave out."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ARCHITECTURES, CHANNELS, LAYERS
from torch import Tensor
from transformers import PreTrainedModel

from stages.base.decoder import decoder_layers, decoder_stack, down_projection, replace_weight, residual_states
from stages.boundaries import Segment
from stages.collect import collect
from stages.hadamard import hadamard
from stages.likelihood import window_nll
from stages.operators import ghost
from stages.project.errors import UserError
from stages.score import pairwise_similarity
from stages.sums import ALWAYS, MLP, BoundarySums, boundary_sums, mlp_sums

Build = Callable[..., PreTrainedModel]
Array = np.ndarray[Any, np.dtype[np.float64]]
SEGMENTS = [Segment(0, 2), Segment(3, 4)]


def figures(sums: dict[Segment, BoundarySums]) -> dict[str, Tensor]:
    """The sums of whole sequences sets by segment and name, whatever their halves."""
    found = {}
    for segment, of_segment in sums.items():
        found |= {f"{segment.name}.{name}": getattr(of_segment, name) for name in (*ALWAYS, "ratio_rotated")}
        found |= {f"{segment.name}.mlp.{name}": getattr(of_segment.mlp, name) for name in MLP if of_segment.mlp}
    return found


def count_tokens(model: PreTrainedModel) -> Counter[str]:
    """Counts, from now on, the tokens that enter each decoder layer and the language-model head."""
    seen: Counter[str] = Counter()

    def hook(name: str) -> Any:
        return lambda _module, positional, _output: seen.update({name: positional[0].shape[:2].numel()})

    for index, layer in enumerate(decoder_layers(model)):
        layer.register_forward_hook(hook(f"layer {index}"))
    model.get_output_embeddings().register_forward_hook(hook("head"))
    return seen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_similarity_against_the_states(architecture: str, tiny_model: Build, token_ids: Tensor) -> None:
    model = tiny_model(architecture)
    with torch.no_grad(), residual_states(model, range(LAYERS + 1)) as states:
        model(input_ids=token_ids)
    frame = pairwise_similarity(tiny_model(architecture), token_ids.tolist(), tokens=24)
    assert len(frame) == LAYERS * (LAYERS + 1) // 2
    assert (frame["tokens"] == 60).all()
    for row in frame.itertuples():
        a, b = states[row.start].double(), states[row.end].double()
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
        assert row.cosine == pytest.approx(cosine.mean().item(), abs=1e-6)
        assert row.angular == pytest.approx((cosine.arccos() / math.pi).mean().item(), abs=1e-5)


def test_score_forwards_each_token_once_and_no_head(tiny_model: Build, token_ids: Tensor) -> None:
    model = tiny_model()
    seen = count_tokens(model)
    pairwise_similarity(model, token_ids.tolist(), tokens=24)
    assert seen == {f"layer {index}": 60 for index in range(LAYERS)}


def test_collect_forwards_each_token_once_and_stops_after_the_last_boundary(
    tiny_model: Build, token_ids: Tensor
) -> None:
    model = tiny_model()
    seen = count_tokens(model)
    collect(model, token_ids.tolist(), SEGMENTS, tokens=24)
    assert seen == {f"layer {index}": 60 for index in range(4)}


def test_collected_sums_against_the_states(tiny_model: Build, token_ids: Tensor) -> None:
    model = tiny_model()
    with torch.no_grad(), residual_states(model, range(LAYERS + 1)) as states:
        model(input_ids=token_ids)
    expected = {
        segment: boundary_sums(states[segment.start].double(), states[segment.end].double(), hadamard(CHANNELS))
        for segment in SEGMENTS
    }
    found = figures(collect(model, token_ids.tolist(), SEGMENTS, tokens=1000))
    for name, tensor in figures(expected).items():
        assert torch.allclose(found[name], tensor, rtol=1e-6), name


@pytest.mark.parametrize("tokens", [1, 24, 36, 1000])
def test_halves_are_the_sequences_of_even_and_of_odd_number(tokens: int, tiny_model: Build, token_ids: Tensor) -> None:
    sequences = token_ids.tolist()
    whole = collect(tiny_model(), sequences, SEGMENTS, tokens)
    for half in (0, 1):
        expected = figures(collect(tiny_model(), sequences[half::2], SEGMENTS, tokens=1000))
        found = figures({segment: whole[segment].halves[half] for segment in SEGMENTS})
        for name, tensor in expected.items():
            assert torch.allclose(found[name], tensor, rtol=1e-5, atol=1e-8), name
    assert collect(tiny_model(), sequences[:1], SEGMENTS, tokens)[SEGMENTS[0]].halves is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sums_inside_the_layer_before_a_cut(architecture: str, tiny_model: Build, token_ids: Tensor) -> None:
    """X_pre = A + F D: what a layer computes without its down projection, and what that adds."""
    found = collect(tiny_model(architecture), token_ids.tolist(), SEGMENTS, 24, SEGMENTS)
    assert found[Segment(0, 2)].mlp is None
    if architecture in ("gemma3_text", "olmo2"):
        assert found[Segment(3, 4)].mlp is None
        return
    model = tiny_model(architecture)
    with torch.no_grad(), residual_states(model, [3, 4]) as states:
        module = down_projection(model, 2)
        inputs: list[Tensor] = []
        module.register_forward_pre_hook(lambda _module, given: inputs.append(given[0]))
        model(input_ids=token_ids)
    with torch.no_grad(), residual_states(model, [3]) as without:
        replace_weight(module, torch.zeros_like(module.weight))
        model(input_ids=token_ids)
    D = found[Segment(3, 4)].mlp.weight
    assert torch.allclose(states[3].double(), without[3].double() + inputs[0].double() @ D, atol=1e-5)
    expected = mlp_sums(inputs[0].double(), states[3].double(), states[4].double(), D)
    for name in MLP:
        assert torch.allclose(getattr(found[Segment(3, 4)].mlp, name), getattr(expected, name), rtol=1e-5, atol=1e-6)


def test_results_do_not_depend_on_batch_size(tiny_model: Build, token_ids: Tensor) -> None:
    sequences = token_ids.tolist()
    one, all_ = (pairwise_similarity(tiny_model(), sequences, tokens) for tokens in (1, 1000))
    assert one["cosine"].to_numpy() == pytest.approx(all_["cosine"].to_numpy(), abs=1e-7)
    first, second = (figures(collect(tiny_model(), sequences, SEGMENTS, tokens, SEGMENTS)) for tokens in (1, 1000))
    for name, tensor in first.items():
        assert torch.allclose(second[name], tensor, rtol=1e-5, atol=1e-8), name
    assert window_nll(tiny_model(), sequences, 1, "x") == pytest.approx(
        window_nll(tiny_model(), sequences, 1000, "x"), rel=1e-6
    )


def test_sequences_of_different_lengths_need_no_padding(tiny_model: Build, token_ids: Tensor) -> None:
    ragged = [token_ids[0].tolist(), token_ids[1, :7].tolist(), token_ids[2, :7].tolist()]
    together = figures(collect(tiny_model(), ragged, SEGMENTS, tokens=1000))
    parts = [collect(tiny_model(), [ids], SEGMENTS, tokens=1000) for ids in ragged]
    added = figures({segment: parts[0][segment] + parts[1][segment] + parts[2][segment] for segment in SEGMENTS})
    for name, tensor in added.items():
        assert torch.allclose(together[name], tensor, rtol=1e-5, atol=1e-8), name
    assert together["0-2.tokens"] == 26


def test_ids_as_parquet_gives_them(tiny_model: Build, token_ids: Tensor) -> None:
    arrays = [np.array(ids, dtype=np.int32) for ids in token_ids.tolist()]
    assert window_nll(tiny_model(), arrays, 24, "x") == window_nll(tiny_model(), token_ids.tolist(), 24, "x")


HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def exact_states(model: PreTrainedModel, ids: Tensor) -> dict[int, Array]:
    """Every residual state of one forward pass, [sequences, tokens, C], its values as they are, in float64."""
    with torch.no_grad(), residual_states(model, range(LAYERS + 1)) as states:
        decoder_stack(model)(input_ids=ids)
    assert {state.dtype for state in states.values()} == {model.dtype}
    return {index: state.float().numpy().astype(np.float64) for index, state in states.items()}


@HALF
def test_half_precision_states_are_upcast_before_their_similarity(
    dtype: torch.dtype, tiny_model: Build, token_ids: Tensor
) -> None:
    model = tiny_model().to(dtype)
    states = exact_states(model, token_ids)
    frame = pairwise_similarity(model, token_ids.tolist(), tokens=1000)
    unit = {index: state / np.linalg.norm(state, axis=-1, keepdims=True) for index, state in states.items()}
    rounded = {index: torch.from_numpy(state).to(dtype) for index, state in states.items()}
    without = []
    for row in frame.itertuples():
        cosine = (unit[row.start] * unit[row.end]).sum(axis=-1).clip(-1, 1)
        assert row.cosine == pytest.approx(cosine.mean(), abs=1e-13)
        assert row.angular == pytest.approx((np.arccos(cosine) / np.pi).mean(), abs=1e-9)
        in_dtype = torch.nn.functional.cosine_similarity(rounded[row.start], rounded[row.end], dim=-1).mean().item()
        without.append(abs(in_dtype - row.cosine))
    assert max(without) > 1e-4, "the test does not tell an upcast from none"


@HALF
def test_half_precision_states_are_upcast_before_their_sums(
    dtype: torch.dtype, tiny_model: Build, token_ids: Tensor
) -> None:
    model = tiny_model().to(dtype)
    states = exact_states(model, token_ids)
    found = collect(model, token_ids.tolist(), SEGMENTS, tokens=1000)
    H = hadamard(CHANNELS).numpy()
    for segment in SEGMENTS:
        pre, post = states[segment.start], states[segment.end]
        x, y = pre.reshape(-1, CHANNELS), post.reshape(-1, CHANNELS)
        expected = {
            "gram": x.T @ x,
            "cross": x.T @ y,
            "post_square": (y**2).sum(),
            "pre_sum": x.sum(axis=0),
            "post_sum": y.sum(axis=0),
            "ratio": (abs(post).mean(axis=1) / abs(pre).mean(axis=1)).sum(axis=0),
            "ratio_rotated": (abs(post @ H).mean(axis=1) / abs(pre @ H).mean(axis=1)).sum(axis=0),
        }
        for name, value in expected.items():
            tensor = getattr(found[segment], name)
            assert tensor.dtype == torch.float64
            # Sums in float32 would be off by 1e-7.
            assert np.abs(tensor.numpy() - value).max() < 1e-13 * np.abs(value).max(), name
        solved = ghost.solve(found[segment], ridge=1e-6)
        change = np.linalg.solve(expected["gram"] + 1e-6 * np.eye(CHANNELS), expected["cross"] - expected["gram"])
        assert solved.numpy() == pytest.approx(np.eye(CHANNELS) + change, abs=1e-10)


def test_nll_is_the_models_own_loss(tiny_model: Build, token_ids: Tensor) -> None:
    model = tiny_model()
    found = window_nll(model, token_ids.tolist(), 24, "x")
    for ids, nll in zip(token_ids, found, strict=True):
        loss = model(input_ids=ids[None], labels=ids[None]).loss
        assert nll == pytest.approx(11 * loss.item(), rel=1e-6)


def test_infinite_nll_names_corpus_and_window(tiny_model: Build, token_ids: Tensor) -> None:
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(UserError, match="corpus wiki, window 0"):
        window_nll(model, token_ids.tolist(), 24, "corpus wiki")
