"""Reasons why known kinds of models are not supported, by `model_type` of config.json."""

_AUDIO = "it reads audio, and the service reads texts"
_EXPERTS = "it is a mixture of experts, and the graphs have no node that selects experts"
_IMAGES = "it reads images, and the service reads texts"
_RECURRENT = "its recurrent state-space layers have no graphs here"
_SPARSE = "its sparse attention depends on the length of the text and is not implemented"

REASONS = {
    "deberta": "the attention of the first generation of DeBERTa differs from that of the second and third one "
    "(deberta-v2), which are supported",
    "gliner": "GLiNER compares spans of words with labels in the prompt, a head that is not implemented",
    **dict.fromkeys(("whisper", "wav2vec2", "hubert", "seamless_m4t", "seamless_m4t_v2", "speech_to_text"), _AUDIO),
    **dict.fromkeys(
        (
            "dbrx", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "jamba",
            "llama4", "mixtral", "nllb-moe", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "switch_transformers",
        ),
        _EXPERTS,
    ),
    **dict.fromkeys(
        (
            "blip", "blip-2", "clip", "git", "idefics3", "layoutlm", "layoutlmv3", "llava", "mllama", "paligemma",
            "qwen2_5_vl", "qwen2_vl", "siglip", "trocr", "vision-encoder-decoder", "vit",
        ),
        _IMAGES,
    ),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "recurrent_gemma"), _RECURRENT),
    **dict.fromkeys(("big_bird", "bigbird_pegasus", "led", "longformer", "longt5", "reformer"), _SPARSE),
}  # fmt: skip
