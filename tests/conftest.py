"""Tiny random models of every supported architecture, a tokenizer trained on a few sentences, a poor device."""

import os
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

# Before transformers is imported, which reads it: code of checkpoints is copied there.
MODULES = TemporaryDirectory(prefix="modules-")
os.environ["HF_MODULES_CACHE"] = MODULES.name

import pytest  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

LAYERS = 6
CHANNELS = 16
VOCABULARY = 300

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": CHANNELS,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "sliding_window": 5}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "tie_word_embeddings": True},
    "mistral": {**GROUPED, "sliding_window": 5},
    "qwen2": {**GROUPED, **MIXED, "use_sliding_window": True},
    "qwen3": {**GROUPED, "head_dim": 4},
    "gemma3_text": {**GROUPED, **MIXED, "head_dim": 4},
    "phi3": GROUPED,
    "olmo2": GROUPED,
    "gpt_neox": {},
}

SENTENCES = [
    "The river rises in the hills and joins the sea near the old harbour.",
    "She was elected to the council in 1902 and served for twelve years.",
    "A layer of the model reads the residual stream and adds to it.",
    "The museum holds a collection of maps, letters and early photographs.",
    "In winter the lake freezes, and people cross it on foot.",
]


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """A function from an architecture to a new random model of six layers; the same weights each time.

    The weights are larger than a fresh model's, so that every layer matters.
    """

    def build(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
        settings = {**COMMON, **ARCHITECTURES.get(architecture, {}), **changes}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**settings))
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.3)
        model.tie_weights()
        return model.float().eval()

    return build


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 300 tokens with a BOS token that it does not add by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def token_ids() -> torch.Tensor:
    """Five sequences of twelve token ids, [5, 12]."""
    return torch.randint(3, VOCABULARY, (5, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def refuse_float64(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that has torch refuse float64 on the devices of one type, as it does on Apple's GPUs."""
    ones = torch.ones

    def refuse(kind: str) -> None:
        def without_float64(*size: int, dtype: torch.dtype | None = None, device: torch.device) -> torch.Tensor:
            if dtype == torch.float64 and device.type == kind:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
            return ones(*size, dtype=dtype, device=device)

        monkeypatch.setattr(torch, "ones", without_float64)

    return refuse
