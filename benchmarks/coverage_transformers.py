"""Families of transformers' models, small and with random weights, as they are trained: heads and losses included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

Made = tuple[nn.Module, Any]

VOCABULARY = 512
BATCH, LENGTH = 2, 32
LAYERS, WIDTH, HEADS, INNER = 8, 64, 4, 128

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def language(model: str, config: str, **settings: Any) -> Callable[[], Made]:
    """A model that is given tokens and predicts tokens."""

    def make() -> Made:
        made = getattr(tf, model)(getattr(tf, config)(**settings))
        ids = tokens()
        return made, {"input_ids": ids, "labels": ids.clone()}

    return make


def returning(make: Callable[[], Made], **asked: bool) -> Callable[[], Made]:
    """The same model, asked for further results."""

    def with_more() -> Made:
        model, sample = make()
        return model, {**sample, **asked}

    return with_more


def pair(model: str, config: str, **settings: Any) -> Callable[[], Made]:
    """An encoder and a decoder."""
    return language(model, config, **settings)


def image_classifier(
    model: str, config: str, *, image: int = 32, channels: int = 3, **settings: Any
) -> Callable[[], Made]:
    """A model that classifies images."""

    def make() -> Made:
        made = getattr(tf, model)(getattr(tf, config)(num_labels=10, **settings))
        return made, {
            "pixel_values": torch.randn(BATCH, channels, image, image),
            "labels": torch.randint(0, 10, (BATCH,)),
        }

    return make


def clip() -> Made:
    text = {**TEXT, "projection_dim": 32}
    vision = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "image_size": 32,
        "patch_size": 8,
        "projection_dim": 32,
    }
    model = tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))
    return model, {"input_ids": tokens(), "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}


def whisper() -> Made:
    config = tf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        max_source_positions=64,
        max_target_positions=64,
        num_mel_bins=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = tf.WhisperForConditionalGeneration(config)
    model.config.apply_spec_augment = False
    return model, {"input_features": torch.randn(BATCH, 16, 128), "labels": tokens()}


def speech(model: str, config: str, **settings: Any) -> Callable[[], Made]:
    def make() -> Made:
        shape = {
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": INNER,
            "conv_dim": (32, 32, 32),
            "conv_stride": (5, 4, 2),
            "conv_kernel": (10, 8, 4),
            "num_feat_extract_layers": 3,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "vocab_size": 32,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
            "classifier_proj_size": 32,
            "num_labels": 10,
        }
        made = getattr(tf, model)(getattr(tf, config)(**{**shape, **settings}))
        return made, {"input_values": torch.randn(BATCH, 4000), "labels": torch.randint(0, 10, (BATCH,))}

    return make


def segformer() -> Made:
    config = tf.SegformerConfig(
        num_labels=5, depths=[2, 2, 2, 2], hidden_sizes=[16, 32, 48, 64], decoder_hidden_size=32
    )
    labels = torch.randint(0, 5, (BATCH, 64, 64))
    return tf.SegformerForSemanticSegmentation(config), {
        "pixel_values": torch.randn(BATCH, 3, 64, 64),
        "labels": labels,
    }


_ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS // 2,
    "decoder_layers": LAYERS // 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": INNER,
    "num_layers": LAYERS // 2,
    "num_heads": HEADS,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": WIDTH // HEADS}
_EXPERTS = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}

_SHARED_EXPERT = {
    **_GROUPED,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}

FAMILIES: dict[str, Callable[[], Made]] = {
    "gpt2": language("GPT2LMHeadModel", "GPT2Config", **_GPT2),
    "llama": language("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    "qwen2": language("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED),
    "qwen3": language("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED),
    "mistral": language("MistralForCausalLM", "MistralConfig", **_GROUPED),
    "gemma": language("GemmaForCausalLM", "GemmaConfig", **_GROUPED),
    "gemma2": language("Gemma2ForCausalLM", "Gemma2Config", **_GROUPED),
    "mixtral": language("MixtralForCausalLM", "MixtralConfig", **_EXPERTS),
    "mixtral-router-losses": returning(
        language("MixtralForCausalLM", "MixtralConfig", **_EXPERTS), output_router_logits=True
    ),
    "qwen2-moe-router-losses": returning(
        language("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_SHARED_EXPERT), output_router_logits=True
    ),
    "llama-hidden-states": returning(
        language("LlamaForCausalLM", "LlamaConfig", **_GROUPED), output_hidden_states=True
    ),
    "bert-hidden-states": returning(language("BertForMaskedLM", "BertConfig", **TEXT), output_hidden_states=True),
    "t5-hidden-states": returning(pair("T5ForConditionalGeneration", "T5Config", **_T5), output_hidden_states=True),
    "mamba": language(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        state_size=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "bert": language("BertForMaskedLM", "BertConfig", **TEXT),
    "roberta": language("RobertaForMaskedLM", "RobertaConfig", **{**TEXT, "max_position_embeddings": 160}),
    "distilbert": language(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        vocab_size=VOCABULARY,
        dim=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        hidden_dim=INNER,
        max_position_embeddings=128,
        pad_token_id=0,
    ),
    "albert": language("AlbertForMaskedLM", "AlbertConfig", **TEXT, embedding_size=32),
    "electra": language("ElectraForMaskedLM", "ElectraConfig", **TEXT, embedding_size=32),
    "deberta": language(
        "DebertaForMaskedLM", "DebertaConfig", **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "deberta-v2": language(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        **TEXT,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=16,
        share_att_key=True,
    ),
    "t5": pair("T5ForConditionalGeneration", "T5Config", **_T5),
    "bart": pair("BartForConditionalGeneration", "BartConfig", **_ENCODER_DECODER),
    "whisper": whisper,
    "opt": language(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        ffn_dim=INNER,
        word_embed_proj_dim=WIDTH,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "bloom": language(
        "BloomForCausalLM",
        "BloomConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "falcon": language(
        "FalconForCausalLM",
        "FalconConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "phi": language("PhiForCausalLM", "PhiConfig", **TEXT),
    "gpt-neox": language("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT),
    "vit": image_classifier(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        image_size=32,
        patch_size=8,
    ),
    "swin": image_classifier(
        "SwinForImageClassification",
        "SwinConfig",
        image=64,
        image_size=64,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2, 4],
        num_heads=[2, 2, 4],
        window_size=4,
    ),
    "convnext": image_classifier(
        "ConvNextForImageClassification", "ConvNextConfig", image=64, depths=[2, 2, 4, 2], hidden_sizes=[16, 32, 48, 64]
    ),
    "segformer": segformer,
    "clip": clip,
    # Not looked at while the rules were written:
    "gpt-neo": language(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        attention_types=[[["global", "local"], LAYERS // 2]],
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gptj": language(
        "GPTJForCausalLM",
        "GPTJConfig",
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        rotary_dim=8,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "codegen": language(
        "CodeGenForCausalLM",
        "CodeGenConfig",
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        rotary_dim=8,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "olmo": language("OlmoForCausalLM", "OlmoConfig", **_GROUPED),
    "stablelm": language("StableLmForCausalLM", "StableLmConfig", **_GROUPED),
    "starcoder2": language("Starcoder2ForCausalLM", "Starcoder2Config", **_GROUPED),
    "cohere": language("CohereForCausalLM", "CohereConfig", **_GROUPED),
    "qwen2-moe": language("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_SHARED_EXPERT),
    "pegasus": pair("PegasusForConditionalGeneration", "PegasusConfig", **_ENCODER_DECODER),
    "mbart": pair("MBartForConditionalGeneration", "MBartConfig", **_ENCODER_DECODER),
    "marian": pair("MarianMTModel", "MarianConfig", **_ENCODER_DECODER),
    "deit": image_classifier(
        "DeiTForImageClassification",
        "DeiTConfig",
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        image_size=32,
        patch_size=8,
    ),
    "beit": image_classifier(
        "BeitForImageClassification",
        "BeitConfig",
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        image_size=32,
        patch_size=8,
    ),
    "resnet-hf": image_classifier(
        "ResNetForImageClassification",
        "ResNetConfig",
        image=64,
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[2, 2, 2, 2],
        layer_type="basic",
    ),
    "wav2vec2": speech("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config"),
    "hubert": speech("HubertForSequenceClassification", "HubertConfig"),
}
