"""The callback for Hugging Face's Trainer, Accelerate and LoRA."""

import copy
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import probmask

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from peft import LoraConfig, get_peft_model
    from transformers import BertForSequenceClassification, EarlyStoppingCallback

    from integrations import transformers_training
    from integrations.transformers_training import (
        METHODS,
        UPDATES,
        Interrupt,
        arguments,
        examples,
        network,
        trainer,
    )
    from probmask.integrations.transformers import SparsityCallback, default_exclude

# What transformers and peft themselves warn about is not ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
SIZE = 2 * (4 * 16 * 16 + 2 * 16 * 32)
KEEP = SIZE - round(0.8 * SIZE)


def equal_states(one, two):
    one, two = one.state_dict(), two.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def kept(model):
    """Number of nonzero weights in the matrices of the encoder."""
    matrices = [p for n, p in model.named_parameters() if "encoder" in n and p.dim() > 1]
    assert sum(weight.numel() for weight in matrices) == SIZE
    return sum(int(weight.count_nonzero()) for weight in matrices)


def trained(directory, name="tied", *others, **settings):
    """Train without an interruption and return the model."""
    run = trainer(directory, SparsityCallback(METHODS[name]()), *others, **settings)
    run.train()
    return run.model


def logits(model):
    batch = torch.stack([example["input_ids"] for example in examples(16)])
    with torch.no_grad():
        return model.eval()(batch).logits


def test_one_line_yields_a_normal_directory_and_the_artifact(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="probmask")
    callback = SparsityCallback(METHODS["tied"]())
    run = trainer(tmp_path, callback)
    run.train()
    run.save_model()

    assert kept(run.model) == callback.summary.kept == KEEP
    assert type(run.model.bert.encoder.layer[0].output.dense) is nn.Linear
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    assert equal_states(loaded, run.model)
    fresh = network(seed=1)
    probmask.load_into(fresh, tmp_path / "probmask.safetensors")
    assert equal_states(fresh, run.model)
    (announced,) = [entry for entry in caplog.records if "Excluded by default" in entry.message]
    assert announced.levelno == logging.WARNING  # so that it is shown without any configuration
    assert "bert.embeddings.word_embeddings.weight" in announced.message
    assert "bert.pooler.dense.weight, classifier.weight" in caplog.text
    assert all(p.count_nonzero() for n, p in run.model.named_parameters() if "classifier" in n)
    logged = [entry["sparsity"] for entry in run.state.log_history if "loss" in entry]
    assert len(logged) == 3
    assert logged == sorted(logged)
    assert logged[-1] == pytest.approx(0.8, abs=1e-3)


def test_a_checkpoint_loads_into_the_plain_model(tmp_path):
    seen = []
    run = trainer(
        tmp_path,
        SparsityCallback(METHODS["learned"]()),
        Interrupt(5, lambda: seen.append({n: p.clone() for n, p in run.model.named_parameters()})),
    )
    run.train()
    loaded, info = BertForSequenceClassification.from_pretrained(
        tmp_path / "checkpoint-5", output_loading_info=True
    )
    assert not any(info.values())
    assert all(torch.equal(p, seen[0][name]) for name, p in loaded.named_parameters())


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_training_is_bit_exact(tmp_path, name):
    """From a directory that was moved, with another network in memory."""
    whole = trained(tmp_path / "whole", name)
    moved = shutil.move(tmp_path / "whole" / "checkpoint-5", tmp_path / "moved")
    run = trainer(tmp_path / "again", SparsityCallback(METHODS[name]()), model=network(seed=7))
    run.train(resume_from_checkpoint=str(moved))
    assert equal_states(run.model, whole)
    assert kept(run.model) == KEEP


