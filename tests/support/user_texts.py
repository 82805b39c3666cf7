"""Tokenized texts and models of several inputs, for tests: scenarios name them as `user_texts:name`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

VOCABULARY = 30
LENGTH = 8
SIZES = {"input_ids": VOCABULARY, "attention_mask": 2, "token_type_ids": 2}


def columns(count: int, seed: int = 1) -> dict[str, Any]:
    """Return texts by column, padded to LENGTH, whose first word says their class."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, LENGTH + 1, count)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    tokens = random.integers(3, VOCABULARY, (count, LENGTH)) * mask
    kinds = random.integers(0, 2, (count, LENGTH)) * mask
    labels = (tokens[:, 0] > VOCABULARY // 2).astype(np.int64)
    return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": kinds, "labels": labels}


def halves(part: str, root: str | None = None) -> dict[str, Any]:
    """Return texts of a half; each root has other ones."""
    seed = 0 if part == "test" else 1 + int(root or 0)
    return columns(60, seed)


class Reader(nn.Module):
    """The mean of the words that are no padding, as a model of transformers takes and returns it.

    The embedding is used twice, and the head's weight is one row of it for each class.
    """

    def __init__(self, *, tied: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 6, padding_idx=padding)
        self.kinds = nn.Embedding(2, 6)
        self.head = nn.Linear(6, VOCABULARY if tied else 2)
        if tied:
            self.head.weight = self.words.weight
        self.register_buffer("shift", torch.full((6,), 0.5))
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        """Return the logits [b, 2], and the words, by name."""
        words = self.words(input_ids) + self.kinds(token_type_ids) - self.shift
        is_read = attention_mask.unsqueeze(2).to(words)
        mean = (words * is_read).sum(1) / is_read.sum(1).clamp(min=1)
        return {"hidden": words, "logits": self.head(torch.tanh(self.scale * mean))[:, :2]}


def reader(**options: Any) -> nn.Module:
    """Return a small model of three inputs, whose outputs have logits."""
    return Reader(**options)


SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": 2, "max_position_embeddings": LENGTH}
NARROW = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def bert(kind: str = "float32") -> nn.Module:
    """Return a tiny model of transformers."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**SMALL, **NARROW)).eval()
    return model.to(getattr(torch, kind))


def adapted_bert() -> nn.Module:
    """Return it with adapters by peft, which are trained with the head."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], init_lora_weights=False)
    return get_peft_model(bert(), adapters).eval()


def image_classifier() -> nn.Module:
    """Return a tiny model of transformers for images of 8 by 8 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(**shape, **NARROW)).eval()


def bert_in_training() -> nn.Module:
    """Return it with dropout, as its constructor leaves it."""
    return bert().train()
