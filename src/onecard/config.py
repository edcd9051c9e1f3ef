"""One frozen model a verb: the only place where a setting has its name, its default, its limits and its explanation.

From these come the recipe file (TOML), the flags, the help, the errors and the recipe that `onecard new` writes.
`auto` is a value that the planner fills in and the run records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from onecard.errors import ConfigError
from onecard.settings import Auto, Fraction, Positive, PositiveNumber, Settings, Source, setting

StepName = Literal[
    "unicode", "language", "boilerplate", "forum_filler", "advertisements", "length", "symbols", "repetition",
    "personal_data", "chinese", "reference",
]  # fmt: skip
PersonalDataKind = Literal["id_card", "bank_card", "mobile", "landline", "email", "account", "plate", "ip", "name"]


class Verb(Settings):
    """What every verb that writes a directory has."""

    overwrite: bool = setting(False, "replace the output directory if it exists")


class CleanConfig(Verb):
    """Decode, repair, filter, deduplicate and split text into a corpus directory."""

    sources: list[Source] = setting(..., "files, folders or globs of text", positional=True, metavar="SOURCE")
    output: Path = setting(Path("corpus"), "the corpus directory to write")
    held_out: Fraction = setting(
        0.05, "share of the documents kept back to measure with, by document, never trained on"
    )
    minimum_characters: int = setting(20, "shorter documents are rejected (too_short)", ge=0)
    maximum_repetition: Fraction = setting(
        0.5, "reject a document when more than this share of it repeats its own earlier lines or 10-character spans"
    )
    maximum_symbol_ratio: Fraction = setting(
        0.5,
        "reject a document when more than this share of its characters is neither letter, digit nor common punctuation",
    )
    maximum_punctuation_ratio: Fraction = setting(
        0.7, "reject a document when more than this share of its characters is punctuation"
    )
    maximum_advertising: Fraction = setting(
        0.3, "reject a document when more than this share of it is sentences that advertise"
    )
    steps: list[StepName] = setting(
        list(get_args(StepName)), "what a text walks through, in this order; a step that is not named is not done"
    )
    languages: list[str] = setting(
        [], "keep only documents in these, such as zh en (zh: simplified and traditional); none named: all"
    )
    personal_data: Literal["keep", "mask", "drop"] = setting(
        "mask", "mask: put <手机号>, <EMAIL> ... in place of what is found; drop: reject the document"
    )
    personal_data_kinds: list[PersonalDataKind] = setting(
        ["id_card", "bank_card", "mobile", "landline", "email", "account", "plate", "ip"],
        "what personal_data looks for; name can be added, and is found by a weak rule",
    )
    chinese: Literal["keep", "simplified", "traditional"] = setting(
        "keep", "write Chinese text in these characters (needs onecard[chinese])"
    )
    reference: Path | None = setting(None, "a file of good text: reject documents that are unlike it", metavar="FILE")
    maximum_bits_per_byte: PositiveNumber | Auto = setting(
        "auto", "what a document may need under a character model of the reference; auto: measured on the reference"
    )
    near_duplicates: bool = setting(
        True, "remove near-duplicate documents (MinHash, verified by their true similarity)"
    )
    near_duplicate_threshold: Fraction = setting(
        0.7,
        "Jaccard similarity of character n-grams (3 for Chinese, word 3-grams otherwise) from which two are the same",
    )
    keep: Literal["first", "longest"] = setting("first", "which of several near-duplicates stays")
    repeated_paragraphs: bool = setting(
        False,
        "also remove paragraphs (lines of 20 Chinese or 60 other characters, or more) that an earlier document has",
    )
    decontaminate: list[Source] = setting(
        [],
        "evaluation files: documents that share 30 characters in sequence (Chinese) or 13 words with them are rejected",
    )
    workers: Positive | Auto = setting("auto", "processes at work (auto: one a core); changes nothing in the result")
    engine: Literal["local", "ray"] = setting(
        "local", "what runs them: processes of this machine, or Ray (needs onecard[ray]); changes nothing in the result"
    )
    ray_address: str | None = setting(
        None,
        "a Ray cluster that runs, as `ray start` names it (engine ray); none: Ray is started on this machine alone",
    )
    dry_run: Positive | None = setting(
        None,
        "show what the steps would do to so many documents, spread over the sources, and write nothing",
        metavar="N",
    )
    seed: int = setting(0, "decides which documents are held out")
    strict: bool = setting(False, "stop at the first bad row instead of keeping it aside")


class InspectConfig(Settings):
    """Page through the documents of a corpus, kept and rejected."""

    corpus: Path = setting(Path("corpus"), "a corpus directory (from clean)", positional=True, metavar="CORPUS")
    show: Literal["all", "kept", "rejected"] = setting("all", "which rows")
    reason: str = setting("", "only rows rejected for this reason, such as near_duplicate (kept: only kept ones)")
    source: str = setting("", "only rows of this source, by its name in the report")
    language: str = setting("", "only kept rows in this language (zh: simplified and traditional)")
    search: str = setting("", "only rows with this in their text or name; case does not count")
    rows: Positive = setting(20, "rows on a page")
    characters: Positive = setting(200, "so much of each text is shown")


class TokenizerTrainConfig(Verb):
    """Train a tokenizer with chat tokens and a chat template on a corpus."""

    corpus: Path = setting(Path("corpus"), "a corpus directory (from clean)", positional=True, metavar="CORPUS")
    output: Path = setting(Path("tokenizer"), "the tokenizer directory to write")
    kind: Literal["bpe", "unigram"] = setting(
        "bpe", "bpe: byte-level BPE, exports everywhere; unigram: for transformers and vLLM, not for GGUF"
    )
    vocabulary_size: int = setting(
        8192,
        "entries, special tokens included; a recipe that names pretrain's size takes what suits it",
        ge=300,
        le=1_000_000,
    )
    pre_tokenizer: Literal["auto", "qwen2", "llama-bpe", "deepseek-v3", "smollm", "gpt-2"] = setting(
        "auto", "how text is split before merging, by the name that llama.cpp knows it by; auto: by digits"
    )
    digits: Literal["auto", "one", "three", "any"] = setting(
        "auto", "digits a token: one, up to three, or any number; auto: as pre_tokenizer has it, else one"
    )
    maximum_token_characters: int = setting(
        16, "no token is longer than this (a run of text without spaces stays bounded)", ge=1
    )
    maximum_characters: int = setting(
        20_000_000, "characters to learn from; of a larger corpus an even sample, which keeps memory bounded", ge=1000
    )
    terms: Path | None = setting(None, "a file of terms, one a line (UTF-8), that become one token each")
    mine_terms: int = setting(0, "find up to so many terms in the corpus, and make those one token that pay", ge=0)


class TokenizerExtendConfig(Verb):
    """Add terms, or the control tokens of a chat template, to the tokenizer and the rows of an existing model."""

    model: Path = setting(..., "a model or run directory", positional=True, metavar="MODEL")
    output: Path = setting(Path("extended"), "the model directory to write")
    terms: Path | None = setting(None, "a file of terms, one a line (UTF-8), that become one token each")
    chat_template: Literal["none", "chatml", "qwen", "llama-3", "gemma", "mistral", "phi-3", "deepseek"] = setting(
        "none", "give the tokenizer this chat template, and the control tokens of it that it lacks"
    )
    pad_to_multiple_of: int = setting(64, "the rows of the embedding become a multiple of this", ge=1)


class TokenizerReportConfig(Verb):
    """Compare tokenizers on your own text: tokens by language and source, unused entries, how terms are split."""

    tokenizers: list[Path] = setting(
        ..., "tokenizer or model directories, side by side", positional=True, metavar="TOKENIZER"
    )
    corpus: Path | None = setting(None, "a corpus directory (from clean) to measure on")
    text: list[Source] = setting([], "files, folders or globs of text to measure on", metavar="SOURCE")
    terms: Path | None = setting(None, "a file of terms, one a line (UTF-8): how each tokenizer splits them")
    sizes: list[Positive] = setting(
        [4096, 8192, 16384, 32768, 65536],
        "vocabulary sizes for which a tokenizer is trained on this text, to see how many tokens it would take",
    )
    output: Path = setting(Path("tokenizer-report"), "the directory to write, with report.html")


class TrainingConfig(Verb):
    """What every verb that trains has: the settings of the one loop."""

    seed: int = setting(0, "decides initial weights and the order of rows", ge=0)
    max_steps: Positive | Auto = setting("auto", "number of updates; auto: from num_epochs and time_limit_minutes")
    num_epochs: PositiveNumber | Auto = setting("auto", "passes over the rows")
    time_limit_minutes: PositiveNumber | None = setting(
        None,
        "the plan fixes before the run as many updates as fit in this time on this machine (at most num_epochs)",
    )
    max_length: Annotated[int, Field(ge=8)] | Auto = setting(
        "auto", "tokens in a training row; auto: what suits the size of the model"
    )
    batch_size: Positive | Auto = setting("auto", "rows in a micro-batch")
    gradient_accumulation_steps: Positive | Auto = setting("auto", "micro-batches in an update")
    optimizer: Literal["auto", "adamw", "muon", "adafactor"] = setting(
        "auto", "muon: Muon for the matrices, AdamW for the rest; adafactor: the least memory"
    )
    optimizer_states: Literal["auto", "fp32", "8bit", "host"] = setting(
        "auto",
        "what AdamW and Muon remember: as it is, in 8 bits, or on the host while the card trains; auto: fp32, and 8bit "
        "where that would not fit",
    )
    optimizer_in_backward: bool = setting(
        False, "step each weight as soon as its gradient is there: no gradient is kept (needs max_grad_norm = 0)"
    )
    gradients: Literal["fp32", "bf16"] = setting("fp32", "number format in which gradients are kept")
    learning_rate: PositiveNumber | Auto = setting("auto", "peak learning rate (of AdamW; see muon_learning_rate)")
    muon_learning_rate: PositiveNumber | Auto = setting("auto", "peak learning rate of the matrices under muon")
    weight_decay: float = setting(0.1, "decoupled weight decay, on matrices only: never on norms and biases", ge=0)
    warmup_ratio: Fraction = setting(0.05, "share of the updates in which the learning rate rises")
    schedule: Literal["cosine", "wsd"] = setting("wsd", "wsd: warm-up, stable, then linear decay over decay_ratio")
    decay_ratio: Fraction = setting(0.6, "share of the updates in which wsd decays")
    final_learning_rate_ratio: Fraction = setting(0.0, "learning rate at the end as a share of the peak")
    max_grad_norm: float = setting(1.0, "gradients of an update are clipped to this norm (0: never)", ge=0)
    precision: Literal["auto", "fp32", "bf16", "fp16", "pure_bf16", "float8"] = setting(
        "auto",
        "bf16, fp16: products in it over fp32 weights; pure_bf16: weights too, rounded stochastically; "
        "float8: products of the layers (new cards); auto takes what is fast here and safe",
    )
    compile: bool = setting(
        True, "compile each layer (needs a C++ compiler on a CPU); plain execution with a note otherwise"
    )
    cuda_graphs: bool = setting(False, "record each compiled layer as a CUDA graph: less overhead on small models")
    activation_checkpointing: Literal["auto", "none", "selective", "full"] | Positive = setting(
        "auto",
        "what backward computes again instead of keeping it: selective (all but matrix products and attention), full "
        "(whole layers), or a number n (every n-th layer); auto: nothing, and what is needed where that would not fit",
    )
    activation_offload: bool = setting(False, "keep what backward needs in the memory of the host")
    activation_compression: Literal["none", "8bit"] = setting(
        "none", "keep what backward needs in 8 bits; its gradients are no longer exact"
    )
    check_memory: bool = setting(True, "refuse a run that is predicted to need more memory than there is")
    evaluate_every: Positive | Auto = setting("auto", "updates between evaluations on held-out rows")
    save_every: Positive | Auto = setting("auto", "updates between checkpoints; auto: about once a minute")
    keep_last: Positive = setting(2, "checkpoints kept")
    keep_best: bool = setting(False, "also keep the checkpoint with the lowest loss on held-out rows")
    keep_every: Positive | None = setting(None, "also keep each checkpoint whose update is a multiple of this")
    log_every: Positive = setting(1, "updates between lines of metrics.jsonl")
    skips_before_roll_back: Positive = setting(
        5, "updates in a row without a finite gradient, after which the run goes back to its last checkpoint"
    )
    most_roll_backs: int = setting(3, "after so many the run gives up, and can be resumed", ge=0)
    roll_back_learning_rate_factor: Annotated[float, Field(gt=0, le=1)] = setting(
        1.0, "the learning rate is multiplied by this at each roll-back"
    )
    on_spike: Literal["ignore", "warn", "roll_back"] = setting(
        "warn", "what to do when loss or gradient norm is far above what it has been lately"
    )
    early_stopping: Positive | None = setting(
        None, "end the run after so many evaluations without a lower loss on held-out rows; the best model is kept"
    )
    pause_above_celsius: PositiveNumber | Auto | None = setting(
        "auto", "wait for the card to cool above this temperature; auto: what its kind stands; none: never"
    )
    when_hot: Literal["pause", "slow"] = setting(
        "pause",
        "above that temperature: pause until the card is cooler; slow: rest after each update, as long as needed",
    )
    electricity_price: PositiveNumber | None = setting(None, "price of a kWh, to say what a run costs")
    currency: str = setting("", "what electricity_price is in, such as EUR or 元")
    detach: bool = setting(False, "go on in the background, also when the terminal is closed")

    @property
    def row_tokens(self) -> int:
        """`max_length`, once the verb has resolved it."""
        assert self.max_length != "auto"
        return self.max_length


class PretrainConfig(TrainingConfig):
    """Train a language model from nothing on a corpus."""

    corpus: Path = setting(Path("corpus"), "a corpus directory (from clean)", positional=True, metavar="CORPUS")
    tokenizer: Path = setting(Path("tokenizer"), "a tokenizer directory (from tokenizer train)")
    output: Path = setting(Path("pretrain"), "the run directory to write; the model lies in its model/")
    size: str = setting(
        "auto", "parameters, such as 26M, 200M or 1B; auto: the largest that learns enough in the time given"
    )
    start: Literal["auto", "random", "bigram"] = setting(
        "auto",
        "bigram: embeddings begin at the statistics of neighbouring tokens; auto takes it for small vocabularies",
    )
    mix: dict[str, Annotated[float, Field(ge=0)]] = setting(
        {}, "passes over each source in an epoch (1 where not named), such as { poems = 2, news = 0.5 }"
    )
    mix_shares: dict[str, Fraction] = setting(
        {}, "instead of mix: shares of an epoch's tokens, such as { poems = 0.3 }; the others keep their proportions"
    )

    @model_validator(mode="after")
    def _size_can_be_chosen(self) -> Self:
        if self.size == "auto" and self.time_limit_minutes is None:
            # Not a ValueError: it is said as it stands.
            raise ConfigError(
                "size = auto needs to know how long pretraining may take.",
                "Give time_limit_minutes (--time-limit-minutes), or a size such as 26M (--size).",
            )
        return self


class FurtherConfig(TrainingConfig):
    """What every verb has that trains a model further, of all of its weights or beside them."""

    model: Path = setting(
        Path("pretrain"), "a model or run directory, or a GGUF file", positional=True, metavar="MODEL"
    )
    sources: list[Source] = setting(..., "files, folders or globs of chat rows", metavar="SOURCE")
    output: Path = setting(Path("finetune"), "the run directory to write; the model lies in its model/")
    held_out: Fraction = setting(0.02, "share of the rows kept back to measure with")
    weight_decay: float = setting(0.0, "decoupled weight decay, on matrices only: never on norms and biases", ge=0)
    schedule: Literal["cosine", "wsd"] = setting("cosine", "shape of the learning rate over the run")
    lora_rank: int = setting(0, "train adapters of this rank beside frozen weights (LoRA); 0 trains all weights", ge=0)
    lora_alpha: PositiveNumber | Auto = setting("auto", "adapters are scaled by this over their rank; auto: twice it")
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = setting(0.0, "share of the adapters' input dropped")
    target_modules: list[str] = setting(
        [], "names of the layers that get adapters, such as q_proj; none named: every linear layer but the head"
    )
    rank_stabilised: bool = setting(False, "scale adapters by alpha over the root of the rank (rsLoRA)")
    decomposed: bool = setting(False, "learn the length of each row of the adapted weights too (DoRA)")
    lora_start: Literal["default", "gaussian", "orthogonal", "pissa", "pissa_niter_16", "olora"] = setting(
        "default",
        "where adapters begin: default, gaussian, orthogonal: at nothing; pissa (pissa_niter_16: found faster), olora: "
        "at the strongest directions of the weights",
    )
    lora_plus_ratio: Annotated[float, Field(ge=1)] = setting(
        1.0, "learning rate of the adapters' output matrices over that of their input matrices (LoRA+); such as 16"
    )
    quantization: Literal["none", "nf4"] = setting(
        "none", "how frozen weights lie beside adapters: as they are, or in 4 bits (QLoRA; needs bitsandbytes)"
    )
    quantization_aware: Literal["none", "int8", "int4"] = setting(
        "none", "train all weights so that `onecard quantize` to this format leaves the model as it was trained"
    )
    packing: bool | Auto = setting(
        "auto", "several rows in one, each attended alone; auto: wherever the model can keep them apart"
    )
    strict: bool = setting(False, "stop at the first bad row instead of dropping and counting it")


class FinetuneConfig(FurtherConfig):
    """Teach a model to answer: supervised fine-tuning on chat rows, learning the answers only."""

    sources: list[Source] = setting([], "files, folders or globs of chat rows", metavar="SOURCE")
    text_share: Fraction = setting(
        0.0,
        "share of the rows that is plain text of `corpus`, so that the model forgets less of what it knew; 1: text "
        "alone, without sources (pretraining a model further)",
    )
    corpus: Path | None = setting(None, "a corpus directory (from clean) for text_share")
    learn: Literal["answers", "last_answer", "everything"] = setting(
        "answers",
        "answers: each but those marked train = false; last_answer: of each chat the last alone; everything: questions "
        "too",
    )
    decontaminate: list[Source] = setting(
        [], "evaluation files: rows that ask one of their questions are dropped (question_in_evaluation)"
    )
    neftune_alpha: float = setting(
        0.0, "noise on the embeddings while training (NEFTune), such as 5: less learned by heart; 0: none", ge=0
    )

    @model_validator(mode="after")
    def _has_rows_to_learn(self) -> Self:
        if not self.sources and self.text_share < 1:
            raise ConfigError(
                "the setting sources is missing.",
                "Give it: files, folders or globs of chat rows. For text alone: text_share = 1, and corpus.",
            )
        if self.sources and self.text_share == 1:
            raise ConfigError(
                "text_share = 1 leaves no row for the chats of sources.", "Leave sources out, or lower text_share."
            )
        return self


class DistillConfig(FinetuneConfig):
    """Teach a small model what a larger one would say; the tokenizer of both is the same."""

    teacher: Path = setting(..., "the model that is learned from: a model or run directory, or a GGUF file")
    output: Path = setting(Path("distill"), "the run directory to write; the model lies in its model/")
    distillation_weight: Fraction = setting(
        0.5, "share of the teacher's predictions in what is learned; the rest: the tokens that stand in the rows"
    )
    distillation_temperature: PositiveNumber = setting(
        1.0, "above 1, what the teacher holds for unlikely counts for more"
    )
    answers: Literal["rows", "teacher"] = setting(
        "rows", "teacher: it answers the last question of each row first, and its answers are learned"
    )
    answer_tokens: Positive = setting(256, "answers = teacher: longer answers are left out")


class AlignConfig(FurtherConfig):
    """Learn from preferences: of two answers to a question the better one becomes likelier than the worse one."""

    model: Path = setting(
        Path("finetune"), "a model or run directory, or a GGUF file", positional=True, metavar="MODEL"
    )
    sources: list[Source] = setting(..., "files, folders or globs of rows with preferences", metavar="SOURCE")
    output: Path = setting(Path("align"), "the run directory to write; the model lies in its model/")
    max_length: Annotated[int, Field(ge=8)] | Auto = setting(
        "auto", "tokens in a training row, which holds both answers of a question; auto: twice what most rows need"
    )
    method: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = setting(
        "dpo",
        "dpo, ipo: against the model as it was; simpo, orpo: without it; kto: answers judged one by one (label)",
    )
    beta: PositiveNumber | Auto = setting(
        "auto", "how far the model may move (larger: less; orpo: the weight of the comparison); auto: 0.1, simpo 2"
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = setting(
        0.0, "dpo: the share of the preferences that is believed to be the wrong way round"
    )
    length_normalised: bool = setting(False, "dpo: compare means over the tokens of an answer, not sums")
    simpo_margin: float = setting(1.0, "simpo: how far the better answer shall be ahead", ge=0)
    likelihood_weight: float = setting(0.0, "add so much of the chosen answer's mean cross-entropy to the loss", ge=0)


class ClassifyConfig(FurtherConfig):
    """Learn to name the class of a text (sentiment, topic): one class, or several, with probabilities."""

    model: Path = setting(
        Path("pretrain"),
        "a model or run directory: an encoder (BERT) or a language model",
        positional=True,
        metavar="MODEL",
    )
    sources: list[Source] = setting(
        ..., "files, folders or globs of rows with text and label; or a named source for each class", metavar="SOURCE"
    )
    output: Path = setting(Path("classify"), "the run directory to write; the model lies in its model/")
    held_out: Fraction = setting(0.1, "share of the texts kept back to measure with")
    weight_decay: float = setting(0.01, "decoupled weight decay, on matrices only: never on norms and biases", ge=0)
    max_length: Annotated[int, Field(ge=8)] | Auto = setting(
        "auto", "tokens of a text, longer ones are cut at the end; auto: 512, or what the model can read"
    )
    label_field: str = setting("auto", "the key or column that holds the label; auto recognises the usual names")
    split_field: str | None = setting(
        None,
        "the key or column that says which texts are held out (held_out, test, dev, validation) and which are learned "
        "(train); none: a share, by the text",
    )
    several_labels: bool = setting(False, "a text may have several labels (a list), or none")
    class_weights: Literal["none", "balanced"] = setting("none", "balanced: rare classes count as much as common ones")


class PredictConfig(Verb):
    """Name the classes of texts with a classifier."""

    model: Path = setting(Path("classify"), "a classifier (from classify)", positional=True, metavar="MODEL")
    sources: list[Source] = setting(..., "files, folders or globs of rows with text", metavar="SOURCE")
    output: Path = setting(Path("predictions"), "the directory to write predictions.jsonl to")
    label_field: str = setting("auto", "where rows have labels, the field they stand in: they are then compared")
    strict: bool = setting(False, "stop at the first bad row instead of setting it aside")


class ExportConfig(Verb):
    """Write a model for llama.cpp, Ollama (GGUF), transformers and vLLM; read it back to see that it is the same."""

    model: Path = setting(Path("finetune"), "a model or run directory", positional=True, metavar="MODEL")
    formats: list[Literal["f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "safetensors", "safetensors_f32"]] = setting(
        ["f16"],
        "a GGUF file for each number format (q8_0: 8.5 bits a weight, q4_0: 4.5); safetensors: a directory for "
        "transformers and vLLM, in 16 bits or in fp32",
    )
    output: Path = setting(Path("export"), "the directory to write")
    card: Literal["en", "zh"] = setting("en", "the language of the model card that is written beside")
    name: str = setting("", "what the model is called (default: the name of its directory)")


class CardConfig(Settings):
    """Write a model card (README.md) from what is recorded about how a model was made."""

    model: Path = setting(Path("finetune"), "a model or run directory", positional=True, metavar="MODEL")
    evaluations: list[Path] = setting([], "directories of evaluate, compare or classify, to be told", metavar="DIR")
    licences: dict[str, str] = setting({}, "the licence of each source, by its name")
    language: Literal["en", "zh"] = setting("en", "the language of the card")
    name: str = setting("", "what the model is called (default: the name of its directory)")
    output: Path | None = setting(None, "the directory to put README.md in (default: that of the model)")


class ComparedConfig(Verb):
    """What every verb has that makes another form of a model and compares it with the original."""

    corpus: Path | None = setting(
        None, "a corpus directory (from clean): its held-out text measures, its other text calibrates where needed"
    )
    questions: list[Source] = setting([], "chat rows that both forms answer", metavar="SOURCE")
    question_count: Positive = setting(100, "how many of the questions are asked")
    max_new_tokens: Positive = setting(64, "longest answer")
    text_kilobytes: Positive = setting(200, "so much held-out text of each language is measured")
    seed: int = setting(0, "decides which questions and texts are taken")


class CalibratedConfig(ComparedConfig):
    """What every verb has besides that looks at what passes through the model on text of the corpus."""

    calibration_rows: Positive = setting(64, "rows of text of the corpus, where the method looks at some")
    calibration_tokens: Annotated[int, Field(ge=8)] = setting(512, "tokens in such a row")


class QuantizeConfig(CalibratedConfig):
    """Make a model's weights integers of 4 or 8 bits, or float8, for transformers and vLLM."""

    model: Path = setting(Path("finetune"), "a model or run directory", positional=True, metavar="MODEL")
    format: Literal["int8", "int4", "nf4", "float8"] = setting(
        "int8", "int8: a scale a row; int4: a scale a group; nf4: bitsandbytes; float8: for cards that have it"
    )
    method: Literal["auto", "nearest", "gptq"] = setting(
        "auto",
        "gptq: later weights make up for the rounding of earlier ones, on text of the corpus; auto: gptq for int4 with "
        "a corpus, else nearest",
    )
    group_size: Positive | Auto = setting(
        "auto", "int4: neighbours that share a scale, 32, 64 or 128; auto: the most that divides every layer's width"
    )
    head: bool = setting(False, "quantize the output layer too")
    kept_precision: Literal["auto", "bf16", "fp16", "fp32"] = setting(
        "auto", "number format of what is not quantized; auto: bf16, or fp16 where the model is in that"
    )
    output: Path = setting(Path("quantized"), "the model directory to write, with report.html")


