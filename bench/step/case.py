"""What every contestant steps on: the same weights, batch, anchors and dtype, made from seeds.

The geometry is SmolLM2-135M's: a width of 576, five tapped layers, two drafter layers, blocks of 8. Four conversations
of 200 tokens begin with a prompt of 40; each has 24 anchors, none in its last block, because not everybody draws there.
The target's embedding and head are bfloat16, the drafter's weights float32 under bfloat16 autocast.

The head's rows are random directions, and the target's last hidden state at a position is the row of the token that
comes next, ten times over. So the target's own choice is that token, and whoever makes labels out of the target's
logits gets the labels that the others read from the text.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.anchors import Anchors, sample_anchors
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig

NUM_SEQUENCES, NUM_TOKENS, NUM_PROMPT_TOKENS, NUM_ANCHORS = 4, 200, 40, 24
BLOCK_SIZE, GAMMA, GRAD_CLIP = 8, 4.0, 1.0
# Ten times as fast, the same batch again and again makes losses jump, and rounding decides how far.
LEARNING_RATE = 1e-4
HIDDEN_SIZE = 576
NUM_THREADS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch and all that goes with it; B sequences, S tokens, H hidden size, V vocabulary, L tapped layers."""

    config: DrafterConfig
    weights: dict[str, Tensor]
    """Of the drafter, by their published names."""
    embedding_weight: Tensor
    """[V, H]"""
    head_weight: Tensor
    """[V, H]"""
    input_ids: Tensor
    """[B, S]"""
    loss_mask: Tensor
    """[B, S]"""
    target_hidden: Tensor
    """[B, S, L*H]"""
    last_hidden: Tensor
    """[B, S, H] what the target's head would be given."""
    anchors: Anchors


def make_case(vocab_size: int) -> Case:
    """Make the case for a vocabulary."""
    config = DrafterConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=8192,
        block_size=BLOCK_SIZE,
        mask_token_id=4,
        target_layer_ids=(1, 7, 13, 20, 27),
        num_target_layers=30,
        target_hidden_size=HIDDEN_SIZE,
        layer_types=("full_attention", "full_attention"),
    )
    generator = torch.Generator().manual_seed(11)
    input_ids = torch.randint(5, vocab_size, (NUM_SEQUENCES, NUM_TOKENS), generator=generator)
    loss_mask = torch.ones(NUM_SEQUENCES, NUM_TOKENS, dtype=torch.bool)
    loss_mask[:, :NUM_PROMPT_TOKENS] = False
    head_weight = (torch.randn(vocab_size, HIDDEN_SIZE, generator=generator) / HIDDEN_SIZE**0.5).bfloat16()
    target_hidden = torch.randn(NUM_SEQUENCES, NUM_TOKENS, 5 * HIDDEN_SIZE, generator=generator)
    return Case(
        config=config,
        weights=Drafter(config, generator).state_dict(),
        embedding_weight=torch.randn(vocab_size, HIDDEN_SIZE, generator=generator).bfloat16(),
        head_weight=head_weight,
        input_ids=input_ids,
        loss_mask=loss_mask,
        target_hidden=target_hidden.bfloat16(),
        last_hidden=10 * head_weight[input_ids.roll(-1, dims=1)],
        anchors=sample_anchors(loss_mask[:, : NUM_TOKENS - BLOCK_SIZE], NUM_ANCHORS, torch.Generator().manual_seed(12)),
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the peers step with, as fast as torch has it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def descend(loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Do what the peers leave to their caller: backward pass, clipping and update; returns the loss."""
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def serve(make_step: Callable[[Case], Callable[[], float]]) -> None:
    """Make one step for each line on standard input and answer each with a line of JSON.

    A step returns its loss. `peak_bytes` is the most memory that the process held during the step beyond what it held
    before its first step: activations, gradients and optimizer states, but neither weights nor libraries.
    """
    torch.set_num_threads(NUM_THREADS)
    step = make_step(make_case(int(sys.argv[1])))
    resident_bytes = _status_bytes("VmRSS")
    _answer({"ready": True})
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the peak since now
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        loss = step()
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        peak_bytes = _status_bytes("VmHWM") - resident_bytes
        _answer({"loss": loss, "wall_s": wall_s, "cpu_s": cpu_s, "peak_bytes": peak_bytes})


def _answer(content: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
