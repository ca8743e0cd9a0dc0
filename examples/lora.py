"""Prune a model, fine-tune it on a second task with LoRA, and merge without filling its zeros.

python examples/lora.py [--quick]
"""

import sys
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import probmask
from probmask.integrations.transformers import default_exclude

torch.set_num_threads(1)  # faster for matrices as small as these
QUICK = "--quick" in sys.argv
STEPS = 6 if QUICK else 250
WORDS, LENGTH = 30, 8
warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)  # of peft


def batch(task, size=32):
    """Return random sentences and labels. Task 0: is word 1 in the sentence? Task 1: is it not?"""
    ids = torch.randint(2, WORDS, (size, LENGTH))
    labels = torch.randint(2, (size,))
    ids[labels == 1, 0] = 1
    ids = ids[:, torch.randperm(LENGTH)]
    return {"input_ids": ids, "labels": labels if task == 0 else 1 - labels}


def train(model, task, optimizer):
    """Train for some updates."""
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**batch(task)).loss.backward()
        optimizer.step()


@torch.no_grad()
def report(title, model, task):
    """Print the accuracy on a task, and the number of zeros in the encoder's matrices."""
    model.eval()
    test = batch(task, 2000)
    correct = model(**test).logits.argmax(-1) == test["labels"]
    matrices = [
        w for name, w in model.named_parameters() if "encoder" in name and "lora" not in name
    ]
    zeros = sum(int((weight == 0).sum()) for weight in matrices)
    print(f"{title}: accuracy {correct.float().mean():.3f}, {zeros:,} zeros")


def main():
    """Prune on task 0, adapt to task 1, merge."""
    torch.manual_seed(0)
    # For a real model: BertForSequenceClassification.from_pretrained("a directory of a pruned one")
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sparsifier = probmask.attach(
        model,
        probmask.TiedProbMask(sparsity=0.5),
        optimizer=optimizer,
        total_steps=STEPS,
        exclude=default_exclude(model),
    )
    train(model, 0, optimizer)
    sparsifier.finalize()
    report("pruned, task 0", model, 0)
    report("pruned, task 1", model, 1)

    config = LoraConfig(target_modules=["query", "value", "dense"])
    adapted = get_peft_model(model, config)
    train(adapted, 1, torch.optim.AdamW(adapted.parameters(), lr=3e-3))
    report("with adapters, task 1", adapted, 1)

    merged, cost = probmask.merge_lora(adapted)  # merge_and_unload() would fill the zeros
    report("merged, task 1", merged, 1)
    print(cost)
    probmask.save(merged, "merged.safetensors", overwrite=True)


if __name__ == "__main__":
    main()