class PruneConfig(CalibratedConfig):
    """Take layers, heads, channels or single weights out of a model, those that matter least on text of your own."""

    model: Path = setting(
        Path("finetune"), "a model or run directory, or a GGUF file", positional=True, metavar="MODEL"
    )
    drop_layers: int = setting(0, "how many layers are left out", ge=0)
    layers_by: Literal["loss", "similarity"] = setting(
        "loss",
        "which layers go: loss: one by one, that whose absence costs least; similarity: those that change least of "
        "what passes them (one pass over the text)",
    )
    heads: Positive | None = setting(None, "attention heads that stay in each layer; none: all")
    key_value_heads: Positive | None = setting(
        None, "key/value heads that stay in each layer, with their query heads; none: all"
    )
    intermediate_size: Positive | None = setting(None, "feed-forward channels that stay in each layer; none: all")
    sparsity: Annotated[float, Field(gt=0, lt=1)] | Literal["2:4"] | None = setting(
        None, "share of the weights of each row that become 0, or 2:4 (two of four neighbours); none: none"
    )
    heal_updates: int = setting(
        0, "so many updates on text of the corpus, in which it learns what the original would say", ge=0
    )
    heal_learning_rate: PositiveNumber | Auto = setting("auto", "peak learning rate of healing")
    heal_tokens: Positive = setting(8192, "tokens in an update of healing")
    output: Path = setting(Path("pruned"), "the model directory to write, with report.html")


