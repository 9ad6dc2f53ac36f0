"""The ledger: where hftrainer and transformers differ on purpose, each with its reason.

Parity tests read it; `COMPATIBILITY.md` says the same to users.
"""

#: Keys of log lines that are measured times: equal in name, never in value.
MEASURED = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")

#: What must differ → why.
DIFFERENCES = {
    "README.md of a PEFT adapter": (
        "PEFT writes the library versions that it finds into it; both libraries let PEFT write it, so it is compared by "
        "name only."
    ),
    "training_args.bin": "Pickles the TrainingArguments class, which is another one; compared by name only.",
    "metrics returned by train() with disable_tqdm": (
        "PrinterCallback of transformers removes total_flos from the very dict that train() returns; ours prints a copy."
    ),
    "compute_loss(model, inputs) of v4.1": (
        "transformers 5.23 calls compute_loss with num_items_in_batch and fails on an override without it; ours calls "
        "each override by its own signature, and divides its loss by the micro-batches of the window."
    ),
    "empty evaluation set": "transformers returns metrics without a loss; ours says that there is no batch.",
    "predict() outside training": (
        "It runs Lightning's prediction loop, whose callbacks see predict hooks; numbers and events are the same."
    ),
}
