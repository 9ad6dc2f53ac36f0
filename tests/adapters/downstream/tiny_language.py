"""A language of few words: its tokenizer, models for it and data, made on the spot from configurations."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MistralConfig,
    PreTrainedTokenizerFast,
)

WORDS = (
    "the a small large red blue old young cat dog bird fish house river sees likes finds leaves runs sleeps sings "
    "what who where does today yesterday always never very quite and but here there yes no"
).split()
MARKS = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
ROLES = ["<system>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + ' <end>' }}{% endgeneration %}{{ ' ' }}{% else %}{{ message['content'] + ' <end> ' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, with marks for the turns of a conversation."""
    words = [*MARKS.values(), *ROLES, *WORDS]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=MARKS["unk_token"]))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, additional_special_tokens=ROLES, chat_template=TEMPLATE, model_max_length=64, **MARKS
    )


def sentence(index: int, length: int = 6) -> str:
    return " ".join(WORDS[(index * 7 + place * (index % 5 + 3)) % len(WORDS)] for place in range(length))


def user(index: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": sentence(index)}]


def assistant(index: int) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": sentence(index + 50, 3 + index % 4)}]


def save_model(folder: Path, labels: int | None = None) -> str:
    """A causal language model of two layers, or a classifier with `labels`, saved with its tokenizer in `folder`."""
    words = tokenizer()
    config = MistralConfig(  # a kind whose tokenizer is loaded as it was saved
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
        **({} if labels is None else {"num_labels": labels}),
    )
    kind = AutoModelForCausalLM if labels is None else AutoModelForSequenceClassification
    kind.from_config(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)
