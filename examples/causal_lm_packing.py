"""Causal language model: a small Llama on Python's own manual, packed into blocks without padding.

    python examples/causal_lm_packing.py

The text is what `help()` shows, which comes with Python: half a million characters of English. Its documents are
joined, with an end mark between them, and cut into blocks of 64 tokens, so that every position is trained on. The
1,000 tokens of the vocabulary are guessed evenly at first (perplexity 1,000); half a minute brings the perplexity
below 100.
"""

import math
from itertools import chain
from pydoc_data.topics import topics

from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, default_data_collator

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed

BLOCK = 64
END = "<end>"


def make_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(documents, vocab_size=1000, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token=END, pad_token=END)


def pack(documents: list[str], tokenizer: PreTrainedTokenizerFast) -> list[dict]:
    """Blocks of the same length; what is left at the end is dropped."""
    tokens = list(chain.from_iterable(tokenizer(text + END)["input_ids"] for text in documents))
    blocks = [tokens[start : start + BLOCK] for start in range(0, len(tokens) - BLOCK + 1, BLOCK)]
    return [{"input_ids": block, "labels": block} for block in blocks]


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/causal_lm_packing",
        max_steps=300,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=100,
        save_steps=100,
        logging_steps=50,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    documents = [topics[name] for name in sorted(topics)]
    tokenizer = make_tokenizer(documents)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=BLOCK,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        data_collator=default_data_collator,
        train_dataset=pack(documents[:-8], tokenizer),
        eval_dataset=pack(documents[-8:], tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"Perplexity of documents not seen in training: {math.exp(trainer.evaluate()['eval_loss']):.0f}")

    prompt = tokenizer("The value of the", return_tensors="pt")
    written = trainer.model.generate(prompt["input_ids"], max_new_tokens=24, do_sample=True, top_k=20)
    print(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
