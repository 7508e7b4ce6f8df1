"""Networks of other libraries, small and with random weights. Where a library is not installed they
are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.zoo.entry import Sampler, Zoo, codes, reals

ZOO = Zoo()
TEXT, IMAGE, PICTURE = codes(9, 5), reals(2, 8, 8), reals(3, 32, 32)
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "num_labels": 3}
WORDS = {**SMALL, "vocab_size": 9, "max_position_embeddings": 8}
EXACT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PATCHES = {**SMALL, "image_size": 8, "patch_size": 4, "num_channels": 2}
GPT2 = {
    "vocab_size": 9, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "num_labels": 3, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": 9, "max_position_embeddings": 8, "dim": 8, "hidden_dim": 8, "n_layers": 2, "n_heads": 2,
    "num_labels": 3, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0,
}  # fmt: skip


class Logits(nn.Module):
    """A model's scores of classes; of a language model's, those after the last word."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        scores = self.model(x).logits
        return scores if scores.dim() == 2 else scores[:, -1]


def transformer(kind: str, task: str, settings: dict[str, Any], recompute: bool | None = None) -> nn.Module:
    """recompute: whether re-entrantly, if at all."""
    library = pytest.importorskip("transformers")
    model = getattr(library, kind + task)(getattr(library, kind + "Config")(**settings, use_cache=False))
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    return Logits(model.train())


def add(name: str, inputs: Sampler, *given: Any, **more: Any) -> None:
    ZOO.add(name, inputs, lambda: transformer(*given), **more)


CLASSIFICATION = "ForSequenceClassification"
add("BERT", TEXT, "Bert", CLASSIFICATION, WORDS | EXACT)
add("BERT with dropout", TEXT, "Bert", CLASSIFICATION, WORDS, draws=True)
add("BERT, recomputed", TEXT, "Bert", CLASSIFICATION, WORDS | EXACT, False)
add("BERT, recomputed re-entrantly", TEXT, "Bert", CLASSIFICATION, WORDS | EXACT, True)
add("BERT, recomputed with dropout", TEXT, "Bert", CLASSIFICATION, WORDS, False, draws=True)
add("GPT-2", TEXT, "GPT2", "LMHeadModel", GPT2, targets=codes(9))
add("GPT-2, recomputed", TEXT, "GPT2", "LMHeadModel", GPT2, False, targets=codes(9))
add("DistilBERT", TEXT, "DistilBert", CLASSIFICATION, DISTILBERT)
add("DistilBERT, recomputed", TEXT, "DistilBert", CLASSIFICATION, DISTILBERT, False)
add("ViT", IMAGE, "ViT", "ForImageClassification", PATCHES | EXACT)
add("ViT, recomputed", IMAGE, "ViT", "ForImageClassification", PATCHES | EXACT, False)
add("Llama", TEXT, "Llama", "ForCausalLM", WORDS, targets=codes(9))


def language(name: str, kind: str, task: str, settings: dict[str, Any], inputs: Sampler = TEXT, **more: Any) -> None:
    """A model as its library gives it, with a loss of its outputs."""

    def build() -> nn.Module:
        library = pytest.importorskip("transformers")
        return getattr(library, kind + task)(getattr(library, kind + "Config")(**settings)).train()

    ZOO.add(name, inputs, build, loss=_next_words, **more)


def _next_words(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {
    "vocab_size": 9, "d_model": 8, "max_position_embeddings": 8, "decoder_start_token_id": 1, **TOKENS,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8, "decoder_ffn_dim": 8,
}  # fmt: skip
language("GPT-2 with its cache", "GPT2", "LMHeadModel", GPT2, targets=codes(9, 5))
language("BART", "Bart", "ForConditionalGeneration", BART, targets=codes(9, 5), draws=True)


def vision(kind: str, *given: Any, **settings: Any) -> nn.Module:
    return getattr(pytest.importorskip("torchvision").models, kind)(*given, num_classes=3, **settings)


NARROW = [[1, 8, 1, 1], [2, 8, 1, 2]]
TINY = {"growth_rate": 4, "block_config": (2, 2), "num_init_features": 4}
ZOO.add(
    "MobileNetV2", PICTURE,
    lambda: vision("MobileNetV2", width_mult=0.1, inverted_residual_setting=NARROW, dropout=0.0), pairs=True,
)  # fmt: skip
ZOO.add("DenseNet", PICTURE, lambda: vision("DenseNet", **TINY), pairs=True)
ZOO.add("DenseNet, recomputed", PICTURE, lambda: vision("DenseNet", **TINY, memory_efficient=True), pairs=True)
ZOO.add("ShuffleNetV2", PICTURE, lambda: vision("ShuffleNetV2", [1, 1, 1], [4, 8, 8, 8, 16]), pairs=True)
ZOO.add("torchvision's ViT", PICTURE, lambda: vision("VisionTransformer", 32, 16, 1, 2, 8, 8))
