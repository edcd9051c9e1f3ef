"""Names that the Hugging Face Trainer gave to settings, and that most tools took over.

In: names and values. Out: rules for a draft. What a name means in one tool alone stands in that tool's module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onecard.migration.draft import Draft, Rule, no, number, of_no_effect, to, whole

_OPTIMIZERS = {
    "adamw_torch": ("adamw", "auto"),
    "adamw_torch_fused": ("adamw", "auto"),
    "adamw_hf": ("adamw", "auto"),
    "adamw_apex_fused": ("adamw", "auto"),
    "adamw": ("adamw", "auto"),
    "adamw_8bit": ("adamw", "8bit"),
    "adamw_bnb_8bit": ("adamw", "8bit"),
    "adamw_torch_8bit": ("adamw", "8bit"),
    "paged_adamw_8bit": ("adamw", "8bit"),
    "paged_adamw_32bit": ("adamw", "host"),
    "paged_adamw": ("adamw", "host"),
    "adafactor": ("adafactor", "auto"),
    "muon": ("muon", "auto"),
}
_CHECKPOINTING = "the plan turns it on where memory needs it (activation_checkpointing = auto); it changes no result"
ONE_CARD = "onecard trains on one card, or plans what fits there"
OWN_TEMPLATE = "the chat template of the model itself is used (`onecard tokenizer extend --chat-template` gives it one)"


def maximum_updates(draft: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    """`max_steps`: -1 and 0 mean that epochs decide."""
    if whole(value) > 0:
        draft.put(name, whole(value), "max_steps")
    else:
        draft.pass_over(name)


def epochs(draft: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    """Passes over the rows; where both stand, the number of updates decides, as it does in the Trainer."""
    steps = values.get("max_steps")
    if steps is not None and whole(steps) > 0:
        draft.leave(name, value, "max_steps decides")
    else:
        draft.put(name, number(value), "num_epochs")


def warmup_updates(draft: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    """`warmup_steps`: a share of the updates here, known only where their number stands in the file."""
    steps, warmup = values.get("max_steps"), number(value)
    if warmup < 1:
        draft.put(name, warmup, "warmup_ratio", given=value)  # newer Trainers: a share below 1
    elif steps is not None and whole(steps) > 0:
        draft.put(name, min(1.0, warmup / whole(steps)), "warmup_ratio", given=value, why=f"of {whole(steps)} updates")
    else:
        draft.leave(name, value, "the number of updates is not known before the run: set warmup_ratio (default 0.05)")


def schedule(draft: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    """`linear` is warm-up and a decay over all the rest."""
    kind = str(value)
    if kind == "cosine":
        draft.put(name, "cosine", "schedule", given=None if name == "schedule" else value)
    elif kind == "linear":
        draft.put(name, "wsd", "schedule", given=value, why="with decay_ratio = 1: linear from warm-up to the end")
        draft.settings["decay_ratio"] = 1.0
    elif kind in ("constant", "constant_with_warmup"):
        draft.put(name, "wsd", "schedule", given=value, why="with final_learning_rate_ratio = 1: it stays at its peak")
        draft.settings["final_learning_rate_ratio"] = 1.0
        if kind == "constant":
            draft.settings["warmup_ratio"] = 0.0
    elif kind == "warmup_stable_decay":
        draft.put(name, "wsd", "schedule", given=value)
    else:
        draft.leave(name, value, "onecard has cosine, and wsd (linear, constant)")


def held_out_share(made: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
    """What is held out, as a share of the rows."""
    if number(value) < 1:
        made.put(name, number(value), "held_out")
    else:
        made.leave(name, value, "held_out is a share of the rows (default 0.02), not a number of them")


def shape_of_the_rate(draft: Draft, values: Mapping[str, Any]) -> None:
    """After all names: the Trainer's own schedule where the file says nothing, linear from the first update on."""
    if "schedule" not in draft.settings and values.get("lr_scheduler_type") is None:
        draft.assume("lr_scheduler_type", "wsd", "schedule")
        draft.settings["decay_ratio"] = 1.0
    said = [name for name in ("warmup_ratio", "warmup_steps") if values.get(name) is not None]
    if str(values.get("lr_scheduler_type")) == "constant":  # whatever the file says of warm-up before or after it
        draft.settings["warmup_ratio"] = 0.0
    elif not said:
        draft.assume("warmup_ratio", 0.0, "warmup_ratio")


