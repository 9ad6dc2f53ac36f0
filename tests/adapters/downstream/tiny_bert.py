"""BERT with two layers over the tiny language, made on the spot, for libraries that embed or classify sentences."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast

from tests.adapters.downstream.tiny_language import WORDS

MARKS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, with BERT's marks around a sentence or a pair."""
    numbers = {word: index for index, word in enumerate([*MARKS.values(), *WORDS])}
    made = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    ends = [(mark, numbers[mark]) for mark in ("[CLS]", "[SEP]")]
    made.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **MARKS)


def config(dropout: float = 0.0, **more: int) -> BertConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(MARKS) + len(WORDS), "max_position_embeddings": 32}
    return BertConfig(**sizes, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **more)


def save_bert(folder: Path, kind: type = AutoModel, dropout: float = 0.0, **more: int) -> str:
    """A model of `kind`, saved with its tokenizer in `folder`."""
    kind.from_config(config(dropout, **more)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
