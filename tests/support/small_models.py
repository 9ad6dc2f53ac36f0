"""Models and data small enough to train in a second, the same each time."""

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset


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


SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def make_plain() -> nn.Module:
    torch.manual_seed(1)
    return Plain()


def make_tuple() -> nn.Module:
    torch.manual_seed(1)
    return Plain(as_tuple=True)


def make_bert(kind: str = "BertForSequenceClassification", num_labels: int = 3) -> nn.Module:
    import transformers

    torch.manual_seed(1)
    config = transformers.BertConfig(**SIZES, max_position_embeddings=32, num_labels=num_labels)
    return getattr(transformers, kind)(config)


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    more = {"num_key_value_heads": 2, "max_position_embeddings": 32, "attention_dropout": 0.1}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more))


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
    mask = torch.ones(count, 12, dtype=torch.long)
    return [{"input_ids": ids[i], "attention_mask": mask[i], "label": int(y[i])} for i in range(count)]


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


class Detector(nn.Module):
    """Nested outputs, as a detection model's: a tensor, a dict, a tuple and a list, beside several labels."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 6)
        import transformers

        self.config = transformers.PretrainedConfig(keys_to_ignore_at_inference=["hidden"])

    def forward(self, x, labels=None, box_labels=None):
        scores = self.layer(x)
        boxes = {"corner": scores[:, :2], "size": (scores[:, 2:4], scores[:, 4:].double())}
        outputs = {"logits": scores, "boxes": boxes, "levels": [scores[:, :1], scores.argmax(-1)], "hidden": x}
        if labels is None:
            return outputs
        return {"loss": nn.functional.cross_entropy(scores, labels) + box_labels.mean(), **outputs}


def make_detector():
    torch.manual_seed(1)
    return Detector()


def detection_data(count=19):
    return [{**row, "box_labels": row["x"][:4]} for row in plain_data(count)]


def make_t5():
    import transformers

    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    return transformers.T5ForConditionalGeneration(config)


def t5_data(count=19):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 50, (count, 9), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[:5]} for row in ids]


def varied_language_data(count=19):
    """Samples of different lengths: each batch is padded to its own longest."""
    return [{key: value[: 4 + (i * 5) % 9] for key, value in row.items()} for i, row in enumerate(language_data(count))]


def pad(samples):
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: nn.utils.rnn.pad_sequence([sample[key] for sample in samples], batch_first=True, padding_value=fill[key])
        for key in samples[0]
    }


def pad_left(samples):
    """Pad at the left, as decoders need it: all prompts end together."""
    turned = pad([{name: value.flip(0) for name, value in sample.items()} for sample in samples])
    return {name: value.flip(1) for name, value in turned.items()}


def without_dropout(make_model):
    """Two processes would draw other dropout masks than one."""

    def make():
        model = make_model()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        return model

    return make


def tokenizer(**tokens):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", **tokens)


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(plain_data(self.count))


class SizedStream(Stream):
    def __len__(self):
        return self.count


class Noisy(Dataset):
    """Samples that draw random numbers when they are read."""

    def __init__(self, count=38):
        self.samples = plain_data(count)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return {**self.samples[index], "x": self.samples[index]["x"] + 0.01 * torch.randn(8)}


class ReadingStream(IterableDataset):
    """The samples of a dataset in their order; `read` is what the dataset notes."""

    def __init__(self, samples):
        self.samples, self.read = samples, getattr(samples, "read", None)

    def __iter__(self):
        return map(self.samples.__getitem__, range(len(self.samples)))


class StatefulStream(ReadingStream):
    """Continues after the samples of its state."""

    done = 0

    def __iter__(self):
        start, self.done = self.done, 0
        for index in range(start, len(self.samples)):
            self.done = index + 1
            yield self.samples[index]
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Note:
    def __init__(self):
        self.text = "kept"


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))

    def __len__(self):
        return self.count
