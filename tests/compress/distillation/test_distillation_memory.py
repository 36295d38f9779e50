"""Peak memory of a step of distillation with a large vocabulary, as the operating system sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, torch
from compress.distillation.recipes import RECIPES
from compress.run.clock import Clock
from compress.distillation.response_distillation import KnowledgeAugmentation, ResponseLoss, Responses, ResponseTeacher
from compress.training.training import Trainer, TrainingOptions
from calibrate.instructions import Example
from engine.families.resolve import decoder_config
from engine.families.tensor_shapes import expected_tensors
from engine.decoder.model import Decoder
from engine.decoder.parameters import parameters_on_disk
from engine.generation.report import peak_memory_bytes

def decoder(seed):
    common = {"vocab_size": 128256, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 4, "intermediate_size": 128, "max_position_embeddings": 1024}
    config = decoder_config({"model_type": "llama", "tie_word_embeddings": True} | common)
    generator, shapes = torch.Generator().manual_seed(seed), expected_tensors(config)
    return Decoder(config, lambda name: 0.1 * torch.randn(shapes[name], generator=generator))

teacher, student = decoder(0), decoder(1)
tokens = torch.randint(128256, (512,), generator=torch.Generator().manual_seed(0)).tolist()
responses = Responses([Example(tokens[:1], tokens[1:])], Clock())
taught = ResponseTeacher(teacher, RECIPES["kd"], KnowledgeAugmentation(), Clock())
trainer = Trainer(parameters_on_disk(student), ResponseLoss(student, taught, responses, RECIPES["kd"]),
                  TrainingOptions(1, 1e-3, 1), 1, 512)
before = peak_memory_bytes()
trainer.gradients(0)
trainer.update(0)
print(json.dumps(peak_memory_bytes() - before))
"""


@pytest.mark.slow
def test_a_step_at_a_vocabulary_of_128256_stays_small() -> None:
    """With 512 tokens, the logits of both models and their gradients would exceed 1 GB. Gradients and moments count too."""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    above = json.loads(done.stdout)
    print(f"{above / 1e9:.2f} GB above the models")
    assert 0 < above < 1.5e9
