"""Models and data small enough to train in a second, the same each time."""

import torch
from torch import nn


class Plain(nn.Module):
    """Two layers with dropout; returns a mapping, or a tuple with `as_tuple`."""

    def __init__(self, as_tuple: bool = False) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        if self.as_tuple:
            return (logits,) if loss is None else (loss, logits)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


def make_plain() -> nn.Module:
    torch.manual_seed(1)
    return Plain()


def make_tuple() -> nn.Module:
    torch.manual_seed(1)
    return Plain(as_tuple=True)


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def make_peft() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    return get_peft_model(make_llama(), LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))


def plain_data(count: int = 38) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, generator=generator)
    y = torch.randint(0, 3, (count,), generator=generator)
    return [{"x": x[i], "labels": y[i]} for i in range(count)]


def text_data(count: int = 38) -> list[dict]:
    """Sequences of 12 tokens with a class."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (count, 12), generator=generator)
    y = torch.randint(0, 3, (count,), generator=generator)
    return [
        {"input_ids": ids[i], "attention_mask": torch.ones(12, dtype=torch.long), "label": int(y[i])}
        for i in range(count)
    ]


def language_data(count: int = 38) -> list[dict]:
    """Sequences of 12 tokens of which a varying number is to be predicted, so that windows differ in their items."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (count, 12), generator=generator)
    data = []
    for i in range(count):
        labels = ids[i].clone()
        labels[: i % 9] = -100
        data.append({"input_ids": ids[i], "attention_mask": torch.ones(12, dtype=torch.long), "labels": labels})
    return data


MODELS = {
    "plain": (make_plain, plain_data),
    "tuple": (make_tuple, plain_data),
    "bert": (make_bert, text_data),
    "llama": (make_llama, language_data),
    "peft": (make_peft, language_data),
}