def optimizer(draft: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    """The optimizer and how its states lie, which are two settings here."""
    found = _OPTIMIZERS.get(str(value))
    if found is None:
        draft.leave(name, value, "onecard has adamw, muon and adafactor")
        return
    kind, states = found
    draft.put(name, kind, "optimizer", given=value, why="" if states == "auto" else f"with optimizer_states = {states}")
    if states != "auto":
        draft.settings["optimizer_states"] = states


def precision(draft: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    """`bf16: true` and its like; `auto` and false leave it to onecard."""
    if value is True or str(value).lower() == "true":
        draft.put(name, name, "precision", given=value)
    else:
        draft.pass_over(name)


def adapter_start(draft: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    """`init_lora_weights`: true is the ordinary start."""
    if value is True:
        draft.pass_over(name)
    else:
        draft.put(name, value, "lora_start")


def checkpointing(draft: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    """Recomputing activations is left to the plan."""
    if value is False or str(value).lower() in ("false", "none"):
        draft.pass_over(name)
    else:
        draft.leave(name, value, _CHECKPOINTING)


def often(ours: str) -> Rule:
    """Updates between two of something; 0 leaves it to the tool, a share of the run is not known here."""

    def rule(draft: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
        if number(value) == 0:
            draft.pass_over(name)
        elif number(value) < 1:
            draft.leave(name, value, f"{ours} is a number of updates, not a share of them")
        else:
            draft.put(name, whole(value), ours, given=value)

    return rule


def modules(value: Any) -> list[str]:
    """Names of layers: a list, or text with commas; all of them are named by none."""
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else [str(part) for part in value]
    return [] if names in (["all"], ["all-linear"]) else [part for part in names if part]


TRAINER: dict[str, Rule] = {
    "learning_rate": to("learning_rate", number),
    "weight_decay": to("weight_decay", number),
    "max_grad_norm": to("max_grad_norm", number),
    "seed": to("seed", whole),
    "warmup_ratio": to("warmup_ratio", number),
    "warmup_steps": warmup_updates,
    "num_train_epochs": epochs,
    "num_epochs": epochs,
    "max_steps": maximum_updates,
    "per_device_train_batch_size": to("batch_size", whole),
    "gradient_accumulation_steps": to("gradient_accumulation_steps", whole),
    "lr_scheduler_type": schedule,
    "lr_scheduler": schedule,
    "optim": optimizer,
    "optimizer": optimizer,
    "bf16": precision,
    "fp16": precision,
    "logging_steps": often("log_every"),
    "save_steps": often("save_every"),
    "eval_steps": often("evaluate_every"),
    "save_total_limit": to("keep_last", whole),
    "load_best_model_at_end": to("keep_best"),
    "neftune_noise_alpha": to("neftune_alpha", number),
    "packing": to("packing"),
    "gradient_checkpointing": checkpointing,
    "lora_alpha": to("lora_alpha", number),
    "lora_dropout": to("lora_dropout", number),
    "use_rslora": to("rank_stabilised"),
    "use_dora": to("decomposed"),
    "init_lora_weights": adapter_start,
    "output_dir": no("what the stages make lies in run/ beside the recipe, apart from what the other tool made"),
    "adam_beta1": no("the optimizer's constants are fixed"),
    "adam_beta2": no("the optimizer's constants are fixed"),
    "adam_epsilon": no("the optimizer's constants are fixed"),
    "label_smoothing_factor": no("answers are learned without smoothing"),
    "lr_scheduler_kwargs": no("see schedule, decay_ratio and final_learning_rate_ratio"),
    "save_strategy": of_no_effect,
    "eval_strategy": of_no_effect,
    "evaluation_strategy": of_no_effect,
    "logging_strategy": of_no_effect,
    "logging_first_step": of_no_effect,
    "per_device_eval_batch_size": of_no_effect,
    "eval_accumulation_steps": of_no_effect,
    "report_to": of_no_effect,
    "run_name": of_no_effect,
    "logging_dir": of_no_effect,
    "data_seed": of_no_effect,
    "do_train": of_no_effect,
    "do_eval": of_no_effect,
    "group_by_length": of_no_effect,
    "remove_unused_columns": of_no_effect,
    "dataset_num_proc": of_no_effect,
    "dataloader_num_workers": of_no_effect,
    "dataloader_pin_memory": of_no_effect,
    "dataloader_prefetch_factor": of_no_effect,
    "overwrite_output_dir": of_no_effect,
    "save_only_model": of_no_effect,
    "save_safetensors": of_no_effect,
    "disable_tqdm": of_no_effect,
    "tf32": of_no_effect,
    "torch_compile": of_no_effect,
    "gradient_checkpointing_kwargs": of_no_effect,
    "push_to_hub": no("onecard uploads nothing"),
    "hub_model_id": no("onecard uploads nothing"),
    "hub_token": no("onecard uploads nothing"),
    "hf_token": no("onecard uploads nothing and fetches nothing"),
    "resume_from_checkpoint": no("a run of onecard goes on by itself from its own checkpoints"),
    "trust_remote_code": no("code of a model folder is never run"),
    "deepspeed": no(ONE_CARD),
    "fsdp": no(ONE_CARD),
    "fsdp_config": no(ONE_CARD),
    "ddp_timeout": of_no_effect,
    "ddp_find_unused_parameters": of_no_effect,
}  # fmt: skip