def test_a_killed_training_is_resumed_bit_exactly(tmp_path):
    child = subprocess.run(
        [sys.executable, transformers_training.__file__, "die", str(tmp_path / "killed")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert not (tmp_path / "killed" / "probmask.safetensors").exists()
    run = trainer(
        tmp_path / "killed", SparsityCallback(METHODS["learned"]()), model=network(seed=7)
    )
    run.train(resume_from_checkpoint=True)
    assert equal_states(run.model, trained(tmp_path / "whole", "learned"))


def test_two_ranks_end_with_the_same_network(tmp_path):
    """The Trainer wraps the model in DDP before the masks are attached."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    child = subprocess.run(
        [sys.executable, *launch, transformers_training.__file__, "ranks", str(tmp_path)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for name in ranks[0]:
        (wrapper, one), (_, other) = (rank[name] for rank in ranks)
        assert wrapper == "DistributedDataParallel"
        assert all(torch.equal(one[key], other[key]) for key in one)
        saved = probmask.load_into(network(), tmp_path / name / "probmask.safetensors")
        assert kept(saved) == KEEP
        assert all(torch.equal(one[key], value) for key, value in saved.state_dict().items())


def test_an_interrupted_training_is_resumed_in_the_same_process(tmp_path):
    def interrupt():
        stop.step = None
        raise KeyboardInterrupt

    stop = Interrupt(7, interrupt)
    callback = SparsityCallback(METHODS["learned"]())
    run = trainer(tmp_path / "run", callback, stop)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    with pytest.raises(probmask.InputError, match="was interrupted; continue it with"):
        run.train()
    longer = trainer(tmp_path / "run", SparsityCallback(METHODS["learned"]()), max_steps=20)
    with pytest.raises(probmask.InputError, match="of 12 updates, and this one makes 20"):
        longer.train(resume_from_checkpoint=True)
    run.train(resume_from_checkpoint=True)
    assert equal_states(run.model, trained(tmp_path / "whole", "learned"))
    assert callback.sparsifier is None


def test_an_interrupted_training_can_be_ended_and_continued_with_its_zeros(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    stop = Interrupt(3, interrupt)
    callback = SparsityCallback(METHODS["tied"](), artifact=None)
    run = trainer(tmp_path, callback, stop, save_strategy="no")
    with pytest.raises(KeyboardInterrupt):
        run.train()
    callback.sparsifier.finalize()
    zeros = run.model.bert.encoder.layer[0].output.dense.weight == 0
    for _ in range(2):  # the second begins while the frozen masks of the first are still there
        with pytest.raises(KeyboardInterrupt):
            run.train()
    stop.step = None
    run.train()
    assert torch.equal(run.model.bert.encoder.layer[0].output.dense.weight == 0, zeros)
    assert kept(run.model) == callback.summary.kept == KEEP


@pytest.mark.parametrize("name", ["tied", "learned"])
def test_the_best_model_is_the_one_that_was_evaluated(tmp_path, name):
    """Training stops early, and the weights and masks of an earlier evaluation come back."""
    metrics = iter([0.1, 0.9, 0.2, 0.3, 0.4])
    outputs = {}

    def measure(_):
        outputs[run.state.global_step] = logits(run.model)
        return {"quality": next(metrics)}

    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "quality",
    }
    patience = EarlyStoppingCallback(early_stopping_patience=2)
    run = trainer(tmp_path, SparsityCallback(METHODS[name]()), patience, **settings)
    run.compute_metrics = measure
    run.train()
    assert list(outputs) == [2, 4, 6, 8]
    assert kept(run.model) == KEEP
    # The initial values that are discounted in training are folded into the weights at the end.
    torch.testing.assert_close(logits(run.model), outputs[4], rtol=0, atol=1e-7)
    assert not torch.equal(logits(run.model), outputs[8])


@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True, "max_grad_norm": 0.5},
        {"gradient_checkpointing": True, "label_smoothing_factor": 0.1},
        {"optim": "adafactor", "max_steps": -1, "num_train_epochs": 2},
        {"eval_strategy": "epoch", "eval_on_start": True, "lr_scheduler_type": "cosine"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_options_of_the_trainer(tmp_path, settings):
    model = trained(tmp_path, "learned", save_strategy="no", **settings)
    assert kept(model) == KEEP
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_evaluations_and_recomputed_activations_do_not_change_the_training(tmp_path):
    """Without dropout: the data loader of an evaluation draws from the same generator."""
    settings = {"eval_strategy": "steps", "eval_steps": 3, "gradient_checkpointing": True}
    plain = trained(tmp_path / "1", model=network(dropout=0.0), save_strategy="no")
    other = trained(tmp_path / "2", model=network(dropout=0.0), save_strategy="no", **settings)
    assert equal_states(plain, other)


@pytest.mark.parametrize("name", METHODS)
def test_a_training_equals_that_of_an_own_loop(tmp_path, name):
    """One update adds two batches, a penalty and a clipped norm. Without dropout."""
    model = network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = trainer(
        tmp_path,
        SparsityCallback(METHODS[name](), seed=3),
        model=model,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        save_strategy="no",
    )
    batches = []
    recording = model.register_forward_pre_hook(
        lambda module, inputs, batch: batches.append(batch), with_kwargs=True
    )
    run.train()
    recording.remove()

    twin = network(dropout=0.0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    exclude = ["bert.embeddings*", "bert.pooler*", "classifier"]
    sparsifier = probmask.attach(
        twin,
        METHODS[name](),
        optimizer=optimizer,
        total_steps=UPDATES,
        steps_per_epoch=6,
        exclude=exclude,
        seed=3,
    )
    for batch, other in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        twin(**batch).loss.backward()  # the Trainer adds up the losses of a BERT
        twin(**other).loss.backward()
        penalty = sparsifier.penalty()
        if isinstance(penalty, torch.Tensor):
            penalty.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
    sparsifier.finalize()
    for (key, weight), (_, expected) in zip(
        run.model.named_parameters(), twin.named_parameters(), strict=True
    ):
        torch.testing.assert_close(weight, expected, msg=key)


def test_a_second_training_keeps_the_zeros(tmp_path):
    callback = SparsityCallback(METHODS["tied"]())
    run = trainer(tmp_path, callback)
    run.train()
    first = {name: weight.clone() for name, weight in run.model.named_parameters()}
    run.train()
    changed = [n for n, p in run.model.named_parameters() if not torch.equal(p, first[n])]
    assert len(changed) > 10
    assert all(
        torch.equal(weight == 0, first[name] == 0)
        for name, weight in run.model.named_parameters()
        if "encoder" in name and weight.dim() > 1
    )
    saved = probmask.load_into(network(), tmp_path / "probmask.safetensors")
    assert equal_states(saved, run.model)
    again = trainer(
        tmp_path, SparsityCallback(METHODS["tied"](), overwrite=True), model=network(seed=7)
    )
    again.train(resume_from_checkpoint=True)
    assert equal_states(again.model, run.model)


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (0.9, r"SparsityCallback\(method=0.9\): expected a method such as"),
        (probmask.ProbMask(sparsity=0.8, recipe="paper"), r"\(ProbMask\(draws=2\)\): .* 2 masks"),
        (probmask.methods.VRPGE(sparsity=0.8), r"SparsityCallback\(VRPGE\(draws=2\)\): .* 2 masks"),
    ],
)
def test_methods_that_the_trainer_cannot_follow_raise(method, match):
    with pytest.raises(probmask.InputError, match=match):
        SparsityCallback(method)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True: it begins again"),
        (
            {
                "save_only_model": True,
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "eval_steps": 5,
            },
            "save_only_model=True: load_best_model_at_end needs the masks",
        ),
    ],
)
def test_options_that_the_masks_cannot_follow_raise(tmp_path, settings, match):
    model = network()
    with pytest.raises(probmask.InputError, match=match):
        trained(tmp_path, model=model, **settings)
    assert type(model.bert.encoder.layer[0].output.dense) is nn.Linear


def test_a_method_that_measures_needs_a_probe(tmp_path):
    with pytest.raises(probmask.InputError, match="needs data to measure before it prunes"):
        trainer(tmp_path, SparsityCallback(probmask.methods.SNIP(sparsity=0.8))).train()
    ids = torch.stack([example["input_ids"] for example in examples(8)])
    labels = torch.stack([example["labels"] for example in examples(8)])
    probe = probmask.Probe([({"input_ids": ids}, labels)])
    callback = SparsityCallback(probmask.methods.SNIP(sparsity=0.8), probe=probe, artifact=None)
    run = trainer(tmp_path, callback, save_strategy="no")
    run.train()
    assert kept(run.model) == KEEP
    assert not list(tmp_path.glob("*.safetensors"))


def test_nothing_is_overwritten_and_no_checkpoint_is_misread(tmp_path):
    dense = transformers.Trainer(network(), arguments(tmp_path), train_dataset=examples())
    dense.train()
    with pytest.raises(probmask.InputError, match="update 12 has no state of the masks"):
        trainer(tmp_path, SparsityCallback(METHODS["tied"]())).train(resume_from_checkpoint=True)
    (tmp_path / "probmask.safetensors").write_text("mine")
    with pytest.raises(probmask.InputError, match="the file exists; pass overwrite=True"):
        trained(tmp_path)
    assert (tmp_path / "probmask.safetensors").read_text() == "mine"


SMALL = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def roberta():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.RobertaConfig(**SMALL, **sizes, intermediate_size=8)
    return transformers.RobertaForSequenceClassification(config)


def masked_lm():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=40, **sizes, intermediate_size=8)
    return transformers.BertForMaskedLM(config)


def gpt2():
    config = transformers.GPT2Config(**SMALL, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    return transformers.GPT2LMHeadModel(config)


def t5():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**SMALL, **sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, intermediate_size=8, image_size=8, patch_size=4)
    return transformers.ViTForImageClassification(config)


def resnet():
    """Build a network without input embeddings."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))


@pytest.mark.parametrize(
    ("build", "dense", "masked"),
    [
        (resnet, ["classifier."], "resnet."),
        (roberta, ["roberta.embeddings.", "classifier."], "roberta.encoder."),
        (masked_lm, ["bert.embeddings.", "cls."], "bert.encoder."),
        (gpt2, ["transformer.wte", "transformer.wpe", "lm_head"], "transformer.h."),
        (vit, ["vit.embeddings.", "classifier."], "vit."),
        (t5, ["shared.", "embed_tokens.", "lm_head.", "relative_attention_bias"], ".block."),
    ],
)
def test_embeddings_and_heads_are_dense_by_default(build, dense, masked):
    model = build()
    exclude = default_exclude(model)
    assert exclude
    assert all(any(part in name for part in dense) for name in exclude)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no matrix is overlooked, also not a tied one
        sparsifier = probmask.attach(model, METHODS["tied"](), total_steps=9, exclude=exclude)
    sites = list(sparsifier.masks)
    assert sites
    assert all(masked in name for name in sites)
    assert not any(part in name for part in dense for name in sites)


def test_patterns_override_the_default(tmp_path):
    sizes = {}
    for key, patterns in {
        "default": {},
        "head": {"include": ["classifier.weight"]},
        "all": {"exclude": ["bert.embeddings*"]},
    }.items():
        callback = SparsityCallback(METHODS["tied"](), artifact=None, **patterns)
        trainer(tmp_path, callback, max_steps=1, save_strategy="no").train()
        sizes[key] = callback.summary.size
    assert sizes == {"default": SIZE, "head": SIZE + 32, "all": SIZE + 32 + 256}


def test_frozen_weights_are_masked_or_skipped(tmp_path):
    """Also in a second training, and in one that is resumed."""

    def half_frozen(seed=0):
        model = network(seed)
        model.bert.encoder.layer[0].requires_grad_(False)
        return model

    def run_with(frozen, directory, model):
        callback = SparsityCallback(METHODS["tied"](), frozen=frozen, artifact=None)
        return callback, trainer(tmp_path / directory, callback, model=model)

    before = half_frozen().state_dict()
    first = [name for name in before if "layer.0." in name and name.endswith("weight")]
    callback, run = run_with("skip", "skip", half_frozen())
    run.train()
    half = SIZE // 2, SIZE // 2 - round(0.8 * SIZE // 2)
    assert (callback.summary.size, callback.summary.kept) == half
    assert all(torch.equal(run.model.state_dict()[name], before[name]) for name in first)
    _, resumed = run_with("skip", "resumed", half_frozen(seed=0))
    resumed.train(resume_from_checkpoint=str(tmp_path / "skip" / "checkpoint-5"))
    assert equal_states(resumed.model, run.model)
    run.train()
    assert (callback.summary.size, callback.summary.kept) == half

    callback, run = run_with("mask", "mask", half_frozen())
    run.train()
    assert kept(run.model) == callback.summary.kept == KEEP
    assert any((run.model.state_dict()[name] == 0).any() for name in first)
    with pytest.raises(probmask.InputError, match=r"SparsityCallback\(frozen='dense'\)"):
        SparsityCallback(METHODS["tied"](), frozen="dense")


# Accelerate


def accelerated(method, directory, *, resume=False):
    """Train 6 updates of two batches each, save a state after the third, or continue from it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network(seed=9 if resume else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    exclude = default_exclude(model)
    sparsifier = probmask.attach(
        model, method, optimizer=optimizer, total_steps=6, exclude=exclude, seed=1
    )
    accelerator.register_for_checkpointing(sparsifier)
    if resume:
        accelerator.load_state(directory)
    else:
        torch.manual_seed(5)
    for index in range(6 if resume else 0, 12):
        if index == 6 and not resume:
            accelerator.save_state(directory)
        rows = examples()[4 * index : 4 * index + 4]
        ids, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=ids, labels=labels).loss)
            optimizer.step()  # skipped for every first batch of two
            optimizer.zero_grad()
    assert sparsifier.now.step == 6
    assert sparsifier.finalize().kept == KEEP
    return model


@pytest.mark.parametrize("name", ["tied", "learned"])
def test_a_state_of_accelerate_is_resumed_bit_exactly(tmp_path, name):
    whole = accelerated(METHODS[name](), tmp_path)
    assert equal_states(accelerated(METHODS[name](), tmp_path, resume=True), whole)


def test_the_scaler_of_an_accelerated_optimizer_is_used():
    """Its scale, a power of two, must cancel exactly also for the method's own parameters."""
    Accelerator(cpu=True)
    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = network(dropout=0.0)
        optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), 0.1), scaler=scaler)
        method = METHODS["learned"]()
        exclude = default_exclude(model)
        sparsifier = probmask.attach(
            model, method, optimizer=optimizer, total_steps=4, exclude=exclude, seed=1
        )
        ids = torch.stack([example["input_ids"] for example in examples(8)])
        loss = model(input_ids=ids).logits.square().sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step()
        results.append(sparsifier.state_dict()["method"]["trained"])
    plain, scaled = ([tensor for site in result for tensor in site] for result in results)
    assert plain
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


