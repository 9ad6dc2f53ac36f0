"""DPO, with TRL: teach a small language model which answers are preferred, on this Trainer.

    pip install trl
    python -m hftrainer run examples/dpo.py

The script knows nothing of hftrainer: `run` gives TRL its Trainer. Asked for a colour or a number, the model, which
has random weights, is to prefer a word of that kind to any other. It does so for more than 90% of new questions, 50%
before.
"""

import os
import random

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, TrlParser

KINDS = {
    "colour": ["red", "blue", "green", "white", "black", "yellow"],
    "number": ["one", "two", "three", "four", "five", "six"],
}
REQUESTS = ["name a KIND", "say a KIND", "please name any KIND", "which KIND do you like", "tell me a KIND today"]
SPECIAL = ["<pad>", "<unk>", "<end>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    texts = [*REQUESTS, *KINDS, *(word for kind in KINDS.values() for word in kind)]
    words = SPECIAL + sorted({word for text in texts for word in text.split()})
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>", model_max_length=32
    )


def make_row(rng: random.Random) -> dict[str, str]:
    wanted, other = rng.sample(list(KINDS), 2)
    prompt = rng.choice(REQUESTS).replace("KIND", wanted)
    return {"prompt": prompt, "chosen": f" {rng.choice(KINDS[wanted])}", "rejected": f" {rng.choice(KINDS[other])}"}


def main() -> None:
    parser = TrlParser(DPOConfig)
    parser.set_defaults(
        output_dir="demo_output/dpo",
        max_steps=120,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=50,
        learning_rate=2e-3,
        eval_strategy="steps",
        eval_steps=40,
        save_steps=40,
        logging_steps=20,
        beta=0.1,
        bf16=False,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    tokenizer = make_tokenizer()
    rng = random.Random(0)
    rows = [make_row(rng) for _ in range(1100)]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = os.path.join(args.output_dir, "start")
    LlamaForCausalLM(config).save_pretrained(folder)
    trainer = DPOTrainer(
        folder,  # it loads a second one, to stay close to
        args=args,
        train_dataset=Dataset.from_list(rows[:1000]),
        eval_dataset=Dataset.from_list(rows[1000:]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"Preferred answers ranked first: {trainer.evaluate()['eval_rewards/accuracies']:.3f}")


if __name__ == "__main__":
    main()