class MergeConfig(ComparedConfig):
    """Add adapters, or what other models learned from the same base, to that base."""

    model: Path = setting(..., "the base: a model or run directory, or a GGUF file", positional=True, metavar="BASE")
    parts: list[Path] = setting(
        ..., "adapters of the base (PEFT), or models that were trained from it", positional=True, metavar="PART"
    )
    weights: list[float] = setting([], "how much of each part is added; none given: equal shares of 1")
    method: Literal["linear", "ties"] = setting(
        "linear",
        "linear: base + the weighted differences; ties: of each difference only the largest, where most agree in sign",
    )
    density: Annotated[float, Field(gt=0, le=1)] = setting(0.2, "ties: share of each difference that is kept")
    kept_precision: Literal["auto", "bf16", "fp16", "fp32"] = setting(
        "auto", "number format of the weights that are written; auto: that of the base"
    )
    output: Path = setting(Path("merged"), "the model directory to write, with report.html")


class RateSearch(Settings):
    """What `find-lr` has beside the settings of the run that is meant."""

    method: Literal["range", "short_runs"] = setting(
        "range", "range: one run whose learning rate grows; short_runs: a few rates, each from the same start"
    )
    updates: Annotated[int, Field(ge=20)] = setting(100, "updates of the range, or of each short run")
    lowest_learning_rate: PositiveNumber | Auto = setting("auto", "where the range begins")
    highest_learning_rate: PositiveNumber | Auto = setting("auto", "where the range ends, if the loss bears it")
    candidates: list[PositiveNumber] = setting([], "learning rates of the short runs; none: around what auto takes")