# LoRA


@pytest.fixture
def pruned():
    """A BERT with zeros that `finalize` has made."""
    model = network()
    sparsifier = probmask.attach(
        model, METHODS["tied"](), total_steps=1, exclude=default_exclude(model)
    )
    sparsifier.finalize()
    return model


def adapted(model, **settings):
    config = LoraConfig(
        target_modules=["query", "dense"], modules_to_save=["classifier"], r=4, **settings
    )
    return get_peft_model(model, config)


def test_adapters_keep_the_zeros_and_merge_lora_reports_the_cost(tmp_path, pruned):
    before = {name: p.clone() for name, p in pruned.named_parameters()}
    model = adapted(pruned)
    args = arguments(tmp_path, max_steps=6, save_strategy="no")
    transformers.Trainer(model, args, train_dataset=examples()).train()
    inner = model.base_model.model.bert.encoder.layer[1].intermediate.dense
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    assert torch.equal(inner.base_layer.weight, before[name])
    update = inner.lora_B["default"].weight @ inner.lora_A["default"].weight
    update = (update * inner.scaling["default"]).detach()
    assert update.norm() > 0

    merged, cost = probmask.merge_lora(model)

    after = dict(merged.named_parameters())
    assert after.keys() == before.keys()
    assert kept(merged) == KEEP
    zeros = before[name] == 0
    expected = (before[name] + update).masked_fill(zeros, 0.0)
    torch.testing.assert_close(after[name], expected)
    assert not torch.equal(after["classifier.weight"], before["classifier.weight"])
    layer = next(layer for layer in cost.layers if layer.name == name)
    lost = (update[zeros].norm() / update.norm()).item()
    assert (layer.kept, layer.size) == (int((~zeros).sum()), zeros.numel())
    assert layer.update_lost == pytest.approx(lost, rel=1e-4)
    change = ((before[name] + update - expected).norm() / (before[name] + update).norm()).item()
    assert layer.change == pytest.approx(change, rel=1e-4)
    assert cost.total.discarded == pytest.approx(sum(row.discarded for row in cost.layers))
    assert str(cost).splitlines()[-1].startswith("all: ")
    probmask.save(merged, tmp_path / "merged.safetensors")  # without a warning


