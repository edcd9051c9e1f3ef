"""Models that name the class of a text: opened, fed and read.

Encoders (BERT kinds) and decoders alike, by transformers' own class for it, so that what is trained here loads there.
A decoder is read at the last token of its text, found by the length of the text and never by looking for padding.
The names of the classes stand in the configuration, in the order of the numbers, and with them what turns logits into
probabilities that can be believed: a temperature and, where classes do not exclude each other, a threshold for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard.errors import ArtifactError, ConfigError
from onecard.model.load import COPY_AGAIN, first_line, model_directory, silence_transformers
from onecard.tokenizer.encoding import encoder_of
from onecard.tokenizer.messages import well_formed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SEVERAL = "multi_label_classification"
TEMPERATURE, THRESHOLDS = "class_temperature", "class_thresholds"
# The parts that a model made for something else does not have: they begin at random.
_HEADS = ("classifier", "score", "pooler", "pre_classifier", "classification_head")


def load_classifier(path: Path, labels: Sequence[str] | None = None, *, several: bool = False) -> Any:
    """The classifier in `path` in fp32, for use; with `labels` a new one on top of whatever model lies there.

    ArtifactError if there is none, or weights are missing; ConfigError for an architecture without a classifier.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForSequenceClassification

    silence_transformers()
    directory = model_directory(path)
    try:
        config: Any = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        if labels is None:
            if not any("ForSequenceClassification" in name for name in config.architectures or []):
                raise ConfigError(f"The model in {path} is no classifier.", "Make one with `onecard classify`.")
        else:
            config.id2label = dict(enumerate(labels))
            config.label2id = {label: number for number, label in enumerate(labels)}
            config.problem_type = SEVERAL if several else "single_label_classification"
        kind: Any = AutoModelForSequenceClassification
        model, found = kind.from_pretrained(
            str(directory),
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=labels is not None,
        )
    except (OSError, KeyError, RuntimeError, SafetensorError) as fault:
        raise ArtifactError(f"The model in {directory} cannot be read: {first_line(fault)}.", COPY_AGAIN) from fault
    except ValueError as fault:
        raise ConfigError(
            f"The model in {directory} cannot become a classifier: {first_line(fault)}.",
            "Take an encoder of the BERT kind, or a language model such as Llama, Qwen or GPT-2.",
        ) from fault
    absent = sorted(
        {str(key) for kind in ("missing_keys", "mismatched_keys") for key in found[kind]}
        if labels is None
        else {str(key) for key in found["missing_keys"] if not any(part in _HEADS for part in str(key).split("."))}
    )
    if absent:
        raise ArtifactError(f"The files in {directory} lack {len(absent)} weights, such as {absent[0]}.", COPY_AGAIN)
    return model.eval()


def head_names(model: Any) -> list[str]:
    """Names of the modules at the top of a classifier that are learned even where all else is frozen."""
    return [name for name, _ in model.named_children() if name in _HEADS]


def reads_the_last_token(model: Any) -> bool:
    """True for decoders, whose head is one matrix over the last hidden state."""
    return hasattr(model, "score")


def labels_of(model: Any) -> list[str]:
    """The names of the classes, by number."""
    return [model.config.id2label[number] for number in range(model.config.num_labels)]


# --- what goes in -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrapping:
    """What a tokenizer puts around a text, such as [CLS] and [SEP], or a BOS."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Wrapping:
        """Read off a text of one letter."""
        inner = encoder_of(tokenizer).plain.encode("a", add_special_tokens=False).ids
        whole = tokenizer("a")["input_ids"]
        for at in range(len(whole) - len(inner) + 1):
            if whole[at : at + len(inner)] == inner:
                return cls(whole[:at], whole[at + len(inner) :])
        return cls([], [])


def encode_texts(tokenizer: Any, texts: Sequence[str], longest: int) -> tuple[list[list[int]], int]:
    """The ids of each text as the model reads it, cut to `longest` tokens; and how many had to be cut.

    A text that spells a control token stays text.
    """
    wrapping = Wrapping.of(tokenizer)
    room = longest - len(wrapping.before) - len(wrapping.after)
    plain = encoder_of(tokenizer).plain
    found = [item.ids for item in plain.encode_batch([well_formed(text) for text in texts], add_special_tokens=False)]
    cut = sum(len(ids) > room for ids in found)
    return [wrapping.before + ids[:room] + wrapping.after for ids in found], cut


# --- what comes out -----------------------------------------------------------------------------------------------


def padded_logits(model: Any, ids_ST: Tensor, lengths_S: Tensor) -> Tensor:
    """Logits (texts x classes) of texts padded on the right to one width; `lengths_S` are their tokens."""
    import torch

    width = ids_ST.shape[1]
    mask_ST = (torch.arange(width, device=ids_ST.device) < lengths_S[:, None]).long()
    if not reads_the_last_token(model):
        found: Tensor = model(input_ids=ids_ST, attention_mask=mask_ST).logits
        return found
    hidden_STD = model.base_model(input_ids=ids_ST, attention_mask=mask_ST, use_cache=False).last_hidden_state
    last_SD = hidden_STD[torch.arange(len(ids_ST), device=ids_ST.device), lengths_S - 1]
    scores: Tensor = model.score(last_SD)
    return scores


def logits_of(model: Any, documents: Sequence[Sequence[int]], *, batch_tokens: int = 8192) -> Tensor:
    """Logits (texts x classes, fp32, on the CPU) of encoded texts, in their order; `model` in evaluation mode.

    Texts of like length are computed together, as many as `batch_tokens` hold.
    """
    import torch

    device = next(model.parameters()).device
    found = torch.zeros(len(documents), model.config.num_labels)
    order = sorted(range(len(documents)), key=lambda number: -len(documents[number]))
    at = 0
    with torch.no_grad():
        while at < len(order):
            width = max(1, len(documents[order[at]]))
            chosen = order[at : at + max(1, batch_tokens // width)]
            ids = torch.zeros(len(chosen), width, dtype=torch.int64)
            lengths = torch.tensor([max(1, len(documents[number])) for number in chosen])
            for row, number in enumerate(chosen):
                ids[row, : len(documents[number])] = torch.tensor(documents[number], dtype=torch.int64)
            found[chosen] = padded_logits(model, ids.to(device), lengths.to(device)).float().cpu()
            at += len(chosen)
    return found


def probabilities(logits_SC: Tensor, config: Any) -> Tensor:
    """Of each class, at the temperature found on held-out texts; they add up to 1 where classes exclude each other."""
    scaled = logits_SC / float(getattr(config, TEMPERATURE, 1.0))
    return scaled.sigmoid() if config.problem_type == SEVERAL else scaled.softmax(-1)


def chosen_labels(probabilities_SC: Tensor, config: Any) -> list[list[int]]:
    """The numbers of the classes that are said of each text: the likeliest, or all above their thresholds."""
    import torch

    if config.problem_type != SEVERAL:
        return [[number] for number in probabilities_SC.argmax(-1).tolist()]
    limits: torch.Tensor = torch.tensor(getattr(config, THRESHOLDS, None) or [0.5] * probabilities_SC.shape[1])
    return [row.nonzero().flatten().tolist() for row in probabilities_SC >= limits]
