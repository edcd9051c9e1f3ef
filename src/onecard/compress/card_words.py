"""What a model card says, in English and in Chinese."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """Headings, labels and sentences of a card; braces are filled in."""

    parameters: str
    architecture: str
    layers: str
    width: str
    context: str
    vocabulary: str
    number_format: str
    weights: str
    unknown: str
    made_by: str
    begun_with: str
    not_made_here: str
    data: str
    data_unknown: str
    source: str
    documents: str
    characters: str
    size: str
    licence: str
    not_given: str
    none: str
    cleaned: str
    personal: str
    rows: str
    training: str
    stage: str
    updates: str
    tokens: str
    optimizer: str
    precision: str
    device: str
    time: str
    energy: str
    held_out_loss: str
    rank: str
    evaluation: str
    not_evaluated: str
    limits: str
    only_languages: str
    few_tokens: str
    may_be_wrong: str
    no_safety: str
    use: str
    provenance: str
    made_with: str


WORDS = {
    "en": Words(
        parameters="parameters",
        architecture="architecture",
        layers="layers",
        width="width",
        context="context, tokens",
        vocabulary="vocabulary",
        number_format="numbers",
        weights="weights on disk",
        unknown="unknown",
        made_by="Made with onecard: {way}.",
        begun_with="It began with {base}, whose data and licence are not known here.",
        not_made_here="How this model was made is not written down.",
        data="Data",
        data_unknown="What this model learned from is not written down.",
        source="source",
        documents="documents kept",
        characters="characters",
        size="size",
        licence="licence",
        not_given="not given",
        none="none",
        cleaned="Of {read} documents {kept} were kept ({held_out} of them held out); dropped: {dropped}.",
        personal="Personal data was looked for and taken out: {kinds}.",
        rows="`{verb}` read {read} rows and kept {kept}, {held_out} of them held out.",
        training="Training",
        stage="stage",
        updates="updates",
        tokens="tokens",
        optimizer="optimizer, learning rate",
        precision="precision",
        device="device",
        time="time",
        energy="energy",
        held_out_loss="loss on held-out rows",
        rank="rank",
        evaluation="Evaluation",
        not_evaluated="No evaluation was given for this card.",
        limits="Limits",
        only_languages="It learned from text in these languages only: {languages}.",
        few_tokens="It saw {tokens} tokens, {each} for each parameter; 20 are usual (Hoffmann et al. 2022).",
        may_be_wrong="What it says may be wrong, and reads as sure as what is right. Check it before you use it.",
        no_safety="It was not trained to refuse harmful questions unless its rows did so.",
        use="Use",
        provenance="Provenance",
        made_with="Finished {created} with {versions}. Content hash (xxh3): `{content}`.",
    ),
    "zh": Words(
        parameters="参数量",
        architecture="结构",
        layers="层数",
        width="宽度",
        context="上下文（词元）",
        vocabulary="词表",
        number_format="数值格式",
        weights="权重占用磁盘",
        unknown="未知",
        made_by="由 onecard 制作：{way}。",
        begun_with="它从 {base} 开始；那个模型的数据和许可这里不知道。",
        not_made_here="没有记录说明这个模型是怎样做出来的。",
        data="数据",
        data_unknown="没有记录说明这个模型学过什么。",
        source="来源",
        documents="保留的文档",
        characters="字符",
        size="大小",
        licence="许可",
        not_given="未提供",
        none="无",
        cleaned="读入 {read} 篇文档，保留 {kept} 篇（其中 {held_out} 篇留出）；去掉的：{dropped}。",
        personal="查找并去除了个人信息：{kinds}。",
        rows="`{verb}` 读入 {read} 行，保留 {kept} 行，其中 {held_out} 行留出。",
        training="训练",
        stage="阶段",
        updates="更新次数",
        tokens="词元",
        optimizer="优化器，学习率",
        precision="精度",
        device="设备",
        time="用时",
        energy="耗电",
        held_out_loss="留出行的损失",
        rank="秩",
        evaluation="评测",
        not_evaluated="制作这张卡片时没有给出评测。",
        limits="局限",
        only_languages="它只学过这些语言的文本：{languages}。",
        few_tokens="它见过 {tokens} 个词元，每个参数 {each} 个；通常是 20 个（Hoffmann 等，2022）。",
        may_be_wrong="它说的可能是错的，而且错的读起来和对的一样肯定。使用前请核对。",
        no_safety="除非训练行里有，否则它没有学过拒绝有害的问题。",
        use="使用",
        provenance="出处",
        made_with="完成于 {created}，使用 {versions}。内容哈希（xxh3）：`{content}`。",
    ),
}