def test_a_plain_merge_is_warned_about_where_probmask_sees_it(tmp_path, pruned):
    probmask.save(pruned, tmp_path / "pruned.safetensors")
    for model in (pruned, probmask.load_into(network(), tmp_path / "pruned.safetensors")):
        merged = adapted(model, init_lora_weights=False).merge_and_unload()
        with pytest.warns(probmask.RefilledWeightsWarning, match=r"nonzero: bert.*merge_lora"):
            probmask.save(merged, tmp_path / "filled.safetensors", overwrite=True)
        with (
            pytest.warns(probmask.RefilledWeightsWarning, match=r"freeze_masks\(model\)"),
            pytest.raises(probmask.InputError, match="no zero weights"),
        ):
            probmask.freeze_masks(merged.bert.encoder.layer[0].output)


def test_merge_lora_after_a_plain_merge_that_can_be_undone(pruned):
    """peft's merge_adapter keeps the adapters, so the zeros are still known."""
    zeros = pruned.bert.encoder.layer[0].output.dense.weight == 0
    model = adapted(pruned, init_lora_weights=False)
    model.merge_adapter()
    merged, _ = probmask.merge_lora(model)
    assert torch.equal(merged.bert.encoder.layer[0].output.dense.weight == 0, zeros)


def test_merge_lora_raises(tmp_path, pruned):
    with pytest.raises(probmask.InputError, match="expected a PeftModel"):
        probmask.merge_lora(pruned)
    with pytest.raises(probmask.InputError, match="has PEFT adapters"):
        trained(tmp_path, model=adapted(network()))
    diverged = adapted(copy.deepcopy(pruned), init_lora_weights=False)
    next(p for p in diverged.parameters() if p.requires_grad).data.fill_(torch.nan)
    with pytest.raises(probmask.NonFiniteError, match=r"NaN or infinite after the merge.*DoRA"):
        probmask.merge_lora(diverged)
    for names in ("nope", ["default", "nope"], []):
        with pytest.raises(probmask.InputError, match="the adapters of the model are 'default'"):
            probmask.merge_lora(diverged, adapter_names=names)
    frozen = probmask.freeze_masks(pruned, exclude=default_exclude(pruned))
    model = adapted(pruned)
    with pytest.raises(probmask.InputError, match=r"query\.weight still has a mask; call finalize"):
        probmask.merge_lora(model)
    frozen.finalize()
    assert kept(probmask.merge_lora(model)[0]) == KEEP


