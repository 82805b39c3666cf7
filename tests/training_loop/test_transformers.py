"""Models of transformers and peft in a private training loop, against autograd on one example after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from flower_privdec.common.errors import ScenarioError
from flower_privdec.models.layers.model_outputs import Output
from flower_privdec.training_loop import private
from flower_privdec.training_loop.clipped_sum import ClippedSum
from tests.support.raising import raises

pytestmark = pytest.mark.slow  # transformers takes seconds to import
CLIP = 0.3
SMALL = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def text_classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(**SMALL, **size, max_position_embeddings=16, num_labels=3))


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], init_lora_weights=False)
    return get_peft_model(text_classifier(), config)


def language_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**SMALL, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def image_classifier() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(**shape, **size))


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:])


def texts(count: int = 6) -> dict[str, Tensor]:
    """Return token ids and masks of texts of several lengths, the first without padding, and labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 50, (count, 10), generator=generator)
    mask = (torch.arange(10) < torch.tensor([10, 7, 4, 9, 3, 5] * (count // 6))[:, None]).long()
    labels = torch.arange(count) % 3
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


def problem(kind: str) -> tuple[nn.Module, dict[str, Tensor], Tensor, Any]:
    """Return a model, its inputs, the targets and the criterion."""
    torch.manual_seed(0)
    batch = texts()
    labels = batch.pop("labels")
    if kind == "language":
        return language_model(), batch, batch["input_ids"], next_token
    if kind == "image":
        return image_classifier(), {"pixel_values": torch.randn(6, 1, 8, 8)}, labels, nn.CrossEntropyLoss()
    make = adapted if kind == "adapted" else text_classifier
    return make(), batch, labels, nn.CrossEntropyLoss()


@pytest.mark.parametrize("kind", ["text", "adapted", "language", "image"])
def test_clipped_sums_are_those_of_single_examples(kind: str) -> None:
    model, inputs, targets, criterion = problem(kind)
    model = model.double().eval()  # without dropout, so that both compute the same
    if "pixel_values" in inputs:
        inputs = {name: value.double() for name, value in inputs.items()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    expected = torch.zeros(sum(parameter.numel() for parameter in trained.values()), dtype=torch.float64)
    for b in range(len(targets)):
        model.zero_grad()
        outputs = model(**{name: value[b : b + 1] for name, value in inputs.items()})
        criterion(outputs.logits, targets[b : b + 1]).backward()
        row = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in trained.values()])
        expected += row * min(1.0, CLIP / row.norm().item())
    model.zero_grad()

    total, examples = ClippedSum(model, trained, criterion, CLIP, way="vmap")([], inputs, [Output(), targets])
    assert examples == len(targets)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-11)


def fit(model: nn.Module, folder: Path, step: Any, criterion: Any = None, rows: Any = None, collate: Any = None) -> Any:
    """Train by `private` on tokenized texts; return what it returned."""
    from datasets import Dataset

    if rows is None:
        columns = {name: value.tolist() for name, value in texts(24).items()}
        rows = Dataset.from_dict(columns).with_format("torch")
    loader = DataLoader(rows, batch_size=8, collate_fn=collate)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    budget = {"epsilon": 30.0, "delta": 1e-3, "rounds": 1, "report": lambda line: None}
    parts = private(model, optimizer, loader, criterion or nn.CrossEntropyLoss(), ledger=folder / "a.jsonl", **budget)
    for batch in parts.data_loader:
        parts.optimizer.zero_grad()
        step(parts, batch).backward()
        parts.optimizer.step()
    return parts


def by_logits(parts: Any, batch: dict[str, Tensor]) -> Tensor:
    labels = batch.pop("labels")
    return parts.criterion(parts.model(**batch).logits, labels)


def test_only_adapters_and_head_are_trained(tmp_path: Path) -> None:
    model = adapted()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    parts = fit(model, tmp_path, by_logits)  # with dropout
    assert "items: proved separate" in str(parts)
    assert parts.allowed == 0
    for name, parameter in model.named_parameters():
        is_added = "lora_" in name or "modules_to_save" in name
        assert is_added == parameter.requires_grad, name
        assert is_added != torch.equal(parameter, before[name]), name


def test_padding_to_the_longest_is_refused_with_its_remedy(tmp_path: Path) -> None:
    from transformers import BertTokenizer, DataCollatorWithPadding

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(20))]
    (tmp_path / "words.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = BertTokenizer(str(tmp_path / "words.txt"))
    rows = [{**tokenizer(" ".join(words[5 : 6 + i % 7])), "label": i % 2} for i in range(24)]
    with raises(ScenarioError, "training-loop.collate-mixes", "padding='max_length', max_length="):
        fit(text_classifier(), tmp_path, by_logits, rows=rows, collate=DataCollatorWithPadding(tokenizer))
    assert not list(tmp_path.glob("*.jsonl"))  # and costs nothing
    fixed = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=10)
    fit(text_classifier(), tmp_path, by_logits, rows=rows, collate=fixed)


def of_its_own_loss(parts: Any, batch: dict[str, Tensor]) -> Any:
    return parts.model(**batch).loss


def of_all_outputs(parts: Any, batch: dict[str, Tensor]) -> Any:
    labels = batch.pop("labels")
    return parts.criterion(parts.model(**batch), labels)


@pytest.mark.parametrize(
    ("step", "refusal"),
    [
        (of_its_own_loss, ("training-loop.loss-in-model",)),
        (of_all_outputs, ("training-loop.batch-of-one", r"criterion\(outputs.logits, targets\)")),
    ],
)
def test_a_loss_of_the_batch_is_refused(step: Any, refusal: tuple[str, ...], tmp_path: Path) -> None:
    with raises(ScenarioError, *refusal):
        fit(text_classifier(), tmp_path, step)
    assert not list(tmp_path.iterdir())  # and costs nothing