class FindPretrainRateConfig(PretrainConfig, RateSearch):
    """Find the learning rate for `onecard pretrain` with these settings; the run itself is not begun."""

    output: Path = setting(Path("find-lr"), "the directory to write, with report.html")
    compile: bool = setting(False, "compile each layer; so few updates seldom repay it")


class FindFinetuneRateConfig(FinetuneConfig, RateSearch):
    """Find the learning rate for `onecard finetune` with these settings; the model stays as it is."""

    output: Path = setting(Path("find-lr"), "the directory to write, with report.html")
    compile: bool = setting(False, "compile each layer; so few updates seldom repay it")


class EvaluateConfig(Verb):
    """Measure a model on text that it has not seen."""

    model: Path = setting(
        Path("finetune"), "a model or run directory, or a GGUF file", positional=True, metavar="MODEL"
    )
    corpus: Path | None = setting(Path("corpus"), "a corpus directory: bits per byte of its held-out documents")
    base: Path | None = setting(None, "a model to compare with, side by side")
    questions: list[Source] = setting(
        [], "chat rows: the model answers some, and its stopping is measured", metavar="SOURCE"
    )
    question_count: Positive = setting(20, "how many of the questions are asked")
    harness: list[Path] = setting(
        [], "task files (YAML) of lm-evaluation-harness on local data (needs onecard[harness])", metavar="FILE"
    )
    harness_limit: Positive | None = setting(None, "so many documents of each task; none: all")
    harness_functions: bool = setting(False, "let task files run the Python functions that they name (!function)")
    compare_xz: bool = setting(
        True, "also measure what xz -9e reaches on the same held-out text after the training text"
    )
    max_new_tokens: Positive = setting(128, "longest answer")
    window_tokens: Positive | Auto = setting(
        "auto", "context of the perplexity windows; auto: what the model was trained with"
    )
    seed: int = setting(0, "decides which questions are asked")
    output: Path = setting(Path("evaluation"), "the evaluation directory to write")


