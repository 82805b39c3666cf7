#!/usr/bin/env bash
# transformers 5.24.0: a BERT with an attention mask cannot run under torch.func.vmap, whatever attention is chosen.
#
# Expected: `attn_implementation="eager"` computes attention from plain tensor operations, so gradients of single
# examples by vmap(grad(...)), as differential privacy needs them, work; that "sdpa" may not is widely known.
# Seen: bidirectional models (BERT, DistilBERT) look with either choice whether the padding mask is all ones, in an
# `if`, to leave it out. vmap raises at that. Causal models (GPT-2) raise with "sdpa" and work with "eager". Without a
# mask all of them work.
# Here: under vmap transformers is told to leave out no mask, so BERT trains privately with "sdpa" and "eager".
#
# Runs transformers on its own, on models with random weights. Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.15.0 transformers==5.24.0 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import torch
from torch.func import functional_call, grad, vmap
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

ATTENTION = ("eager", "sdpa")


def bert(attention):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=50, attn_implementation=attention, **sizes))


def distilbert(attention):
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=50, attn_implementation=attention, **sizes))


def gpt2(attention):
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, attn_implementation=attention, **sizes))


def works(model, masked):
    tokens = torch.arange(48).reshape(4, 12)
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[1, 8:] = 0
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def total(parameters, tokens, mask):
        inputs = {"input_ids": tokens[None]}
        if masked:
            inputs["attention_mask"] = mask[None]
        return functional_call(model, parameters, (), inputs).logits.sum()

    try:
        vmap(grad(total), (None, 0, 0), randomness="different")(parameters, tokens, mask)
    except RuntimeError as error:
        print(f"  {str(error).splitlines()[0][:110]}")
        return False
    return True


found = {}
for build in (bert, distilbert, gpt2):
    for attention in ATTENTION:
        for masked in (True, False):
            found[build.__name__, attention, masked] = works(build(attention), masked)
            print(build.__name__, attention, "with a mask" if masked else "without", found[build.__name__, attention, masked])

expected = {
    (name, attention, masked): not masked or (name == "gpt2" and attention == "eager")
    for name in ("bert", "distilbert", "gpt2")
    for attention in ATTENTION
    for masked in (True, False)
}
raise SystemExit(found != expected)
PYTHON
"$folder/env/bin/python" "$folder/show.py"
