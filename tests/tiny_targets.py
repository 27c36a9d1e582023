"""Small real models and tokenizers for tests: random weights, true architectures, several kinds of chat template."""

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{% for m in messages %}{% if loop.first %}<|begin|>{% endif %}<|header|>{{ m['role'] }}<|/header|>\n\n"
    "{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# Reasoning stays in the last turn only, and the generation prompt opens it: no answer is a plain suffix of its prompt.
FORGETS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

CORPUS = [
    "the cat sat on the mat and looked at the moon",
    "Be brief. user assistant system model why is the sky blue? because of the air.",
    "one two three four five six seven eight nine ten",
]
SPECIAL_TOKENS = ["<|im_end|>", "<|im_start|>", "<|begin|>", "<|header|>", "<|/header|>", "<turn>"]


def tiny_tokenizer(chat_template: str | None = CHATML, mask_token: str | None = None) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of about 300 tokens; `<|im_end|>` (id 0) ends a response."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", mask_token=mask_token, chat_template=chat_template
    )


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random token ids that are not `<|im_end|>`, the same for the same seed."""
    return torch.randint(1, 300, shape, generator=torch.Generator().manual_seed(seed))


def tiny_model(num_layers: int = 4, *, tied: bool = True, vocab_size: int = 320) -> Qwen3ForCausalLM:
    """Return a random Qwen3 whose layers are scaled up, so that its output depends on the whole text before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
        )
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            for parameter in model.model.layers.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(10)
    return model.eval()


def tiny_of(model_type: str, **changes: object) -> PreTrainedModel:
    """Return a random eight-layer target of 97 tokens of any architecture, for the drafters of `tiny_models`.

    Args:
        model_type: As transformers names it; one with a vision tower becomes the whole multimodal model.
        changes: Fields of its text configuration.
    """
    text: dict[str, object] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1,
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
    }  # fmt: skip
    text |= changes
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    multimodal = model_type in {"qwen3_5", "qwen3_5_moe"}
    config = (
        AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
        if multimodal
        else AutoConfig.for_model(model_type, **text)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (AutoModelForImageTextToText if multimodal else AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    return model.eval().requires_grad_(False)