class CompareConfig(Verb):
    """Say whether a model is better than another one, such as its base, on the same rows, and how sure that is."""

    base: Path = setting(
        ..., "the model to begin from, such as the one before fine-tuning", positional=True, metavar="BASE"
    )
    model: Path = setting(..., "the model that may be better", positional=True, metavar="MODEL")
    sources: list[Source] = setting(
        [],
        "chats, multiple choice (question, choices, answer), rows with checks; rows that a model learned are left out",
        metavar="ROWS",
    )
    text: list[Source] = setting(
        [], "a corpus directory or files of general text: bits per byte tell what was forgotten", metavar="TEXT"
    )
    rows: Positive = setting(200, "chats whose answers' loss is measured, and questions of multiple choice")
    learn: Literal["answers", "last_answer"] = setting(
        "answers", "the loss of all answers of a chat, or of its last: as the model was trained"
    )
    question_count: Positive = setting(40, "questions that both models answer")
    text_characters: Positive = setting(
        100_000, "so much of the text is measured, evenly spread, of each language as much"
    )
    max_new_tokens: Positive = setting(128, "longest answer")
    window_tokens: Positive | Auto = setting("auto", "context of the windows over text; auto: up to 1024")
    seed: int = setting(0, "decides which rows are taken, and the resamples of the intervals", ge=0)
    output: Path = setting(Path("comparison"), "the directory to write, with report.html")