def test_the_examples_of_the_page_run(tmp_path, monkeypatch, pruned, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    page = page[page.index("## Hugging Face") :]
    probmask.save(pruned, "pruned.safetensors")
    names = {
        "model": network(),
        "args": arguments(tmp_path, max_steps=4),
        "train_data": examples(),
        "eval_data": examples(16),
        "build_model": network,
        "epochs": 2,
        "loader": torch.utils.data.DataLoader(examples(16), batch_size=4),
    }
    source = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    exec(compile(source, "integrations.md", "exec"), names)
    assert "of the update discarded" in capsys.readouterr().out
    assert kept(names["merged"]) == KEEP


@pytest.fixture
def uninstalled(monkeypatch):
    """Return a function that imports a module of the package while a library is missing."""

    def load(file, library):
        monkeypatch.setitem(sys.modules, library, None)
        path = Path(probmask.__file__).parent / "integrations" / file
        spec = importlib.util.spec_from_file_location("without_library", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_without_the_library_one_error_says_what_to_install(uninstalled):
    with pytest.raises(probmask.InputError, match=r"pip install .*'probmask\[transformers\]'"):
        uninstalled("transformers/__init__.py", "transformers")
    lora = uninstalled("lora.py", "peft")
    with pytest.raises(probmask.InputError, match=r"pip install .*'probmask\[peft\]'"):
        lora.merge_lora(nn.Linear(1, 1))