class DiagnoseConfig(Verb):
    """Find out why a model's answers go round in circles, and which sampling to serve it with."""

    model: Path = setting(Path("finetune"), "a chat model or run directory", positional=True, metavar="MODEL")
    questions: list[Source] = setting(
        [], "chat rows with the right answers (default: those of its own run, held-out ones)", metavar="SOURCE"
    )
    question_count: Positive = setting(40, "how many of the questions are asked, in each of seven ways")
    max_new_tokens: Positive = setting(200, "longest answer: loops need room to show")
    max_length: Positive | Auto = setting("auto", "longest context in tokens; auto: what the model was made for")
    max_concurrent: Positive = setting(8, "questions answered at the same time")
    write: bool = setting(False, "write what is recommended to the model's generation_config.json")
    seed: int = setting(0, "decides which questions are asked, and how answers are sampled", ge=0)
    output: Path = setting(Path("diagnosis"), "the directory to write, with report.html")


class ServeConfig(Settings):
    """Serve a model over an OpenAI-compatible HTTP interface on this machine."""

    model: Path = setting(
        Path("finetune"), "a model or run directory, or a GGUF file", positional=True, metavar="MODEL"
    )
    more: list[Path] = setting(
        [],
        "further models, each served by its directory's name, with weights and memory of its own",
        positional=True,
        metavar="MODEL",
    )
    adapter: list[str] = setting(
        [], "an adapter, served by a name as its base with the adapter added", metavar="NAME=DIR", one_by_one=True
    )
    embeddings: bool = setting(
        False, "language models answer /v1/embeddings too; holds their weights a second time, in fp32"
    )
    host: str = setting(
        "127.0.0.1", "address to listen on; anything else than 127.0.0.1 opens the model to the network"
    )
    port: int = setting(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    name: str = setting("", "model name that clients use (default: the directory's name)")
    max_concurrent: Positive = setting(8, "requests answered at the same time; more wait in a queue")
    max_queue: Positive = setting(64, "requests that may wait; one more is answered 429")
    time_limit_seconds: PositiveNumber | None = setting(None, "an answer that takes longer ends with an error (504)")
    api_key_file: Path | None = setting(
        None, "a file with the key that clients must give; else the environment's ONECARD_API_KEY; else none is needed"
    )
    max_length: Positive | Auto = setting("auto", "longest prompt and answer together, in tokens")
    precision: Literal["auto", "fp32", "bf16", "int8", "int4"] = setting(
        "auto", "number format of the weights while serving; int8, int4: rounded, on a CPU"
    )
    prefix_megabytes: int = setting(
        256, "memory for what was read before (system prompts, histories) and is not read again; 0: none", ge=0
    )
    engine: Literal["embedded", "vllm"] = setting(
        "embedded", "what answers: onecard's own engine, or vLLM where it is installed, for many users"
    )
    vllm: Path | None = setting(
        None, "engine vllm: its environment (a folder), python or executable; else beside this python, or on PATH"
    )

    @model_validator(mode="after")
    def _vllm_is_meant(self) -> Self:
        if self.vllm is not None and self.engine != "vllm":
            raise ConfigError("vllm names a vLLM, but the embedded engine was asked for.", "Add --engine vllm.")
        if self.engine == "vllm" and (self.more or self.adapter or self.embeddings):
            raise ConfigError(
                "engine vllm serves one model, by vLLM's own routes.",
                "Leave out further models, adapters and embeddings.",
            )
        return self


class ChatConfig(Settings):
    """Talk to a model in the terminal."""

    model: Path = setting(
        Path("finetune"), "a model or run directory, or a GGUF file", positional=True, metavar="MODEL"
    )
    system: str = setting("", "system message put before the conversation")
    temperature: float = setting(0.7, "0 always takes the likeliest token", ge=0)
    top_p: float = setting(0.9, "nucleus sampling", ge=0, le=1)
    max_new_tokens: Positive = setting(512, "longest answer")
    seed: int | None = setting(None, "the same seed gives the same answers")
    precision: Literal["auto", "fp32", "bf16", "int8", "int4"] = setting(
        "auto", "number format of the weights; int8, int4: rounded, on a CPU"
    )


class AskConfig(Settings):
    """The last stage of a recipe: serve the model, ask it, show the answers, stop."""

    questions: list[str] = setting([], "asked over HTTP, one after another")
    max_new_tokens: Positive = setting(64, "longest answer")


class RunConfig(Settings):
    """Walk a recipe from text to a served model; stages whose inputs and settings are unchanged are skipped."""

    recipe: Path = setting(..., "a recipe file (TOML)", positional=True, metavar="RECIPE")
    output: Path | None = setting(None, "where all stages write (default: what the recipe says)")
    set: list[str] = setting(
        [],
        "change one setting of the recipe, such as pretrain.max_steps=200",
        metavar="STAGE.KEY=VALUE",
        one_by_one=True,
    )
    detach: bool = setting(False, "go on in the background, also when the terminal is closed")


class StatusConfig(Settings):
    """Say how a run stands, whether it is at work or not: progress, losses, time left, changes, settings in force."""

    run: Path = setting(..., "a run directory, or the output of a recipe", positional=True, metavar="RUN")


class PauseConfig(Settings):
    """Ask a run to save at its next completed update and to free the device; waits until that is done."""

    run: Path = setting(..., "a run directory, or the output of a recipe", positional=True, metavar="RUN")
    wait_minutes: float = setting(30, "how long to wait for it (the request stands, whatever comes first)", ge=0)


class SetConfig(Settings):
    """Change settings of a run: from its next update on, or from its next start where it does not run."""

    run: Path = setting(..., "a run directory, or the output of a recipe", positional=True, metavar="RUN")
    changes: list[str] = setting(..., "such as learning_rate=1e-5", positional=True, metavar="KEY=VALUE")


class ResumeConfig(Settings):
    """Go on with a run that was paused, interrupted or crashed, from wherever it was started."""

    run: Path = setting(..., "a run directory, or the output of a recipe", positional=True, metavar="RUN")
    set: list[str] = setting(
        [], "change settings first, also those that need a restart, such as batch_size=4", metavar="KEY=VALUE"
    )
    detach: bool = setting(False, "go on in the background, also when the terminal is closed")


class MemoryBenchConfig(Verb):
    """Measure what each way of saving memory saves and costs here: peak memory and speed of an update, as a table."""

    size: str = setting("137M", "a preset, or a size between, such as 26M")
    vocabulary_size: int = setting(49152, "entries of the vocabulary", ge=300, le=1_000_000)
    max_length: int = setting(1024, "tokens in a training row", ge=8)
    batch_size: list[Positive] = setting([1, 8], "rows in a micro-batch: one table for each")
    updates: int = setting(3, "updates of each measurement; the first is not counted", ge=2)
    compile: bool = setting(True, "compile each layer")
    only: list[str] = setting([], "measure only what has one of these words in its name, such as fp32", metavar="WORD")
    output: Path = setting(Path("memory"), "the directory to write the table to")


class PlanConfig(Verb):
    """Say what fits, how long it takes and what it costs, before anything runs: for a recipe, or for a model."""

    recipe: Path | None = setting(
        None, "a recipe: what it trains is planned, or what its table [plan] says", positional=True, metavar="RECIPE"
    )
    model: str = setting("", "a size (26M to 4B), a model directory, or a published model such as llama-3.1-8b")
    card: str | None = setting(None, "a card such as 'RTX 4090'; none named: this machine")
    method: Literal["full", "lora", "qlora"] = setting(
        "full", "train all weights, adapters beside frozen ones, or adapters beside frozen weights of 4 bits"
    )
    lora_rank: Positive = setting(16, "rank of the adapters of lora and qlora")
    target_modules: list[str] = setting([], "names of the layers that get adapters; none named: every linear layer")
    max_length: Annotated[int, Field(ge=8)] | Auto = setting("auto", "tokens in a training row; auto: what is usual")
    batch_size: Positive | Auto = setting("auto", "rows in a micro-batch")
    gradient_accumulation_steps: Positive | Auto = setting("auto", "micro-batches in an update")
    precision: Literal["auto", "fp32", "bf16", "fp16", "pure_bf16", "float8"] = setting("auto", "number format")
    optimizer: Literal["auto", "adamw", "muon", "adafactor", "sgd"] = setting("auto", "auto: as a run would take")
    optimizer_states: Literal["auto", "fp32", "8bit", "host"] = setting("auto", "what the optimizer remembers")
    optimizer_in_backward: bool | Auto = setting("auto", "step each weight as soon as its gradient is there")
    gradients: Literal["auto", "fp32", "bf16"] = setting("auto", "number format in which gradients are kept")
    activation_checkpointing: Literal["auto", "none", "selective", "full"] | Positive = setting(
        "auto", "what backward computes again instead of keeping it"
    )
    activation_offload: bool | Auto = setting("auto", "keep what backward needs in the memory of the host")
    activation_compression: Literal["auto", "none", "8bit"] = setting("auto", "keep what backward needs in 8 bits")
    packing: bool = setting(True, "rows are full; else each holds one document, and the longest is max_length")
    compile: bool = setting(True, "each layer is compiled")
    tokens: PositiveNumber | None = setting(None, "tokens that the whole training sees, such as 2.5e9")
    time_limit_minutes: PositiveNumber | None = setting(None, "with compute_optimal: how long it may take")
    largest: bool = setting(False, "which is the largest model that fits, by this method and max_length")
    longest_context: bool = setting(False, "which is the longest max_length that fits for this model")
    compute_optimal: bool = setting(False, "which size is best for so many tokens, or so much time")
    electricity_price: PositiveNumber | None = setting(None, "price of a kWh, to say what the training costs")
    currency: str = setting("", "what electricity_price is in, such as EUR or 元")
    output: Path | None = setting(None, "a directory to write report.html into, with the picture over the update")


class DoctorConfig(Settings):
    """Look at this machine: what is right for training, what is wrong, and what mends it."""

    directory: Path = setting(Path(), "where data and checkpoints would lie", positional=True, metavar="DIR")
    calibrate: bool = setting(False, "also measure the rates of products, copies and disk, and keep them")


class NewConfig(Settings):
    """Lay out a project of one's own: a recipe with every setting explained, and a folder for the text."""

    directory: Path = setting(..., "the folder to make", positional=True, metavar="DIR")
    from_: Path | None = setting(
        None,
        "make the recipe of a training file of LLaMA-Factory, Axolotl or Unsloth (YAML, JSON; scripts are not run)",
        metavar="FILE",
    )
